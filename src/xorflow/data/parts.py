"""The parts of a data set: rows that are named by a column, held by other files, or drawn by a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from xorflow._math import philox_raw
from xorflow.data.arrow import compute as pc
from xorflow.data.dataset import ORDER
from xorflow.errors import DataError

_SHARE = 0.1
"""Of rows that validate, and of those that test, unless it is said; but not more than `_MOST`."""

_MOST = 100_000

_WORDS = 2**20
"""So many rows are looked at at a time."""

_NAMES = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
"""How a column names parts."""


@dataclass(frozen=True)
class Parts:
    """Which rows do what: a column says it, other files or frames hold them, and what is then open is drawn by a seed.

    Attributes:
        validation: how many rows validate, a fraction (float) or a number (int); by default a tenth, at most 100,000.
        test: how many rows test, likewise.
        held_out: other files or frames, by the name of the part that they are.
        column: that says of each row of a table which part it is of.
        seed: of the draw.
    """

    validation: float | int | None = None
    test: float | int | None = None
    held_out: Mapping[str, Any] = field(default_factory=dict)
    column: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, share in (("validation", self.validation), ("test", self.test)):
            if share and (name in self.held_out or self.column is not None):
                raise DataError(
                    f"{name}= draws rows, and which rows those are is said already: leave {name} out"
                )
        if self.column is not None and self.held_out:
            raise DataError(
                f"part= says of all rows what they are for: leave out part, or {next(iter(self.held_out))}_data"
            )

    def drawn(self, rows: int) -> dict[str, np.ndarray]:
        """Rows in the order of the seed: first those that test, then those that validate; the rest trains, and is not empty."""
        test, validation = self.counts(rows)
        split = np.split(shuffled(rows, self.seed), [test, test + validation])
        parts = dict(zip(("test", "validation", "train"), split, strict=True))
        return {name: each for name, each in parts.items() if len(each)}

    def counts(self, rows: int) -> tuple[int, int]:
        """How many of so many rows test and validate; some are left to train."""
        test, validation = (self._count(name, rows) for name in ("test", "validation"))
        if rows < 1 + test + validation:
            raise DataError(
                f"the split needs {1 + test + validation} rows or more, 1 to train, {validation} to validate and {test} to "
                f"test, got {rows}; lower validation= and test=, or bring more rows"
            )
        return test, validation

    def _count(self, name: str, rows: int) -> int:
        share = 0 if name in self.held_out else getattr(self, name)
        if share is None:
            return min(max(1, round(rows * _SHARE)), _MOST)
        if isinstance(share, bool) or not share >= 0 or (isinstance(share, float) and share >= 1):
            raise DataError(f"{name}= is a fraction in [0, 1) or a number of rows, got {share!r}")
        # A part that was asked for is never empty, however small the fraction.
        return max(1, round(rows * share)) if isinstance(share, float) and share else int(share)

    def named(self, table: pa.Table) -> dict[str, np.ndarray]:
        """The rows of each part that the column names."""
        parts = self.names(table)
        rows = {name: np.flatnonzero(parts == name) for name in ("train", "validation", "test")}
        self.require_training(len(rows["train"]))
        return {name: each for name, each in rows.items() if len(each)}

    def names(self, table: pa.Table | pa.RecordBatch) -> np.ndarray:
        """The part of each row, as the column names it."""
        column = self.column
        if column not in table.schema.names:
            raise DataError(
                f"part= names a column, and there is no {column!r} among {', '.join(map(repr, table.schema.names))}"
            )
        kind = table.schema.field(column).type
        if pa.types.is_nested(kind):
            raise DataError(
                f"column {column!r} names the part of each row, one of {', '.join(_NAMES)}, and its cells are {kind}; name "
                "another column"
            )
        distinct = table[column].unique().to_pylist()
        words = {cell: str(cell).strip().lower() for cell in distinct}
        odd = [cell for cell, word in words.items() if word not in _NAMES]
        if odd:
            raise DataError(
                f"column {column!r} names the part of each row, one of {', '.join(_NAMES)}; one row has "
                f"{odd[0]!r}: mend it"
            )
        parts = np.array([_NAMES[word] for word in words.values()])
        return parts[pc.index_in(table[column], value_set=pa.array(distinct, kind)).to_numpy()]

    def require_training(self, rows: int) -> None:
        """Refuse a column that names no row for training."""
        if not rows:
            raise DataError(
                f"column {self.column!r} names the part of each row, and no row is to train; mend it"
            )

    def last_words(self, rows: int) -> tuple[int, int]:
        """Of so many rows that are drawn: the last raw word of those that test, and of those that validate; -1: there are none.

        So a row's part is known from its own word alone, and is that which `drawn` gives it.
        """
        test, validation = self.counts(rows)
        if not test + validation:
            return -1, -1
        least = np.zeros(0, np.uint64)
        for first in range(0, rows, _WORDS):
            some = words(min(_WORDS, rows - first), self.seed, first)
            least = np.sort(np.concatenate([least, some]))[: test + validation]
        return int(least[test - 1]) if test else -1, int(least[-1])


def shuffled(count: int, seed: int) -> np.ndarray:
    """A permutation of 0..count - 1 from the seed: the order of `count` raw words."""
    return np.argsort(words(count, seed), kind="stable")


def words(count: int, seed: int, first: int = 0) -> np.ndarray:
    """The raw words of so many rows, from the first on."""
    block, offset = divmod(first, 4)
    return philox_raw(seed, ORDER, offset + count, first_block=block)[offset:]
