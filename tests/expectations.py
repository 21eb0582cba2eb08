"""Expectations of estimators by brute force: the surrogate of every draw, weighed with the draw's probability.

Over uniforms they need no sampling either: exact where an estimator is constant between thresholds, else by quadrature.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

import zoo
from enumeration import all_choices, all_states, gradient, probabilities
from xorflow import LatentFlow
from xorflow.estimators import Estimator, ScoreFunction
from xorflow.estimators.descendants import Drawn
from xorflow.flows import Trace
from xorflow.training import ESTIMATORS


def score_function(text: str = "") -> ScoreFunction:
    """By the text that names its parts on the command line."""
    made = ESTIMATORS.make(f"score-function:{text}")
    assert isinstance(made, ScoreFunction)
    return made


EXACT = 1e-10
"""How far an unbiased estimator's expectation may be from the gradient."""

BIASED = 1e-3
"""How far a biased estimator's expectation is from the gradient, at the least."""


def trainable(flow: LatentFlow) -> list[Tensor]:
    """Everything that learns: generators, posteriors, and a learned base."""
    return [parameter for parameter in flow.parameters() if parameter.requires_grad]


def networks(flow: LatentFlow) -> list[Tensor]:
    """All but the base."""
    return list(flow.layers.parameters())


def small(flow: LatentFlow, draws: int = 512, samples: int = 1) -> bool:
    """Whether there are at most so many tuples of draws."""
    return len(all_choices(flow)) ** samples <= draws


def few(samples: int) -> Callable[[LatentFlow], bool]:
    """The condition that all tuples of so many samples can be enumerated."""
    return lambda flow: small(flow, {1: 512, 2: 8192}.get(samples, 20_000), samples)


