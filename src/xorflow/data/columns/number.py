"""Columns of numbers, and of dates and times, which are numbers: atoms with masses, and densities between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from pyarrow.types import (
    is_decimal,
    is_duration,
    is_floating,
    is_integer,
    is_null,
    is_temporal,
    is_time,
    is_unsigned_integer,
)

from xorflow.data.columns.base import Column, common_fields, damaged, require_rows, shown_unseen
from xorflow.data.columns.bins import Bins
from xorflow.data.columns.tally import Tally
from xorflow.data.columns.types import Cells, plain, ticks_per_day, type_text
from xorflow.errors import DataError

_MOST_ATOMS = 256

_LATTICES = tuple(10.0**exponent for exponent in range(3, -10, -1))


@dataclass(frozen=True)
class Number(Column):
    """Numbers: those that recur are atoms, each with a mass; all others have a density, in bins, and tails beyond.

    The measure is the sum of the counting measure on atoms and of Lebesgue measure elsewhere. States are in order of where
    they lie. A number that is not finite is something else.

    Attributes:
        atoms: the numbers that recur, rising.
        bins: of the other numbers.
        lattice: all training numbers are multiples of it, and so are drawn ones; 0: they are not.
        empty: whether no training row is in any bin.
    """

    atoms: tuple[float, ...]
    bins: Bins
    lattice: float
    empty: bool

    kind: ClassVar[str] = "number"

    @classmethod
    def learn(cls, tally: Tally, *, rare: int = 0) -> Self:
        del rare  # numbers that occur once are in a bin
        require_rows(tally)
        if tally.values.type not in (pa.int64(), pa.float64(), pa.null()):
            raise DataError(f"column {tally.name!r} must hold numbers, and holds {type_text(tally.type)}")
        numbers = tally.values.cast(pa.float64(), safe=False).to_numpy()
        lattice = _lattice(np.unique(numbers[np.isfinite(numbers)]), _precision(tally.type))
        return cls(**cls._learned(tally, numbers, lattice))

    @staticmethod
    def _learned(tally: Tally, numbers: np.ndarray, lattice: float) -> dict[str, Any]:
        """The attributes of a column with the values of a tally, as these numbers."""
        finite = np.isfinite(numbers)
        if not finite.any():
            raise DataError(f"column {tally.name!r} has no finite number in its training rows; leave it out")
        distinct, places = np.unique(numbers[finite], return_inverse=True)  # large integers may be one float
        counts = np.bincount(places, tally.counts[finite]).astype(np.int64)
        recurs = _recurs(counts)
        width = lattice or (float(np.diff(distinct).min()) if len(distinct) > 1 else 1.0)
        span = (float(distinct[0]), float(distinct[-1]))
        return {
            "name": tally.name,
            "type": tally.type,
            "gaps": tally.gaps > 0,
            "rows": tally.rows,
            "shown": shown_unseen(int(tally.counts[~finite].sum()), tally.rows),
            "atoms": tuple(distinct[recurs].tolist()),
            "bins": Bins.fit(distinct[~recurs], counts[~recurs], span, lattice, width),
            "lattice": lattice,
            "empty": bool(recurs.all()),
        }

    @property
    def states(self) -> int:
        return len(self.atoms) + len(self.bins)

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest number of training rows; edges of bins lie beside numbers that are multiples."""
        low, high = self.bins.edges[0] + self.lattice / 2, self.bins.edges[-1] - self.lattice / 2
        return min([low, *self.atoms[:1]]), max([high, *self.atoms[-1:]])

    @property
    def unit(self) -> str:
        return "unit"

    @property
    def measure(self) -> str:
        density = f"density per {self.unit}"
        count = len(self.atoms)
        return f"mass at {count} value{'s' * (count > 1)}, {density} elsewhere" if count else density

    @property
    def reserved(self) -> dict[int, float]:
        rates = super().reserved
        if self.empty:  # a number that is no atom: training rows have none, and none occurs once
            rates |= {int(state): 1 / self.rows / len(self.bins) for state in self._state_of_bin}
        return rates

    @cached_property
    def _order(self) -> np.ndarray:
        """Which atom, or which bin after the atoms, each state is: by where it lies."""
        return np.argsort(np.concatenate([np.array(self.atoms), self.bins.middles]), kind="stable")

    @cached_property
    def _state_of_atom(self) -> np.ndarray:
        return np.argsort(self._order)[: len(self.atoms)]

    @cached_property
    def _state_of_bin(self) -> np.ndarray:
        return np.argsort(self._order)[len(self.atoms) :]

    @cached_property
    def _atoms(self) -> np.ndarray:
        return np.array(self.atoms, np.float64)

    def _numbers(self, cells: pa.Array) -> np.ndarray:
        """Plain cells that are no gaps as the numbers that the bins are of."""
        numbers = cells.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        if self.type != pa.float32():
            return numbers
        with np.errstate(over="ignore"):
            single = numbers.astype(np.float32).astype(np.float64)
        # a frame of another precision than that of training rows has the same atoms
        return np.where(np.isfinite(single), single, numbers)

    def _plain(self, values: Cells) -> pa.Array:
        cells = plain(values, self.name)
        if cells.type in (pa.int64(), pa.float64(), pa.null()) and not is_temporal(values.type):
            return cells
        raise DataError(f"column {self.name!r} holds numbers, and got {type_text(values.type)}: convert it")

    def _encode(self, cells: pa.Array) -> np.ndarray:
        x = self._numbers(cells)
        codes = self._state_of_bin[self.bins.find(x)]
        if self.atoms:
            nearest = np.minimum(self._atoms.searchsorted(x), len(self.atoms) - 1)
            codes = np.where(self._atoms[nearest] == x, self._state_of_atom[nearest], codes)
        return np.where(np.isfinite(x), codes, self.unseen)

    def _decode(self, codes: np.ndarray, uniforms: np.ndarray) -> pa.Array:
        return self._cells(self._drawn(codes, uniforms))

    def _drawn(self, codes: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        which = self._order[codes]
        x = np.empty(len(codes))
        atomic = which < len(self.atoms)
        x[atomic] = self._atoms[which[atomic]]
        bins = which[~atomic] - len(self.atoms)
        x[~atomic] = self.bins.draw(bins, uniforms[~atomic])
        if not self.lattice:
            return x
        with np.errstate(over="ignore"):  # a number so large lies on any lattice
            points = _times(np.round(_over(x, self.lattice)), self.lattice)
        return np.where(np.isfinite(points), points, x)

    def _cells(self, x: np.ndarray) -> pa.Array:
        """Numbers as plain cells that the column's type can hold."""
        if is_integer(self.type):
            bits = self.type.bit_width
            low = 0 if is_unsigned_integer(self.type) else -(2 ** (bits - 1))
            high = min(low + 2**bits - 1, 2**63 - 1)
            inside = np.clip(np.round(x), low, float(np.nextafter(high, 0)) if bits == 64 else high)
            return pa.array(inside.astype(np.int64))
        if self.type == pa.float32() or self.type == pa.float16():
            most = float(np.finfo(self.type.to_pandas_dtype()).max)
            x = np.clip(x, -most, most)
        return pa.array(x)

    def _log_density(self, cells: pa.Array, codes: np.ndarray) -> np.ndarray:
        which = self._order[codes] - len(self.atoms)
        between = which >= 0
        added = np.zeros(len(codes))
        added[between] = self.bins.log_density(self._numbers(cells)[between], which[between])
        return added

    def to_json(self) -> dict[str, Any]:
        settings = {"atoms": list(self.atoms), "lattice": self.lattice, "empty": self.empty}
        return super().to_json() | settings | self.bins.to_json()

    @classmethod
    def from_json(cls, data: Any) -> Self:
        common = common_fields(data)
        bins = Bins.from_json(data)
        match data:
            case {"atoms": [*atoms], "lattice": float() as lattice, "empty": bool() as empty} if (
                bins is not None
            ):
                rising = all(type(atom) is float and math.isfinite(atom) for atom in atoms)
                rising = rising and all(low < high for low, high in pairwise(atoms))
                if rising and lattice in (0, *_LATTICES) and cls._takes(common["type"]):
                    return cls(
                        **common,
                        atoms=tuple(atoms),
                        bins=bins,
                        lattice=lattice,
                        empty=empty,
                        **cls._more(data),
                    )
        raise damaged(data)

    @classmethod
    def _takes(cls, kind: pa.DataType) -> bool:
        return is_integer(kind) or is_floating(kind) or is_decimal(kind)

    @classmethod
    def _more(cls, data: Any) -> dict[str, Any]:
        """Further attributes of a kind of number, from JSON."""
        del data
        return {}


@dataclass(frozen=True)
class Moment(Number):
    """Dates, or dates and times: numbers of days, in ticks of the largest unit that all training cells are multiples of.

    Attributes:
        tick: how many ticks of the type that unit has.
    """

    tick: int

    kind: ClassVar[str] = "moment"

    @classmethod
    def learn(cls, tally: Tally, *, rare: int = 0) -> Self:
        del rare
        if not cls._takes(tally.type):
            raise DataError(
                f"column {tally.name!r} must hold dates or times, and holds {type_text(tally.type)}"
            )
        require_rows(tally)
        ticks, day = tally.values.to_numpy(), ticks_per_day(tally.type)
        units = [day // part for part in (1, 24, 1440, 86_400, 86_400_000, 86_400_000_000) if day % part == 0]
        tick = next((unit for unit in units if not (ticks % unit).any()), 1)
        return cls(tick=tick, **cls._learned(tally, (ticks // tick).astype(np.float64), lattice=1.0))

    @property
    def unit(self) -> str:
        return "day"

    def _numbers(self, cells: pa.Array) -> np.ndarray:
        ticks = cells.to_numpy(zero_copy_only=False)
        whole, rest = np.divmod(ticks, self.tick)
        return whole.astype(np.float64) + rest / self.tick

    def _plain(self, values: Cells) -> pa.Array:
        if is_null(values.type):
            return pa.nulls(len(values), pa.int64())
        if values.type != self.type:
            try:
                values = values.cast(self.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise DataError(
                    f"column {self.name!r} holds {type_text(self.type)}, and got {type_text(values.type)}: convert it"
                ) from None
        return plain(values, self.name)

    def _cells(self, x: np.ndarray) -> pa.Array:
        day = ticks_per_day(self.type)
        if is_time(self.type):
            low, high = 0, day - 1
        elif is_duration(self.type):
            low, high = -(2**62), 2**62
        else:  # the years 1 to 9999, as far as the type reaches
            low, high = (max(min(days * day, 2**62), -(2**62)) for days in (-719_162, 2_932_896))
        first, last = -(-low // self.tick), high // self.tick
        return pa.array(np.clip(np.round(x), first, last).astype(np.int64) * self.tick)

    def _log_density(self, cells: pa.Array, codes: np.ndarray) -> np.ndarray:
        between = self._order[codes] >= len(self.atoms)
        units = ticks_per_day(self.type) / self.tick  # a day has so many of the numbers' units
        return super()._log_density(cells, codes) + math.log(units) * between

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"tick": self.tick}

    @classmethod
    def _takes(cls, kind: pa.DataType) -> bool:
        return is_temporal(kind)

    @classmethod
    def _more(cls, data: Any) -> dict[str, Any]:
        match data:
            case {"tick": int() as tick} if type(tick) is int and 1 <= tick <= 86_400 * 10**9:
                return {"tick": tick}
        raise damaged(data)


def _recurs(counts: np.ndarray) -> np.ndarray:
    """Which numbers recur, given in how many rows each one occurs.

    All that occur twice, of a column with few different numbers. Of others those that occur often by themselves, and not
    because many numbers were rounded to them: where most numbers occur once, five times; or else as often as all of a bin.
    """
    rows = int(counts.sum())
    if len(counts) <= _MOST_ATOMS and rows >= 5 * len(counts):
        return counts >= 2
    least = 5 if np.median(counts) <= 1 else max(5.0, rows ** (2 / 3) / 2)
    if (counts >= least).sum() > _MOST_ATOMS:
        least = max(least, float(np.partition(counts, -_MOST_ATOMS)[-_MOST_ATOMS]) + 1)
    return counts >= least


def _lattice(distinct: np.ndarray, precision: float) -> float:
    """The largest power of ten, from 1000 to 1e-9, that all these numbers are multiples of, to their precision; or 0."""
    if len(distinct) < 2:
        return 0.0
    for lattice in _LATTICES:
        points = [_over(part, lattice) for part in (distinct[[0, -1]], distinct[:100], distinct)]
        if np.abs(points[0]).max() * precision > 2.5e-4:
            return 0.0
        if _whole(points[1], precision) and _whole(points[2], precision):
            return lattice
    return 0.0


def _precision(kind: pa.DataType) -> float:
    """How far, relatively, a number of a type may be from the decimal that it stands for."""
    of = {pa.float16(): 1e-3, pa.float32(): 1.2e-7}
    return 0.0 if is_integer(kind) else of.get(kind, 2.3e-16)


def _over(x: np.ndarray, lattice: float) -> np.ndarray:
    """x / lattice; of a lattice below 1 by a product with a power of ten, which a float holds exactly."""
    return x / lattice if lattice >= 1 else x * round(1 / lattice)


def _times(points: np.ndarray, lattice: float) -> np.ndarray:
    """Multiples of a lattice, as decimal numbers are written."""
    return points * lattice if lattice >= 1 else points / round(1 / lattice)


def _whole(points: np.ndarray, precision: float) -> bool:
    return bool((np.abs(points - np.round(points)) <= 4 * precision * np.abs(points)).all())
