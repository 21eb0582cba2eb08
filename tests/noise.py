"""Expectations over uniforms without sampling: exact where an estimator is constant between thresholds, else by quadrature."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

import zoo
from enumeration import gradient, probabilities
from expectations import everything, per_draw, rows, state, trainable
from xorflow import LatentFlow
from xorflow.estimators import Estimator

Place = tuple[int, int, int]
"""Sample, layer and feature of a uniform."""

Rule = tuple[Tensor, Tensor]
"""Points of the unit interval, and their weights."""


def thresholds(flow: LatentFlow, row: int, layer: int, feature: int) -> Tensor:
    """Everywhere that some distribution function of a choice jumps, over all that it may see."""
    with torch.no_grad():
        choices = everything(flow, row, "p").generator[layer]
        return probabilities(choices).cumsum(-1)[..., feature, :-1].flatten()


def pieces(cuts: Tensor, mirrored: bool = False) -> Rule:
    """The middles and the lengths of the intervals between cuts (and, mirrored, between one less the cuts)."""
    parts = [cuts, 1 - cuts] if mirrored else [cuts]
    edges = torch.cat([torch.tensor([0.0, 1.0], dtype=torch.float64), *parts]).clamp(0, 1).unique()
    lengths = edges.diff()
    middles = (edges[1:] + edges[:-1]) / 2
    real = lengths > 1e-12
    return middles[real], lengths[real]


def gauss(cuts: Iterable[float] = (), points: int = 12) -> Rule:
    """Gauss-Legendre quadrature on each interval between cuts, points drawn to its ends, where derivatives may not exist."""
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(points))
    s, weights = (1 + nodes) / 2, weights / 2
    at, slope = s**3 * (10 - 15 * s + 6 * s**2), 30 * s**2 * (1 - s) ** 2
    edges = [0.0, *sorted(cuts), 1.0]
    spans = [(a, b) for a, b in itertools.pairwise(edges) if b > a]
    return torch.cat([a + (b - a) * at for a, b in spans]), torch.cat(
        [(b - a) * weights * slope for a, b in spans]
    )


def product(shape: Sequence[int], rules: dict[Place, Rule]) -> tuple[Tensor, Tensor]:
    """All combinations: draws (N, S, L', D), one half where there is no rule, and their weights (N,)."""
    index = torch.cartesian_prod(*(torch.arange(len(at)) for at, _ in rules.values()))
    index = index.reshape(-1, len(rules))
    draws = torch.full((len(index), *shape), 0.5, dtype=torch.float64)
    weights = torch.ones(len(index), dtype=torch.float64)
    for column, (place, (at, weight)) in enumerate(rules.items()):
        draws[(slice(None), *place)] = at[index[:, column]]
        weights = weights * weight[index[:, column]]
    return draws, weights


def drawn_rules(
    flow: LatentFlow, row: int, sample: int, layers: Iterable[int], mirrored: bool = False
) -> dict[Place, Rule]:
    """For all features of some layers of one sample: the intervals in which its choices are constant."""
    return {
        (sample, layer, d): pieces(thresholds(flow, row, layer, d), mirrored)
        for layer in layers
        for d in range(flow.features)
    }


def expected_over(
    estimator: Estimator, flow: LatentFlow, rules_of_row, parameters: list[Tensor] | None = None
) -> Tensor:
    """The expectation of the gradient on two states, over the product of the rules for each."""
    shape = estimator.noise_shape(flow)
    assert shape is not None
    total = torch.zeros((), dtype=torch.float64)
    for row, share in rows(flow):
        draws, weights = product(shape, rules_of_row(row))
        torch.testing.assert_close(weights.sum(), torch.ones_like(weights[0]), rtol=0, atol=1e-9)
        total = total + share * (weights * per_draw(estimator, flow, row, draws)).sum()
    return gradient(total, parameters or trainable(flow))


def one_by_one(estimator: Estimator, flow: LatentFlow, row: int, draws: Tensor) -> Tensor:
    """As `per_draw`, for steps with decisions that `vmap` cannot make."""
    estimator.check(flow)
    estimator.prepare(flow)
    x, context = state(flow, row), zoo.rows_of_context(flow, 1)
    return torch.stack([-estimator.loss(flow, x, context, one[:, None]).surrogate for one in draws])


def local(*layers, learned: bool = False, sharp: float = 2.0, seed: int = 0) -> LatentFlow:
    """A small flow beside the zoo."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        flow = zoo.flow(*(make() for make in layers), learned=learned).double()
    with torch.no_grad():
        for parameter in flow.layers.parameters():
            parameter.mul_(sharp)
    return flow
