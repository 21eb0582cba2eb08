"""What a column is: cells of a table that become states of a model, and states that become cells."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from xorflow.data.columns.tally import Tally
from xorflow.data.columns.types import Cells, plain, restored, type_of_text, type_text
from xorflow.errors import DataError


@dataclass(frozen=True)
class Column(ABC):
    r"""A column of a table, learned from its training rows.

    Its states 0..K-1 are: those of values; one for a gap, if training rows have gaps; and last "something else", whatever no
    training row has. A cell's log p is that of its state plus `log_density`, what its place within the state adds.

    "Something else" has the probability that Good and Turing give the unseen: the share of training rows whose value occurs
    just once, here with one more, so that it is never zero. `with_unseen` shows a model that state at that rate.

    Attributes:
        name: as in the table.
        type: the Arrow type that came in, and goes out.
        gaps: whether training rows have gaps; if not, a gap is something else.
        rows: how many training rows there were.
        shown: how many of them show "something else".
    """

    name: str
    type: pa.DataType
    gaps: bool
    rows: int
    shown: int

    kind: ClassVar[str]

    @classmethod
    @abstractmethod
    def learn(cls, tally: Tally, *, rare: int = 0) -> Self:
        """Learn a column from training rows that were counted; `rare` merges values that occur in fewer rows."""

    @property
    @abstractmethod
    def states(self) -> int:
        """How many states stand for values."""

    @property
    @abstractmethod
    def measure(self) -> str:
        """What log p of a cell is the logarithm of."""

    @property
    def categories(self) -> int:
        """K: the states of values, a gap's, and that of something else."""
        return self.states + self.gaps + 1

    @property
    def unseen(self) -> int:
        """The state of something else."""
        return self.categories - 1

    @property
    def gap(self) -> int:
        """The state of a gap."""
        return self.states if self.gaps else self.unseen

    @property
    def reserved(self) -> dict[int, float]:
        """States that training rows do not have, and the probability that is kept for each."""
        return {self.unseen: self.shown / self.rows}

    def encode(self, values: Cells) -> np.ndarray:
        """The states of cells, int64; a cell that no training row has is something else."""
        cells = self._plain(values)
        codes = np.full(len(cells), self.gap)
        there = cells.is_valid().to_numpy(zero_copy_only=False)
        codes[there] = self._encode(cells.filter(pa.array(there)))
        return codes

    def decode(self, codes: np.ndarray, uniforms: np.ndarray) -> pa.Array:
        """Cells of given states, in the type that came in; `uniforms` in [0, 1) say where within its state each one is.

        "Something else" becomes a gap: what it would be nobody has seen.
        """
        there = np.asarray(codes) < self.states
        cells = self._decode(np.asarray(codes)[there], np.asarray(uniforms)[there])
        places = np.where(there, there.cumsum() - 1, 0)
        taken = cells.take(pa.array(places, mask=~there)) if there.any() else pa.nulls(len(there), cells.type)
        return restored(taken, self.type)

    def log_density(self, values: Cells, codes: np.ndarray) -> np.ndarray:
        """What each cell's place within its state adds to log p, float64; 0 where its state is one value."""
        added = np.zeros(len(codes))
        inside = np.asarray(codes) < self.states
        cells = self._plain(values).filter(pa.array(inside))
        added[inside] = self._log_density(cells, np.asarray(codes)[inside])
        return added

    def with_unseen(self, codes: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """The states of training rows, some of which, chosen at random, show what `reserved` names, at its rate."""
        codes = np.array(codes)
        counts = {state: max(1, round(rate * len(codes))) for state, rate in self.reserved.items()}
        chosen = generator.permutation(len(codes))
        for state, count in counts.items():
            codes[chosen[:count]], chosen = state, chosen[count:]
        return codes

    def show_unseen(self, codes: np.ndarray, generator: np.random.Generator) -> None:
        """The same, in place, of a part of the training rows: each shows a state by chance, at its rate."""
        for state, rate in self.reserved.items():
            if count := generator.binomial(len(codes), min(1.0, rate)):
                codes[generator.integers(0, len(codes), count)] = state

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `from_json` reads them."""
        return {
            "kind": self.kind,
            "name": self.name,
            "type": type_text(self.type),
            "gaps": self.gaps,
            "rows": self.rows,
            "shown": self.shown,
        }

    @classmethod
    @abstractmethod
    def from_json(cls, data: Any) -> Self:
        """The inverse of `to_json`, with its input checked."""

    @abstractmethod
    def _encode(self, cells: pa.Array) -> np.ndarray:
        """The states of cells that are no gaps."""

    @abstractmethod
    def _decode(self, codes: np.ndarray, uniforms: np.ndarray) -> pa.Array:
        """Plain cells of states of values."""

    @abstractmethod
    def _log_density(self, cells: pa.Array, codes: np.ndarray) -> np.ndarray:
        """Of cells in states of values."""

    @abstractmethod
    def _plain(self, values: Cells) -> pa.Array:
        """The cells in the plain type that this column computes with."""


def require_rows(tally: Tally) -> None:
    """Refuse a column of no rows, or of cells that are no single values."""
    if tally.rows == 0:
        raise DataError(f"column {tally.name!r} has no rows: a column is learned from at least one")
    plain(pa.nulls(0, tally.type), tally.name)


def shown_unseen(singletons: int, rows: int) -> int:
    """How many of so many training rows show "something else"."""
    return min(singletons + 1, max(1, rows // 2))


def common_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of every column from JSON, checked."""
    match data:
        case {
            "name": str() as name,
            "type": kind,
            "gaps": bool() as gaps,
            "rows": int() as rows,
            "shown": int() as shown,
        }:
            if type(rows) is int and type(shown) is int and 1 <= shown <= rows < 2**53:
                return {"name": name, "type": type_of_text(kind), "gaps": gaps, "rows": rows, "shown": shown}
    raise damaged(data)


def damaged(data: Any) -> DataError:
    name = data.get("name") if isinstance(data, Mapping) else None
    return DataError(f"column {name!r} of a schema is damaged; restore the file that holds it")
