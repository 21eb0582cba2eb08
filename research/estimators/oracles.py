"""Exact gradients: in closed form, by enumeration, or with the last layer in closed form and the layers before it averaged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from xorflow import Intractable, LatentFlow
from xorflow.estimators import (
    ELBO,
    VIMCO,
    Analytic,
    Bound,
    Estimator,
    LeaveOneOut,
    Loss,
    MaximumLikelihood,
    Part,
    ScoreFunction,
    Target,
)
from xorflow.flows import Point
from xorflow.training import ESTIMATORS

ENUMERATION_LIMIT = 2**18
"""The most terms of an exact sum by enumeration."""

AVERAGED_SAMPLES = 16
"""In each draw of an averaged oracle; of a bound of several samples, so many sets of them."""


@dataclass(frozen=True)
class Oracle:
    """An exact gradient, or independent means of one.

    Attributes:
        means: (1, P) if exact, or (G, P), the means of independent groups of draws.
        last: what it is for the last layer and the base.
        earlier: what it is for the layers before.
    """

    means: Tensor
    last: str
    earlier: str

    def description(self, part: Part, depth: int) -> str:
        return self.last if part.layer in (None, depth) else self.earlier


Differentiate = Callable[[Tensor], Tensor]
"""From the value of an objective, with graph, to its gradient (P,)."""

Average = Callable[[Estimator], tuple[Tensor, int]]
"""From an estimator to the mean gradients (G, P) of groups of its draws, and how many draws there were."""


def find_oracle(
    target: Target,
    flow: LatentFlow,
    x: Tensor,
    context: Tensor | None,
    differentiate: Differentiate,
    average: Average,
) -> Oracle | None:
    """The best oracle that there is for an objective; None if there is none.

    Args:
        target: whose gradient.
        flow: the model, in float64.
        x: the batch (B, D), integers.
        context: (B, C) or None.
        differentiate: takes the gradient of a value.
        average: draws from an estimator.
    """
    exact = closed_form(target)
    if flow.has_closed_form and exact is not None:
        exact.check(flow)
        exact.prepare(flow)
        value = -exact.loss(flow, flow.start(x, context), None).surrogate
        return Oracle(differentiate(value)[None], "closed form", "closed form")
    if _terms(target, flow) <= ENUMERATION_LIMIT:
        value = enumerated_value(target, flow, x, context)
        return Oracle(differentiate(value)[None], "enumeration", "enumeration")
    estimator = averaging_estimator(target, AVERAGED_SAMPLES)
    if isinstance(estimator, PlainBound):  # scores in every layer
        means, draws = average(estimator)
        text = f"mean of {draws:,} draws of {estimator.description}, which is unbiased"
        return Oracle(means, text, text)
    if estimator is None or not flow.last_layer_summable:
        return None
    means, draws = average(estimator)
    text = f"mean of {draws:,} draws of {ESTIMATORS.text(estimator)}, which is unbiased"
    samples = f"{draws * AVERAGED_SAMPLES:,} samples of these"
    closed = f"closed form of the last layer given the layers before, averaged over {samples}"
    return Oracle(means, closed, text)


def require_oracle(flow: LatentFlow) -> None:
    """Refuse a flow of which not even the simplest objective has an exact gradient."""
    terms = _terms(Target("bound"), flow)
    if flow.last_layer_summable or terms <= ENUMERATION_LIMIT:
        return
    raise Intractable(
        "a study compares gradients with exact ones, and this model has none: its last layer sees its own u, so that it cannot "
        f"be summed out, and 2^{math.log2(terms):.0f} choices exceed the limit of 2^{math.log2(ENUMERATION_LIMIT):.0f} for "
        "enumeration; study a model without own=true, or one with fewer features"
    )


# ---- by enumeration ----


def _drawn_layers(target: Target, flow: LatentFlow) -> int:
    """How many layers are enumerated; what is left is summed out."""
    return flow.depth - (target.sum_last or target.kind == "summed")


def _sizes(flow: LatentFlow, stop: int) -> list[int]:
    return [size for layer in flow.layers[:stop] for size in layer.transform.choices.sizes]


def _terms(target: Target, flow: LatentFlow) -> int:
    """Of the sum over all choices, or over all tuples of them."""
    return math.prod(_sizes(flow, _drawn_layers(target, flow))) ** target.samples


def enumerated_value(target: Target, flow: LatentFlow, x: Tensor, context: Tensor | None) -> Tensor:
    """The mean of the objective over the batch, with graph, as a plain sum over all choices."""
    stop = _drawn_layers(target, flow)
    choices = list(itertools.product(*map(range, _sizes(flow, stop))))
    u = torch.tensor(choices, device=flow.device).reshape(len(choices), stop, flow.features)
    rows = [
        _of_row(target, flow, x[i : i + 1], None if context is None else context[i : i + 1], u[:, None])
        for i in range(len(x))
    ]
    return torch.stack(rows).mean()


def _of_row(target: Target, flow: LatentFlow, x: Tensor, context: Tensor | None, u: Tensor) -> Tensor:
    """The objective of one row of data (1, D), all choices (T, 1, L', D) given."""
    proposal = "q" if target.kind == "elbo" or target.proposal == "q" else "p"
    stop = u.shape[-2]
    trace = flow.run(flow.start(x, context), draws=u, stop=stop, proposal=proposal)
    log_p = _total(trace.log_p(), len(u))
    log_u = log_p if proposal == "p" else _total(trace.log_q(), len(u))
    reached = flow.base.log_prob(trace.end.state) if stop == flow.depth else flow.log_marginal(trace.end)
    value = reached.sum(-1).expand(len(u), 1)[:, 0]
    if proposal == "q":
        value = value + log_p - log_u
    if target.kind == "importance":
        return _bound_of_several(log_u, value, target.samples)
    if target.entropy:
        weights = [target.entropy * target.earlier] * (flow.depth - 1) + [target.entropy]
        for weight, choices in zip(weights, trace.generator, strict=True):
            value = value + weight * choices.entropy().sum(-1).expand(len(u), 1)[:, 0]
    return (log_u.exp() * value).sum()


def _total(log_probs: Tensor, terms: int) -> Tensor:
    """Over layers and features, (T,)."""
    return log_probs.sum((-1, -2)).expand(terms, 1)[:, 0]


def _bound_of_several(log_u: Tensor, log_w: Tensor, samples: int) -> Tensor:
    """E[log of the mean of K weights], over all tuples of independent choices."""
    index = torch.cartesian_prod(*[torch.arange(len(log_u), device=log_u.device)] * samples)
    index = index.reshape(-1, samples)
    bound = torch.logsumexp(log_w[index], -1) - math.log(samples)
    return (log_u[index].sum(-1).exp() * bound).sum()


# ---- what stands for an objective ----

_BOUNDS = {
    "bound": "special-case bound",
    "elbo": "evidence lower bound",
    "log-likelihood": "log-likelihood",
    "summed": "bound with the last layer summed out",
}


def description(target: Target) -> str:
    """What tables call it."""
    if target.kind == "importance":
        source = "the posterior" if target.proposal == "q" else "the generator"
        summed = ", the last layer summed out" if target.sum_last else ""
        return f"bound of {target.samples} samples from {source}{summed}"
    bound = _BOUNDS[target.kind]
    return f"{bound}, {target.entropy:g} times the entropy added" if target.entropy else bound


def averaging_estimator(target: Target, samples: int) -> Estimator | None:
    """An unbiased estimator whose mean over many draws serves as oracle; None if none is known.

    Where the last layer is summed out, its gradient is in closed form given the layers before, and needs no score. A bound of
    several samples is estimated by whole sets of them, which share nothing with what is judged by their mean.
    """
    if target.kind == "bound":
        objective = Bound(target.entropy, earlier=target.earlier)
        return ScoreFunction(objective, baseline=LeaveOneOut(samples), sum_last=True)
    if target.kind == "elbo":
        return ScoreFunction(ELBO(), baseline=LeaveOneOut(samples), sum_last=True)
    if target.kind == "summed":
        return MaximumLikelihood(samples)
    if target.kind == "importance":
        return PlainBound(samples, target.samples, target.proposal, target.sum_last)
    return None


def closed_form(target: Target) -> Estimator | None:
    """At depth 1, what has the target's gradient without drawing anything; None for bounds of several samples."""
    if target.kind == "bound":
        return Analytic(Bound(target.entropy))
    if target.kind == "elbo":
        return Analytic(ELBO())
    return MaximumLikelihood() if target.kind == "log-likelihood" else None


class PlainBound(Estimator):
    r"""The bound :math:`L_K` of K samples, by whole sets of them.

    .. math:: S = \frac1M \sum_m \hat L_m + \mathrm{sg}\Big[\hat L_m - \tfrac{1}{M-1} \sum_{n \ne m} \hat L_n\Big]
              \sum_k \log q(u_{mk} \mid x), \qquad \hat L_m = \log \tfrac1K \sum_k w_{mk}.

    Unbiased for the gradient of :math:`L_K`: the other sets are independent of a set's choices. No sample has a control
    variate of its own: with VIMCO, which is measured by it, it shares the weights and no more.

    Args:
        sets: M, at least 2.
        samples: K, of each set.
        proposal: `p`, the generator, or `q`, the posterior.
        sum_last: sum the last layer out.
    """

    def __init__(
        self, sets: int, samples: int, proposal: Literal["p", "q"] = "p", sum_last: bool = False
    ) -> None:
        super().__init__()
        self.sets, self.samples = sets, samples
        self._judged = VIMCO(samples, proposal, sum_last)

    @property
    def description(self) -> str:
        return f"a plain score function with {self.sets} sets of samples"

    def config(self) -> dict[str, Any]:
        return {"sets": self.sets} | self._judged.config()

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int] | None:
        one = self._judged.noise_shape(flow)
        return None if one is None else (self.sets * self.samples, *one[1:])

    def check(self, flow: LatentFlow) -> None:
        self._judged.check(flow)

    def not_capturable(self, flow: LatentFlow) -> str | None:
        return self._judged.not_capturable(flow)

    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        assert draws is not None  # with nothing to draw, the bound is the likelihood, in closed form
        log_w, score = self._judged.weigh(flow, start, draws)  # (M K, B)
        bounds = torch.logsumexp(self._by_set(log_w), 1) - math.log(self.samples)  # (M, B)
        known = bounds.detach()
        signal = known - (known.sum(0) - known) / (self.sets - 1)
        surrogate = bounds + signal * self._by_set(score).sum(1)
        return Loss(surrogate=-surrogate.mean(), bound=bounds.detach().mean())

    def _by_set(self, values: Tensor) -> Tensor:
        return values.unflatten(0, (self.sets, self.samples))  # (M, K, B)
