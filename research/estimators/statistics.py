"""Bias and variance of gradients from streams of draws: sums are kept, never the gradients themselves.

The draws of an estimator fall into independent groups. With e_a the mean error of group a, the products of e_a and e_b of
different groups have the expectation :math:`|E[g] - g^*|^2`: their mean is an unbiased estimate of the squared bias, centred at
zero for an unbiased estimator.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from research.results import Record

MOST_GROUPS = 16
LEAST_GROUPS = 4
"""Fewer leave nothing to estimate the standard error from."""

CHANCE = 3.0
"""A bias of at most so many standard errors, as an unbiased estimator has them, is not told from zero."""

ROUNDING = 1e-24
"""Squared differences below this part of the squared norm are rounding of float64, and count as zero."""


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error.

    Attributes:
        value: the number.
        stderr: its standard error.
        noise: the standard error that it would have if what it estimates were zero.
    """

    value: float
    stderr: float
    noise: float = 0.0


def groups_of(draws: int) -> tuple[int, int]:
    """How many groups some draws fall into, and how many draws are in each.

    >>> groups_of(400), groups_of(10)
    ((16, 25), (5, 2))
    """
    groups = max(LEAST_GROUPS, min(MOST_GROUPS, draws // 2))
    return groups, draws // groups


def mean_of_pairs(products: Tensor) -> Estimate:
    r"""The mean of the products (G, G) of different groups, and its standard error.

    A product of two groups is modelled as :math:`m_{ab} = \theta + h_a + h_b + \epsilon_{ab}`, as in a diallel cross, so that
    the variance of the mean is :math:`4 \mathrm{Var}[h] / G + 2 \mathrm{Var}[\epsilon] / (G (G - 1))`. Both are estimated from
    the products. The first vanishes for an unbiased estimator, where a jackknife would find twice the variance. It grows with
    a bias, so that a bias is told from zero by the second alone, the noise.
    """
    groups = len(products)
    apart = ~torch.eye(groups, dtype=torch.bool, device=products.device)
    mean = products[apart].mean()
    rows = products.masked_fill(~apart, 0.0).sum(1) / (groups - 1)
    shares = (rows - mean) * (groups - 1) / (groups - 2)
    rest = (products - mean - shares[:, None] - shares[None, :])[apart]
    within = rest.square().sum() / (groups * (groups - 3))  # every pair is there twice
    between = rows.var() * ((groups - 1) / (groups - 2)) ** 2 - within / (groups - 2)
    noise = 2 * within / (groups * (groups - 1))
    variance = 4 * between.clamp_min(0) / groups + noise
    return Estimate(float(mean), math.sqrt(float(variance)), math.sqrt(float(noise)))


class Stream:
    """Sums of gradients, group by group, in float64; adding one is a few operations in place, which may be captured.

    Args:
        slices: the pieces of a gradient that are reported by themselves.
        size: the length of a gradient.
        groups: how many groups there will be.
        centre: what is subtracted from each gradient, for the sake of rounding: near its mean, (P,).
        pixels: the piece of a gradient whose variance is kept entry by entry.
    """

    def __init__(
        self,
        slices: Sequence[slice],
        size: int,
        groups: int,
        centre: Tensor,
        pixels: slice | None = None,
    ) -> None:
        self.slices, self.centre, self._pixels = list(slices), centre, pixels
        self._norms = [centre[part].norm() for part in self.slices]
        new = functools.partial(torch.zeros, dtype=torch.float64, device=centre.device)
        count = len(self.slices)
        self.sums, self.squares, self.cosines = new(groups, size), new(groups, count), new(groups, count)
        self.counts = [0] * groups
        self._sum, self._squares, self._cosines = new(size), new(count), new(count)
        width = 0 if pixels is None else pixels.stop - pixels.start
        self._entries, self._entry_squares = new(width), new(width)

    def add(self, gradient: Tensor) -> None:
        """Take one more gradient (P,) into the group at hand."""
        rest = gradient - self.centre
        self._sum += rest
        for index, part in enumerate(self.slices):
            self._squares[index] += rest[part].square().sum()
            norms = gradient[part].norm() * self._norms[index]
            self._cosines[index] += (gradient[part] @ self.centre[part]) / norms.clamp_min(1e-300)
        if self._pixels is not None:
            self._entries += rest[self._pixels]
            self._entry_squares += rest[self._pixels].square()

    def close(self, group: int, count: int) -> None:
        """The group at hand is complete, with so many gradients."""
        self.sums[group], self.squares[group], self.cosines[group] = self._sum, self._squares, self._cosines
        self.counts[group] = count
        for held in (self._sum, self._squares, self._cosines):
            held.zero_()

    def clear(self) -> None:
        """Forget what was added since the last group was closed."""
        held = (self._sum, self._squares, self._cosines, self._entries, self._entry_squares)
        for tensor in held:
            tensor.zero_()

    @property
    def count(self) -> int:
        return sum(self.counts)

    def means(self, part: slice) -> Tensor:
        """The mean gradient of each group, (G, P')."""
        counts = torch.tensor(self.counts, dtype=torch.float64, device=self.sums.device)
        return self.sums[:, part] / counts[:, None] + self.centre[part]

    def spread(self, index: int) -> Estimate:
        """The trace of the covariance of a part of the gradient: the mean over groups of what each says."""
        part, count = self.slices[index], self.counts[0]
        if count < 2:
            return Estimate(0.0, 0.0)
        squares = self.squares[:, index] - self.sums[:, part].square().sum(1) / count
        traces = squares / (count - 1)
        return Estimate(float(traces.mean()), float(traces.std()) / math.sqrt(len(traces)))

    def cosine(self, index: int) -> float:
        """The mean cosine of a single gradient with the centre."""
        return float(self.cosines[:, index].sum()) / self.count

    def entry_variances(self) -> Tensor:
        """The variance of each pixel's entry."""
        mean = self._entries / self.count
        return (self._entry_squares / self.count - mean.square()) * (self.count / max(1, self.count - 1))


def figures(stream: Stream, index: int, exact: Tensor | None) -> Record | None:
    """The figures of one part of the gradient; None if nothing reaches this part.

    Args:
        stream: the estimator's draws, or a single one if it draws nothing.
        index: which part.
        exact: the exact gradient of that part, (1, P'), or the means of independent groups of draws of it, (G, P'); None if
            there is no oracle.
    """
    means, spread = stream.means(stream.slices[index]), stream.spread(index)
    squared = _squared_norm(means)
    if squared.value == 0 and (exact is None or not bool(exact.any())):
        return None
    target = squared if exact is None else _squared_norm(exact)
    scale = target.value
    row: Record = {"norm": math.sqrt(max(0.0, scale)), "trace": spread.value}
    row |= _compared(stream, index, means, exact, target)
    if scale <= 0:  # the noise hides that there is a gradient at all
        return row | dict.fromkeys(("variance", "variance_stderr", "snr"))
    variance = _unless_rounding(spread.value / scale)
    return row | {
        "variance": variance,
        "variance_stderr": spread.stderr / scale if variance else 0.0,
        "snr": math.sqrt(max(0.0, squared.value) / spread.value) if variance else None,
    }


def _compared(stream: Stream, index: int, means: Tensor, exact: Tensor | None, known: Estimate) -> Record:
    """What needs the exact gradient."""
    keys = ("bias", "bias_stderr", "bias_noise", "distance", "distance_stderr", "cosine", "cosine_of_mean")
    if exact is None or known.value <= 0:
        return dict.fromkeys(keys)
    squared = _squared_norm(means - exact)
    bias = _unless_rounding(squared.value / known.value)
    stderr = _unless_rounding(math.hypot(squared.stderr, bias * known.stderr) / known.value)
    noise = _unless_rounding(squared.noise / known.value)
    distance = math.sqrt(max(0.0, bias))
    mean, target = means.mean(0), exact.mean(0)
    return {
        "bias": bias,
        "bias_stderr": stderr,
        "bias_noise": noise,
        "distance": distance,
        # the root has an error of its own only where it is not that of noise
        "distance_stderr": stderr / (2 * distance) if bias > CHANCE * noise else None,
        "cosine": stream.cosine(index),
        "cosine_of_mean": float(mean @ target / (mean.norm() * target.norm()).clamp_min(1e-300)),
    }


def _squared_norm(means: Tensor) -> Estimate:
    """Of the expectation of independent means (G, P'), without bias; of a single one, which is exact, its own."""
    if len(means) == 1:
        return Estimate(float(means.square().sum()), 0.0)
    return mean_of_pairs(means @ means.T)


def _unless_rounding(value: float) -> float:
    return 0.0 if abs(value) < ROUNDING else value


def rounded(row: Record, digits: int = 6) -> Record:
    """The floats of a row to so many significant digits: files that can be read, and change only if something did."""
    return {
        key: float(f"{value:.{digits}g}") if isinstance(value, float) else value for key, value in row.items()
    }
