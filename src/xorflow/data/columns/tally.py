"""What training rows hold in a column, counted batch by batch: all that a column, and its kind, is learned from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from xorflow.data.arrow import compute as pc
from xorflow.data.columns.types import Cells, is_nested, plain

_WAITING = 2**18
"""So many cells are counted at a time, or as many as there are different values, if those are more."""

_MOST_VALUES = 2**20
"""Of a column with more different values a share of the rows is counted, drawn at random."""


@dataclass(frozen=True)
class Tally:
    """The different values of a column's training rows, and in how many rows each one occurs.

    Attributes:
        name: of the column.
        type: the Arrow type that came in.
        values: sorted, in a plain type, without gaps.
        counts: int64, of all rows or, of very many different values, of a share of them.
        rows: how many training rows there were.
        gaps: in how many of them the cell is missing.
        one_way: whether numbers only rise, or only fall, from row to row.
    """

    name: str
    type: pa.DataType
    values: pa.Array
    counts: np.ndarray
    rows: int
    gaps: int
    one_way: bool

    @classmethod
    def of(cls, name: str, values: Cells) -> Tally:
        """That of all cells at once.

        >>> tally = Tally.of("pet", pa.array(["ox", "cat", None, "ox"]))
        >>> tally.values.to_pylist(), tally.counts.tolist(), tally.gaps
        (['cat', 'ox'], [1, 2], 1)
        """
        counting = Counting(name, values.type)
        counting.add(values)
        return counting.tally()


class Counting:
    """Counts the cells of one column as they come.

    Args:
        name: of the column.
        type: the Arrow type of its cells; of nested ones only rows are counted, for no kind of column is for them.
    """

    def __init__(self, name: str, type: pa.DataType) -> None:
        self.name, self.type = name, type
        self.nested = is_nested(type)
        kind = pa.null() if self.nested else plain(pa.nulls(0, type), name).type
        self.values, self.counts = pa.nulls(0, kind), np.zeros(0, np.int64)
        self.rows = self.gaps = 0
        self.rises = self.falls = True
        self.last: np.ndarray = np.zeros(0)
        self.share = 1.0
        self.generator = np.random.Generator(np.random.Philox(0))
        self.waiting: list[pa.Array] = []

    def add(self, values: Cells) -> None:
        """More rows."""
        self.rows += len(values)
        if self.nested:
            return
        cells = plain(values, self.name)
        self.gaps += cells.null_count
        known = cells.drop_null()
        self._follow(known)
        self.waiting.append(known)
        if sum(map(len, self.waiting)) >= max(_WAITING, len(self.values)):
            self._count()

    def tally(self) -> Tally:
        """Of all rows that came."""
        self._count()
        order = pc.array_sort_indices(self.values)
        values, counts = self.values.take(order), self.counts[order.to_numpy()]
        one_way = self.rises or self.falls
        return Tally(self.name, self.type, values, counts, self.rows, self.gaps, one_way)

    def _follow(self, known: pa.Array) -> None:
        if (self.rises or self.falls) and known.type in (pa.int64(), pa.float64()):
            numbers = np.concatenate([self.last, known.to_numpy(zero_copy_only=False)])
            self.rises = self.rises and bool((numbers[1:] > numbers[:-1]).all())
            self.falls = self.falls and bool((numbers[1:] < numbers[:-1]).all())
            self.last = numbers[-1:]

    def _count(self) -> None:
        if not sum(map(len, self.waiting)):
            return
        counted = pa.chunked_array(self.waiting).value_counts()
        values, counts = counted.field(0), counted.field(1).to_numpy()
        self.waiting = []
        if self.share < 1:
            counts = self.generator.binomial(counts, self.share)
        both = pa.table(
            {"value": pa.concat_arrays([self.values, values]), "count": np.concatenate([self.counts, counts])}
        )
        sums = both.group_by("value").aggregate([("count", "sum")])
        self.values = sums["value"].combine_chunks()
        self.counts = sums["count_sum"].to_numpy()
        self._drop_zeros()
        while len(self.values) > _MOST_VALUES:
            self.share /= 2
            self.counts = self.generator.binomial(self.counts, 0.5)
            self._drop_zeros()

    def _drop_zeros(self) -> None:
        there = self.counts > 0
        if not there.all():
            self.values, self.counts = self.values.filter(pa.array(there)), self.counts[there]
