"""The columns of a data set: which kind each one is of, how its cells become integers, and integers cells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from xorflow.data.checks import validate
from xorflow.data.columns import KINDS, Column, Moment, Number, column_from_json
from xorflow.data.columns.tally import Tally
from xorflow.data.columns.types import Cells, is_text, python_values, restored, value_type
from xorflow.data.delimited import SEPARATORS
from xorflow.data.kinds import kind_of
from xorflow.data.schema_file import LEFT_OUT, Wish
from xorflow.data.tables import as_table
from xorflow.data.texts import read_texts
from xorflow.errors import DataError

_VERSION = 1
_FEW, _WIDE = 4, 40
"""How many values are shown, in how many letters."""


@dataclass(frozen=True)
class Schema:
    """The columns of a table, in its order, and those that are left out of the model, with the reasons.

    >>> schema = Schema.fit(pa.table({"pet": ["cat", "ox", "cat"], "legs": [4, 4, 4]}))
    >>> schema.encode(pa.table({"legs": [4, 3], "pet": ["ox", None]}))
    array([[1, 0],
           [2, 1]], dtype=uint8)
    >>> schema.decode(np.array([[1, 0]])).to_pylist()
    [{'pet': 'ox', 'legs': 4}]

    Attributes:
        columns: those that the model has.
        left_out: why others are not there, by name.
        order: the names of all of them, as they came.
        gaps: texts that stand for a gap, beside the usual ones, by column.
        layout: how a file like the one that came is written, see `tables.Source`.
    """

    columns: tuple[Column, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    gaps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        table: Any,
        wishes: Mapping[str, Wish] | None = None,
        *,
        rare: int = 0,
        layout: Mapping[str, Any] | None = None,
    ) -> Schema:
        """The columns of training rows, a frame or an Arrow table; kinds follow from values, but for `wishes`.

        `rare` merges the values of categories that occur in fewer rows.
        """
        table = as_table(table)
        tallies = [Tally.of(name, table[name]) for name in table.column_names]
        return cls.learn(tallies, wishes or {}, rare=rare, layout=layout)

    @classmethod
    def learn(
        cls,
        tallies: Sequence[Tally],
        wishes: Mapping[str, Wish],
        *,
        rare: int = 0,
        layout: Mapping[str, Any] | None = None,
    ) -> Schema:
        """The same from training rows that were counted."""
        names = [tally.name for tally in tallies]
        columns, left_out, unknown = [], {}, sorted({*wishes} - {*names})
        if unknown:
            raise DataError(
                f"a schema file names columns of the data, and there is no {unknown[0]!r}; there are "
                f"{', '.join(map(repr, names))}"
            )
        for tally in tallies:
            wish = wishes.get(tally.name, Wish())
            kind, why = (KINDS.get(wish.kind), "as the schema file says") if wish.kind else kind_of(tally)
            if kind is None:
                left_out[tally.name] = why
            else:
                columns.append(kind.learn(tally, rare=rare if wish.rare is None else wish.rare))
        if not columns:
            reasons = "; ".join(f"{name!r}: {why}" for name, why in left_out.items())
            raise DataError(f"data must have a column that can be modelled, and all are left out: {reasons}")
        gaps = {name: wish.gaps for name, wish in wishes.items() if wish.gaps}
        return cls(tuple(columns), left_out, tuple(names), gaps, dict(layout or {}))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def categories(self) -> tuple[int, ...]:
        """K of each column."""
        return tuple(column.categories for column in self.columns)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    # ---- cells and states ----

    def cells(self, table: Any) -> dict[str, Cells]:
        """The cells of each column, by its name: others are ignored, texts are read as the column's type."""
        table = as_table(table)
        lacking = [name for name in self.names if name not in table.schema.names]
        if lacking:
            raise DataError(
                f"columns are found by their names, and there is no {', '.join(map(repr, lacking[:5]))} among "
                f"{', '.join(map(repr, table.schema.names[:20]))}; add what is lacking"
            )
        return {column.name: self._cells(column, table[column.name]) for column in self.columns}

    def encode(self, table: Any) -> np.ndarray:
        """The states (N, D) of rows of a frame or an Arrow table, uint8 where every K <= 256, else int64."""
        return self.states(self.cells(table))

    def states(self, cells: Mapping[str, Cells]) -> np.ndarray:
        """The states (N, D) of what `cells` gave."""
        kind = np.uint8 if max(self.categories) <= 256 else np.int64
        codes = np.empty((len(next(iter(cells.values()))), len(self.columns)), kind)
        for d, column in enumerate(self.columns):
            codes[:, d] = column.encode(cells[column.name])
        return codes

    def log_density(self, cells: Mapping[str, Cells], codes: np.ndarray) -> np.ndarray:
        """What the places of cells within their states add to log p of rows, float64 (N,); of what `cells` gave."""
        densities = (
            column.log_density(cells[column.name], codes[:, d]) for d, column in enumerate(self.columns)
        )
        return sum(densities, np.zeros(len(codes)))

    def shown(self, codes: np.ndarray, seed: int) -> np.ndarray:
        """States of training rows, some of which show what no training row has, at the rate at which it is to be expected."""
        generator, shown = np.random.Generator(np.random.Philox(seed)), codes.copy()
        for d, column in enumerate(self.columns):
            shown[:, d] = column.with_unseen(codes[:, d], generator)
        return shown

    def decode(self, codes: Any, seed: int = 0) -> pa.Table:
        """Rows for states (N, D), in the types that came in; where within their states is drawn by the seed."""
        codes = validate(codes, self.categories, allow_empty=True).cpu().numpy()
        if codes.ndim != 2:
            raise DataError(f"rows of states have shape (N, {len(self.columns)}), got {codes.shape}")
        uniforms = np.random.Generator(np.random.Philox(seed)).random(codes.shape)
        cells = [column.decode(codes[:, d], uniforms[:, d]) for d, column in enumerate(self.columns)]
        return pa.table(cells, names=[*self.names])

    def with_left_out(self, rows: pa.Table, kind: pa.DataType | None = None) -> pa.Table:
        """Rows with all columns that came in, in their order; those that are left out are gaps, of any type."""
        gaps = pa.nulls(len(rows), kind or pa.null())
        return pa.table({name: rows[name] if name in self.names else gaps for name in self.order})

    def _cells(self, column: Column, cells: Cells) -> Cells:
        if not is_text(cells.type):
            return cells
        return read_texts(cells, value_type(column.type), column.name, self.gaps.get(column.name, ()))

    # ---- what people read ----

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Column, kind, values, gaps, and what happens to it, for each column in its order."""
        by_name = {column.name: column for column in self.columns}
        return [
            _row(by_name[name]) if name in by_name else (name, LEFT_OUT, "", "", self.left_out[name])
            for name in self.order
        ]

    def __str__(self) -> str:
        rows = [("column", "kind", "values", "gaps", "what happens"), *self.rows()]
        widths = [max(len(row[place]) for row in rows) for place in range(4)]
        return "\n".join(
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]
            ).rstrip()
            for row in rows
        )

    # ---- kept ----

    def to_json(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "layout": dict(self.layout),
            "order": list(self.order),
            "left_out": dict(self.left_out),
            "gaps": {name: list(texts) for name, texts in self.gaps.items()},
            "columns": [column.to_json() for column in self.columns],
        }

    @classmethod
    def from_json(cls, data: Any) -> Schema:
        """The inverse of `to_json`, with its input checked."""
        match data:
            case {
                "version": 1,
                "layout": dict() as layout,
                "order": list() as order,
                "left_out": dict() as left_out,
                "gaps": dict() as gaps,
                "columns": [_, *_] as columns,
            }:
                schema = cls(
                    tuple(map(column_from_json, columns)), left_out, tuple(order), _texts(gaps), layout
                )
                if (
                    _texts({"": order})
                    and sorted(order) == sorted([*schema.names, *left_out])
                    and _is_layout(layout)
                ):
                    return schema
        raise DataError(
            "a schema has columns, their order, and why others are left out; this one is damaged: restore it"
        )


def _texts(given: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Lists of texts, and none twice, from JSON."""
    for texts in given.values():
        if not isinstance(texts, list) or {*map(type, texts)} - {str} or len({*texts}) < len(texts):
            raise DataError(f"a schema lists names and texts, and this one has {texts!r:.100}; restore it")
    return {name: tuple(texts) for name, texts in given.items()}


def _is_layout(layout: Mapping[str, Any]) -> bool:
    kinds = {"format": str, "separator": str, "header": bool}
    known = all(type(value) is kinds.get(key) for key, value in layout.items())
    return known and layout.get("separator", ",") in SEPARATORS and layout.get("format", "csv").isalnum()


# ---- as a table ----


def _row(column: Column) -> tuple[str, str, str, str, str]:
    states = f"{column.categories} states, {column.measure}"
    return column.name, column.kind, _values(column), "yes" if column.gaps else "", states


def _values(column: Column) -> str:
    if isinstance(column, Number):
        low, high = column.ends
        if isinstance(column, Moment):
            ticks = np.rint(np.array([low, high]) * column.tick).astype(np.int64)
            return " to ".join(map(str, python_values(restored(pa.array(ticks), column.type))))
        return f"{low:.6g} to {high:.6g}"
    values = [*getattr(column, "values", ())]
    shown = ", ".join(str(value) for value in values[:_FEW])
    more = f", ... ({len(values):,})" if len(values) > _FEW else ""
    return f"{shown[:_WIDE]}{'...' if len(shown) > _WIDE else ''}{more}"
