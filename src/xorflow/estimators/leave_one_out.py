"""Score functions of several samples, each with the mean of the others as its baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from xorflow.errors import ConfigError
from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.descendants import weighted_score
from xorflow.estimators.full_posterior import FullPosterior
from xorflow.estimators.sampled_objective import centred
from xorflow.estimators.special_case import SpecialCase
from xorflow.flows import LatentFlow


class LeaveOneOut(Estimator):
    r"""REINFORCE with leave-one-out baselines, choice by choice.

    .. math:: S = \frac{1}{K-1} \sum_{k=1}^K \sum_{l,d} \mathrm{sg}\Big[A_{k,l,d} - \frac1K \sum_j A_{j,l,d}\Big]
              \log p(u^{(l)}_{k,d} \mid \cdot)

    with K independent samples u_k ~ p(u | x), and A_{k,l,d} the rewards that u^(l)_d can change, as in `SpecialCase`. Each
    sample's baseline, the mean of the others, is independent of it.

    Unbiased for the gradient of the special-case bound L; with `proposal=q`, samples from the posterior and the terms of
    `FullPosterior`, for that of the evidence lower bound, for every model. A learned base gets the gradient of the rewards.
    With `entropy` w the objective is :math:`L + w\, E[\sum_l H_l]`, as in `SpecialCase`.

    Cost: K L passes, the first layer's only once; with `proposal=q` twice that. Kool, van Hoof and Welling (2019).

    Args:
        samples: K, at least 2.
        proposal: `p` for the special case, `q` for the evidence lower bound.
        rewards: `descendants`, those that a choice can change; or `all`, with more variance.
        sum_last: take the expectation over the last layer's choices instead of drawing them: less variance, unbiased too.
        entropy: the weight w of the entropy bonus of the special case.
        anneal: the fraction of training from which on w falls to zero.
        earlier: the factor of w in the layers before the last.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> loss = LeaveOneOut(samples=2)(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> loss.surrogate.backward()
    """

    def __init__(
        self,
        samples: int = 4,
        proposal: Literal["p", "q"] = "p",
        rewards: Literal["descendants", "all"] = "descendants",
        sum_last: bool = False,
        entropy: float = 0.0,
        anneal: float = 1.0,
        earlier: float = 1.0,
    ) -> None:
        super().__init__()
        if samples < 2:
            raise ConfigError(
                f"leaving one sample out leaves none of {samples}: leave-one-out needs samples=2 or more; for one, use the "
                "special case with another baseline"
            )
        if proposal not in ("p", "q"):
            raise ConfigError(f"proposal is p, the generator, or q, the posterior; got {proposal!r}")
        if rewards not in ("descendants", "all"):
            raise ConfigError(f"rewards is one of descendants, all; got {rewards!r}")
        if proposal == "q" and entropy:
            raise ConfigError("the evidence lower bound contains the posterior's entropy; leave entropy out")
        if proposal == "q" and rewards == "all" and sum_last:
            raise ConfigError("with proposal=q, sum_last needs rewards=descendants; leave one of them out")
        self.samples, self.proposal, self.rewards, self.sum_last = samples, proposal, rewards, sum_last
        self._bonus = {"entropy": entropy, "anneal": anneal, "earlier": earlier}
        self.objective: SpecialCase | FullPosterior = (
            SpecialCase(rewards, "none", sum_last=sum_last, entropy=entropy, anneal=anneal, earlier=earlier)
            if proposal == "p"
            else FullPosterior(
                "vanilla" if rewards == "all" else "analytic", baseline="none", sum_last=sum_last
            )
        )

    def config(self) -> dict[str, Any]:
        config = {"samples": self.samples, "proposal": self.proposal, "rewards": self.rewards}
        return config | {"sum_last": self.sum_last} | self._bonus

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int] | None:
        one = self.objective.noise_shape(flow)
        return None if one is None else (self.samples, *one[1:])

    def check(self, flow: LatentFlow) -> None:
        self.objective.check(flow)

    def not_capturable(self, flow: LatentFlow) -> str | None:
        return self.objective.not_capturable(flow)

    def prepare(self, flow: LatentFlow, total_steps: int | None = None) -> None:
        self.objective.prepare(flow, total_steps)

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        sampled = self.objective.objective_of(flow, x, context, draws)
        surrogate = sampled.direct
        if draws is not None:
            surrogate = surrogate + weighted_score(
                self.objective.sums, centred(sampled.signal), sampled.log_prob
            )
        return Loss(surrogate=-surrogate.mean(), bound=sampled.value.mean())

    def update(self, stats: Mapping[str, Tensor]) -> None:
        del stats
        if isinstance(self.objective, SpecialCase):
            self.objective.bonus.update()
