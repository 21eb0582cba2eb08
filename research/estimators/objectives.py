"""What estimators estimate the gradient of: its name in tables, and what has that gradient exactly."""

from __future__ import annotations

from research.estimators.plain_bound import PlainBound
from xorflow.estimators import (
    ELBO,
    Analytic,
    Bound,
    Estimator,
    LeaveOneOut,
    MaximumLikelihood,
    ScoreFunction,
    Target,
)

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
