"""A density on all numbers, in bins: uniform inside, with Pareto tails beyond the outermost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np

_MOST_BINS = 128
_LARGEST = float(np.finfo(np.float64).max)
_SHAPES = (0.05, 0.95)
"""The least and the largest shape of a tail: one too light would underflow, one too heavy has no mean."""


@dataclass(frozen=True)
class Tail:
    r"""What is beyond an end, :math:`P(\text{excess} > y) = (1 + \xi y / s)^{-1/\xi}`: a generalised Pareto distribution."""

    scale: float  # s
    shape: float  # xi

    @classmethod
    def fit(cls, excesses: np.ndarray, counts: np.ndarray, reach: float) -> Self:
        """By the moments of what exceeds the inner edge of the outermost bin, `reach` below the end of what was seen."""
        unit = max(float(excesses.max(initial=0.0)), reach)
        part, mean, variance = excesses / unit, 0.5, 0.0
        if counts.sum() > 1:
            mean = float(np.average(part, weights=counts))
            variance = float(np.average((part - mean) ** 2, weights=counts))
        shape = 0.5 * (1 - mean**2 / variance) if variance > 0 else 0.5
        shape = min(max(shape, _SHAPES[0]), _SHAPES[1])
        # beyond a higher threshold a Pareto distribution is one again, of the same shape and a larger scale
        scale = mean * (1 - shape) * unit + shape * reach
        return cls(min(max(scale, 1e-300), 1e300), shape)

    def log_density(self, log_excess: np.ndarray) -> np.ndarray:
        ratio = math.log(self.shape) - math.log(self.scale) + log_excess
        return -math.log(self.scale) - (1 / self.shape + 1) * np.logaddexp(0, ratio)

    def excess(self, uniforms: np.ndarray) -> np.ndarray:
        """By inversion of the probability to exceed it."""
        above = np.maximum(uniforms, 2.0**-53)
        return self.scale / self.shape * np.expm1(-self.shape * np.log(above))


@dataclass(frozen=True)
class Bins:
    """Bins that cover all numbers.

    The first and the last one reach beyond the edges; by Laplace's rule the share of a bin's mass that lies in a tail is
    1 / (its training rows + its pieces).

    Attributes:
        edges: of the bins within the range that was seen, rising.
        below: beyond the first edge.
        above: beyond the last one.
        ends: how many training rows are in the first and in the last bin.
    """

    edges: tuple[float, ...]
    below: Tail
    above: Tail
    ends: tuple[int, int]

    @classmethod
    def fit(
        cls, distinct: np.ndarray, counts: np.ndarray, span: tuple[float, float], lattice: float, width: float
    ) -> Self:
        """Quantiles of values, between neighbours that are different; never narrower than `width`.

        Args:
            distinct: the different values, rising; perhaps none.
            counts: in how many rows each occurs.
            span: the least and the largest number of the column, for values that have no range.
            lattice: the distance of numbers that are all its multiples, or 0; edges then lie half-way between multiples.
            width: of the column's resolution.
        """
        rows = int(counts.sum())
        count = max(1, min(round(2 * rows ** (1 / 3)), rows // 5, _MOST_BINS))
        after = counts.cumsum()[:-1]  # rows up to each gap between neighbours
        gaps = np.unique(after.searchsorted(rows * np.arange(1, count) / count)) if len(after) else after
        gaps = gaps[gaps < len(after)].astype(np.int64)
        low, high = (distinct[0], distinct[-1]) if len(distinct) > 1 else span
        edges = cls._edges(distinct, gaps, float(low), float(high), lattice)
        if len(edges) == 1:
            half = max(width, 1e-12 * abs(edges[0]), 1e-300) / 2  # half of the least float is none
            edges = [max(edges[0] - half, -_LARGEST), min(edges[0] + half, _LARGEST)]
        inner = (edges[1], edges[-2]) if len(edges) > 2 else (edges[0] / 2 + edges[1] / 2,) * 2
        first, last = distinct <= inner[0], distinct >= inner[1]
        reach = (_finite(inner[0] - edges[0]), _finite(edges[-1] - inner[1]))
        ends = (int(counts[first].sum()), int(counts[last].sum())) if len(edges) > 2 else (rows, rows)
        return cls(
            tuple(edges),
            Tail.fit(np.minimum(inner[0] - distinct[first], 1e300), counts[first], reach[0]),
            Tail.fit(np.minimum(distinct[last] - inner[1], 1e300), counts[last], reach[1]),
            ends,
        )

    @staticmethod
    def _edges(
        distinct: np.ndarray, gaps: np.ndarray, low: float, high: float, lattice: float
    ) -> list[float]:
        left, right = distinct[gaps], distinct[gaps + 1] if len(gaps) else distinct[:0]
        if lattice:
            points = [np.round(np.array(part) / lattice) for part in (low, left, right, high)]
            halves = [points[0] - 0.5, np.floor((points[1] + points[2]) / 2) + 0.5, points[3] + 0.5]
            edges = lattice * np.hstack(halves)
        else:
            edges = np.hstack([low, left / 2 + right / 2, high])
        return (
            2 * np.unique(edges / 2)
        ).tolist()  # halves that differ: the width of all may be more than a float holds

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def middles(self) -> np.ndarray:
        return self._edges_array[:-1] / 2 + self._edges_array[1:] / 2

    @cached_property
    def _edges_array(self) -> np.ndarray:
        return np.array(self.edges)

    @cached_property
    def _log_widths(self) -> np.ndarray:
        half = self._edges_array / 2  # all of a range may be more than a float holds
        return np.log(half[1:] - half[:-1]) + math.log(2)

    @cached_property
    def tail_shares(self) -> np.ndarray:
        """Which share of each bin's mass lies below all edges, and above, (2, bins)."""
        shares = np.zeros((2, len(self)))
        pieces = 2 + (len(self) == 1)
        shares[0, 0], shares[1, -1] = 1 / (self.ends[0] + pieces), 1 / (self.ends[1] + pieces)
        return shares

    def find(self, x: np.ndarray) -> np.ndarray:
        """The bin that each number is in."""
        return self._edges_array[1:-1].searchsorted(x, side="right")

    def log_density(self, x: np.ndarray, bins: np.ndarray) -> np.ndarray:
        """Of numbers within their bins."""
        log_shares = np.log1p(-self.tail_shares.sum(0))
        density = (log_shares - self._log_widths)[bins]
        # each tail, and half of how far numbers lie in it
        tails = [(self.below, self.edges[0] / 2 - x / 2), (self.above, x / 2 - self.edges[-1] / 2)]
        for side, (tail, beyond) in enumerate(tails):
            there = beyond > 0
            log_excess = np.log(beyond[there]) + math.log(2)
            density[there] = np.log(self.tail_shares[side, bins[there]]) + tail.log_density(log_excess)
        return density

    def draw(self, bins: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        """Numbers within bins, rising with the uniforms where there is no tail."""
        below, above = self.tail_shares[:, bins]
        inside = (uniforms - below) / (1 - below - above)
        inside = np.clip(inside, 0, 1)
        x = self._edges_array[bins] * (1 - inside) + self._edges_array[bins + 1] * inside
        low, high = uniforms < below, 1 - uniforms < above
        with np.errstate(over="ignore"):
            x[low] = self.edges[0] - self.below.excess(uniforms[low] / below[low])
            x[high] = self.edges[-1] + self.above.excess((1 - uniforms[high]) / above[high])
        return np.clip(x, -_LARGEST, _LARGEST)

    def to_json(self) -> dict[str, Any]:
        return {
            "edges": list(self.edges),
            "below": [self.below.scale, self.below.shape],
            "above": [self.above.scale, self.above.shape],
            "ends": list(self.ends),
        }

    @classmethod
    def from_json(cls, data: Any) -> Self | None:
        """The inverse of `to_json`, or None if something is wrong."""
        match data:
            case {
                "edges": [_, _, *_] as edges,
                "below": [*below],
                "above": [*above],
                "ends": [int() as first, int() as last],
            }:
                good = all(type(edge) is float and math.isfinite(edge) for edge in edges)
                low_tail, high_tail = _tail(below), _tail(above)
                rising = good and all(low / 2 < high / 2 for low, high in pairwise(edges))
                counts = all(type(count) is int and 0 <= count < 2**53 for count in (first, last))
                if rising and counts and low_tail is not None and high_tail is not None:
                    return cls(tuple(edges), low_tail, high_tail, (first, last))
        return None


def _tail(data: list[Any]) -> Tail | None:
    if len(data) == 2 and all(type(number) is float for number in data):
        scale, shape = data
        if 1e-300 <= scale <= 1e300 and _SHAPES[0] <= shape <= _SHAPES[1]:
            return Tail(scale, shape)
    return None


def _finite(length: float) -> float:
    return min(max(length, 1e-300), 1e300)