def rows(flow: LatentFlow) -> list[tuple[int, float]]:
    """Two states and their shares in the objective; over all states alike, the bound would not depend on p(u given x)."""
    count = len(all_states(flow.states.sizes))
    return [(count // 3, 1.0), (count - 1, 0.6)]


def state(flow: LatentFlow, row: int) -> Tensor:
    return all_states(flow.states.sizes)[row : row + 1]


def everything(flow: LatentFlow, row: int, drawn: Drawn, stop: int | None = None) -> Trace:
    """The pass of one state for each value of all choices before `stop`, (T, 1, ...), with graph."""
    x, draws, context = state(flow, row), all_choices(flow, stop)[:, None], zoo.rows_of_context(flow, 1)
    return flow.run(flow.start(x, context), draws=draws, proposal=drawn, stop=stop)


def per_draw(estimator: Estimator, flow: LatentFlow, row: int, draws: Tensor) -> Tensor:
    """What is maximised, on one state, for each of N draws (N, S, L', D) by itself: (N,), with graph."""
    x, context = state(flow, row), zoo.rows_of_context(flow, 1)
    estimator.check(flow)
    estimator.prepare(flow)
    return torch.func.vmap(lambda one: -estimator.loss(flow, flow.start(x, context), one[:, None]).surrogate)(
        draws
    )


def tuples(
    flow: LatentFlow, row: int, drawn: Drawn, samples: int, stop: int | None = None
) -> tuple[Tensor, Tensor]:
    """Every tuple of independent samples (N, S, L', D) that is possible, and its probability (N,)."""
    u = all_choices(flow, stop)
    with torch.no_grad():
        trace = everything(flow, row, drawn, stop)
        log_prob = trace.log_p() if drawn == "p" else trace.log_q()
        probability = log_prob.sum((-1, -2)).exp().expand(len(u), 1)[:, 0]
    possible = probability.nonzero()[:, 0]
    index = torch.cartesian_prod(*[possible] * samples).reshape(-1, samples)
    return u[index], probability[index].prod(-1)


def expected_surrogate(estimator: Estimator, flow: LatentFlow, drawn: Drawn = "p") -> Tensor:
    """E[what is maximised], summed over two states; its gradient is the estimator's expectation."""
    shape = estimator.noise_shape(flow)
    total = torch.zeros((), dtype=torch.float64)
    for row, share in rows(flow):
        if shape is None:  # nothing is drawn
            x, context = all_states(flow.states.sizes)[row : row + 1], zoo.rows_of_context(flow, 1)
            total = total - share * estimator(flow, x, context).surrogate
        else:
            draws, probability = tuples(flow, row, drawn, shape[0], shape[1])
            total = total + share * (probability * per_draw(estimator, flow, row, draws)).sum()
    return total


def expected_gradient(
    estimator: Estimator, flow: LatentFlow, drawn: Drawn = "p", parameters: list[Tensor] | None = None
) -> Tensor:
    return gradient(expected_surrogate(estimator, flow, drawn), parameters or trainable(flow))


def bound(
    flow: LatentFlow, entropy: float = 0.0, earlier: float = 1.0, scales: Tensor | float = 1.0
) -> Tensor:
    """E_p[sum_d r_d / scale_d + sum_l w_l H_l] of the two states, with graph, as a plain sum over all choices.

    The weight w_l is `entropy` in the last layer and `earlier` times that before.
    """
    total = torch.zeros((), dtype=torch.float64)
    weights = [entropy * earlier] * (flow.depth - 1) + [entropy]
    for row, share in rows(flow):
        trace = everything(flow, row, "p")
        value = (flow.base.log_prob(trace.end.state) / scales).sum(-1)
        for weight, choices in zip(weights, trace.generator, strict=True):
            value = value - weight * sum((p.exp() * p).sum((-1, -2)) for p in choices.log_probs())
        total = total + share * (trace.log_p().sum((-1, -2)).exp() * value).sum()
    return total


def evidence(flow: LatentFlow) -> Tensor:
    """The evidence lower bound of the two states, with graph, as a plain sum over all choices."""
    total = torch.zeros((), dtype=torch.float64)
    for row, share in rows(flow):
        trace = everything(flow, row, "q")
        log_p, log_q = (log_probs.sum((-1, -2)) for log_probs in (trace.log_p(), trace.log_q()))
        value = flow.base.log_prob(trace.end.state).sum(-1) + log_p - log_q
        total = total + share * (log_q.exp() * value).sum()
    return total


@cache
def bound_gradient(name: str, entropy: float = 0.0, earlier: float = 1.0) -> Tensor:
    flow = zoo.make(name)
    return gradient(bound(flow, entropy, earlier), trainable(flow))


@cache
def evidence_gradient(name: str) -> Tensor:
    flow = zoo.make(name)
    return gradient(evidence(flow), trainable(flow))


def gap(found: Tensor, expected: Tensor) -> float:
    """The largest difference of any coordinate."""
    return float((found - expected).abs().max())


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def with_a_past(estimator: Estimator, flow: LatentFlow, seed: int = 0) -> Estimator:
    """The estimator with moving estimates as after many batches: arbitrary, but independent of what comes."""
    estimator.prepare(flow)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in estimator.named_buffers():
        kind = name.rsplit(".", 1)[-1]
        if kind == "weight":
            buffer.fill_(0.8)
        elif kind == "mean":
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        elif kind == "square":
            buffer.copy_(4 + 20 * torch.rand(buffer.shape, generator=generator))
    return estimator


# ---- over uniforms: exact where an estimator is constant between thresholds, else by quadrature ----


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
    start = flow.start(state(flow, row), zoo.rows_of_context(flow, 1))
    return torch.stack([-estimator.loss(flow, start, one[:, None]).surrogate for one in draws])


def local(*layers, learned: bool = False, sharp: float = 2.0, seed: int = 0) -> LatentFlow:
    """A small flow beside the zoo."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        flow = zoo.flow(*(make() for make in layers), learned=learned).double()
    with torch.no_grad():
        for parameter in flow.layers.parameters():
            parameter.mul_(sharp)
    return flow
