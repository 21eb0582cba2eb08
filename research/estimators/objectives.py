"""What each estimator is an estimator of, and whether it claims to be unbiased: its docstring's statement, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from research.estimators.plain_bound import PlainBound
from xorflow.estimators import (
    VIMCO,
    Analytic,
    Concrete,
    Estimator,
    FullPosterior,
    LeaveOneOut,
    MaximumLikelihood,
    ReinMax,
    SpecialCase,
    StraightThrough,
    StraightThroughGumbel,
)
from xorflow.flows import LatentFlow

Kind = Literal["special", "evidence", "likelihood", "summed", "samples"]
Claim = Literal["unbiased", "biased"]
Role = Literal["generator", "posterior", "base"]


@dataclass(frozen=True)
class Part:
    """Parameters whose gradient is reported by itself: a layer's generator or posterior, or a learned base."""

    role: Role
    layer: int | None

    def __str__(self) -> str:
        return self.role if self.layer is None else f"{self.role}{self.layer}"


@dataclass(frozen=True)
class Objective:
    """A function of the parameters whose gradient estimators estimate.

    Attributes:
        kind: the special-case bound, the evidence lower bound, log p(x), the last layer summed out, or a bound of K samples.
        entropy: the weight of an entropy bonus, in the last layer.
        earlier: the factor of that weight in the layers before.
        samples: K.
        sum_last: whether the weights of K samples have the last layer summed out.
        proposal: where these samples come from.
    """

    kind: Kind
    entropy: float = 0.0
    earlier: float = 1.0
    samples: int = 1
    sum_last: bool = False
    proposal: Literal["p", "q"] = "p"

    @property
    def description(self) -> str:
        if self.kind == "samples":
            source = "the posterior" if self.proposal == "q" else "the generator"
            summed = ", the last layer summed out" if self.sum_last else ""
            return f"bound of {self.samples} samples from {source}{summed}"
        bound = {
            "special": "special-case bound",
            "evidence": "evidence lower bound",
            "likelihood": "log-likelihood",
            "summed": "bound with the last layer summed out",
        }[self.kind]
        return f"{bound}, {self.entropy:g} times the entropy added" if self.entropy else bound


def objective_of(estimator: Estimator, flow: LatentFlow) -> Objective:
    """What the estimator's gradient is to be compared with."""
    settings = estimator.config()
    if isinstance(estimator, MaximumLikelihood):
        return Objective("likelihood" if flow.depth == 1 else "summed")
    if isinstance(estimator, VIMCO):
        if estimator.noise_shape(flow) is None:
            return Objective("likelihood")
        return Objective(
            "samples",
            samples=estimator.samples,
            sum_last=estimator.sum_last,
            proposal=estimator.proposal,
        )
    if isinstance(estimator, FullPosterior) or "elbo" in (settings.get("objective"), _bound(settings)):
        return Objective("evidence")
    entropy = float(settings.get("entropy", 0.0))
    earlier = float(settings.get("earlier", 1.0)) if entropy and flow.depth > 1 else 1.0
    return Objective("special", entropy=entropy, earlier=earlier)


def _bound(settings: dict[str, Any]) -> str:
    """Of estimators that take samples from the generator or from the posterior."""
    return "elbo" if settings.get("proposal") == "q" else "special"


def claim_of(estimator: Estimator, flow: LatentFlow, part: Part) -> Claim:
    """Whether an estimator says that its gradient of a part has no bias."""
    return "unbiased" if _is_unbiased(estimator, flow, part) else "biased"


def _is_unbiased(estimator: Estimator, flow: LatentFlow, part: Part) -> bool:
    plain = flow.depth == 1 and flow.last_layer_summable  # every choice changes its own reward alone
    if isinstance(estimator, StraightThrough):
        return plain and part.role != "base"
    if isinstance(estimator, Concrete | StraightThroughGumbel):
        return False
    if isinstance(estimator, ReinMax):
        return estimator.tau == 1 and part.layer in (None, flow.depth)
    if isinstance(estimator, SpecialCase | FullPosterior):
        scaled = estimator.signal.standardiser.kind
        if part.role == "base" or (part.role == "generator" and isinstance(estimator, FullPosterior)):
            return scaled != "one"  # these have a gradient of their own, which no score is weighed with
        if isinstance(estimator, SpecialCase):
            return scaled == "none" and _weighs_fairly(estimator, plain)
        return scaled == "none" and _counts_all(estimator, flow.depth, part)
    return True


def _weighs_fairly(estimator: SpecialCase, plain: bool) -> bool:
    if estimator.rewards in ("descendants", "all"):
        return True
    if estimator.bonus.active or estimator.rewards == "appendix":
        return False
    if estimator.rewards == "impatient":
        return plain
    return plain or (estimator.second == 1 and estimator.discount == 1)


def _counts_all(estimator: FullPosterior, depth: int, part: Part) -> bool:
    if estimator.kl == "vanilla":
        return True  # everything weighs every score
    if estimator.kl == "printed":
        return False
    whole = part.layer == depth or (estimator.gamma == 1 and estimator.rewards != "impatient")
    return whole and (depth <= 2 or not estimator.local)


def averaging_estimator(objective: Objective, samples: int) -> Estimator | None:
    """An unbiased estimator whose mean over many draws serves as oracle; None if none is known.

    Where the last layer is summed out, its gradient is in closed form given the layers before, and needs no score. A bound of
    several samples is estimated by whole sets of them, which share nothing with what is judged by their mean.
    """
    if objective.kind == "special":
        entropy, earlier = objective.entropy, objective.earlier
        return LeaveOneOut(samples, sum_last=True, entropy=entropy, earlier=earlier)
    if objective.kind == "evidence":
        return LeaveOneOut(samples, proposal="q", sum_last=True)
    if objective.kind == "summed":
        return MaximumLikelihood(samples)
    if objective.kind == "samples":
        return PlainBound(samples, objective.samples, objective.proposal, objective.sum_last)
    return None


def closed_form(objective: Objective) -> Estimator | None:
    """At depth 1, what has the objective's gradient without drawing anything; None for bounds of several samples."""
    if objective.kind == "special":
        return Analytic(entropy=objective.entropy)
    if objective.kind == "evidence":
        return Analytic("elbo")
    return MaximumLikelihood() if objective.kind == "likelihood" else None
