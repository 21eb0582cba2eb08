"""Columns whose values have masses: categories, booleans, integers in order, constants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from xorflow.data.checks import LIMIT
from xorflow.data.columns.base import Column, common_fields, damaged, require_rows, shown_unseen
from xorflow.data.columns.tally import Tally
from xorflow.data.columns.types import Cells, plain, type_text
from xorflow.errors import DataError

_JSON = {pa.large_string(): str, pa.int64(): int, pa.float64(): float, pa.bool_(): bool, pa.null(): str}


@dataclass(frozen=True)
class Discrete(Column):
    """Values, sorted, each a state of its own; rare ones share one, within which each has its share of training rows.

    Attributes:
        values: those with a state of their own.
        rare: those that share one.
        rare_rows: in how many training rows each of them occurs.
    """

    values: tuple[Any, ...]
    rare: tuple[Any, ...] = ()
    rare_rows: tuple[int, ...] = ()

    @classmethod
    def learn(cls, tally: Tally, *, rare: int = 0) -> Self:
        require_rows(tally)
        name, distinct, counts = tally.name, tally.values, tally.counts
        if distinct.type == pa.float64():  # no state is infinite
            finite = np.isfinite(distinct.to_numpy())
            distinct, counts = distinct.filter(pa.array(finite)), counts[finite]
        merged = counts < rare
        if (~merged).sum() > LIMIT:
            raise DataError(
                f"column {name!r} has {int((~merged).sum()):,} different values, and at most {LIMIT:,} can have a state of "
                "their own: leave it out, or merge rare values, as with --rare 5"
            )
        return cls(
            name=name,
            type=tally.type,
            gaps=tally.gaps > 0,
            rows=tally.rows,
            shown=shown_unseen(int((counts == 1).sum()), tally.rows),
            values=tuple(distinct.filter(pa.array(~merged)).to_pylist()),
            rare=tuple(distinct.filter(pa.array(merged)).to_pylist()),
            rare_rows=tuple(counts[merged].tolist()),
        )

    @property
    def states(self) -> int:
        return len(self.values) + bool(self.rare)

    @property
    def measure(self) -> str:
        return "mass"

    def to_json(self) -> dict[str, Any]:
        content = super().to_json() | {"values": list(self.values)}
        if self.rare:
            content |= {"rare": list(self.rare), "rare_rows": list(self.rare_rows)}
        return content

    @classmethod
    def from_json(cls, data: Any) -> Self:
        common = common_fields(data)
        values, rare, rows = (data.get(key, []) for key in ("values", "rare", "rare_rows"))
        if not all(isinstance(part, list) for part in (values, rare, rows)) or len(rare) != len(rows):
            raise damaged(data)
        column = cls(**common, values=tuple(values), rare=tuple(rare), rare_rows=tuple(rows))
        kind = _JSON[column._known_type]
        if not (
            all(type(value) is kind and value == value for value in (*values, *rare))
            and len({*values, *rare}) == len(values) + len(rare)
            and len(values) <= LIMIT
            and all(type(count) is int and 1 <= count <= column.rows for count in rows)
            and list(values) == sorted(values)  # models may split on their order
        ):
            raise damaged(data)
        try:
            _ = column._known
        except (ValueError, OverflowError):  # of no text, or of integers that no int64 holds
            raise damaged(data) from None
        return column

    @cached_property
    def _known_type(self) -> pa.DataType:
        return plain(pa.nulls(0, self.type), self.name).type

    @cached_property
    def _known(self) -> pa.Array:
        return pa.array([*self.values, *self.rare], self._known_type)

    @cached_property
    def _rare_shares(self) -> np.ndarray:
        counts = np.array(self.rare_rows, np.float64)
        return counts / counts.sum()

    def _plain(self, values: Cells) -> pa.Array:
        cells, known = plain(values, self.name), self._known_type
        came = cells.type
        numbers = (pa.int64(), pa.float64())
        if came in (known, pa.null()) or (came in numbers and known in numbers):
            return cells
        if known == pa.null():  # training rows had nothing but gaps, and no text looks like one
            return cells
        raise DataError(
            f"column {self.name!r} holds {type_text(self.type)}, as its training rows do, and got {type_text(values.type)}: "
            "convert it"
        )

    def _places(self, cells: pa.Array) -> np.ndarray:
        """Where each cell is among the known values; len(known) if nowhere."""
        known = self._known
        if cells.type != known.type:
            if pa.null() in (cells.type, known.type):
                return np.full(len(cells), len(known))
            known, cells = known.cast(pa.float64(), safe=False), cells.cast(pa.float64(), safe=False)
        places = pc.call_function("index_in", [cells], pc.SetLookupOptions(known)).fill_null(len(known))
        return places.to_numpy(zero_copy_only=False).astype(np.int64)

    def _encode(self, cells: pa.Array) -> np.ndarray:
        places = self._places(cells)
        codes = np.minimum(places, len(self.values))
        return np.where(places == len(self._known), self.unseen, codes)

    def _decode(self, codes: np.ndarray, uniforms: np.ndarray) -> pa.Array:
        places = np.array(codes, np.int64)
        if self.rare:
            merged = places == len(self.values)
            drawn = self._rare_shares.cumsum()[:-1].searchsorted(uniforms[merged], side="right")
            places[merged] += drawn
        return self._known.take(pa.array(places))

    def log_density(self, values: Cells, codes: np.ndarray) -> np.ndarray:
        return super().log_density(values, codes) if self.rare else np.zeros(len(codes))

    def _log_density(self, cells: pa.Array, codes: np.ndarray) -> np.ndarray:
        added, merged = np.zeros(len(codes)), codes == len(self.values)
        shares = self._rare_shares[self._places(cells.filter(pa.array(merged))) - len(self.values)]
        added[merged] = np.log(shares)
        return added


class Category(Discrete):
    """Values without an order that matters."""

    kind: ClassVar[str] = "category"


class Boolean(Discrete):
    """True and False, as far as training rows have them."""

    kind: ClassVar[str] = "boolean"


class Integer(Discrete):
    """Numbers in their order, each with a mass."""

    kind: ClassVar[str] = "integer"


class Constant(Discrete):
    """One value, or nothing but gaps."""

    kind: ClassVar[str] = "constant"
