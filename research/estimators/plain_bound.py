"""A plain score function for bounds of several samples: what the mean of many draws is taken of, to judge VIMCO by."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from xorflow.estimators import VIMCO, Estimator, Loss
from xorflow.flows import LatentFlow


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

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        assert draws is not None  # with nothing to draw, the bound is the likelihood, in closed form
        log_w, score = self._judged.weigh(flow, x, context, draws)  # (M K, B)
        bounds = torch.logsumexp(self._by_set(log_w), 1) - math.log(self.samples)  # (M, B)
        known = bounds.detach()
        signal = known - (known.sum(0) - known) / (self.sets - 1)
        surrogate = bounds + signal * self._by_set(score).sum(1)
        return Loss(surrogate=-surrogate.mean(), bound=bounds.detach().mean())

    def _by_set(self, values: Tensor) -> Tensor:
        return values.unflatten(0, (self.sets, self.samples))  # (M, K, B)
