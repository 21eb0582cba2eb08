"""Exact gradients: in closed form, by enumeration, or with the last layer in closed form and the layers before it averaged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from research.estimators.objectives import averaging_estimator, closed_form
from research.estimators.plain_bound import PlainBound
from xorflow import Intractable, LatentFlow
from xorflow.estimators import Estimator, Part, Target
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
        value = -exact.loss(flow, x, context, None).surrogate
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
    trace = flow.run(x, draws=u, context=context, stop=stop, proposal=proposal)
    log_p = _total(trace.log_p(), len(u))
    log_u = log_p if proposal == "p" else _total(trace.log_q(), len(u))
    reached = (
        flow.base.log_prob(trace.end.state) if stop == flow.depth else flow.log_marginal(trace.end, context)
    )
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
