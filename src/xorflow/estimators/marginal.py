"""The marginal likelihood: exact at depth 1, the last layer summed out otherwise."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from xorflow.errors import ConfigError, ModelError
from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.terms import centred
from xorflow.flows import LatentFlow, Mixture


class Marginal(Estimator):
    r"""Maximise :math:`\log p(x)` at depth 1, and :math:`E_{u^{(<L)}}[\log M(x^{(L-1)})]` at depth L, where

    .. math:: \log M(x') = \sum_d \log \sum_{u_d} p(u^{(L)}_d = u_d \mid x')\; p_d(x'_d \ominus u_d)

    sums the last layer out. Depth 1: exact, no noise, one pass. Depth L: a bound on log p, tighter than the special-case bound;
    its gradient is estimated with S samples of the layers before the last, the others' mean as each sample's baseline,

    .. math:: \frac1S \sum_s \Big( \log M_s + \mathrm{sg}\Big[\log M_s - \frac{1}{S-1}\sum_{t \ne s} \log M_t\Big]
              \sum_{l<L} \log p(u^{(l)}_s) \Big),

    unbiased for the gradient of the bound; with S = 1 there is no baseline.

    Cost: 1 pass at depth 1; 1 + S (L - 1) at depth L. Of a `Mixture` of M flows of depth 1: exact, M passes. Hesselink and Aziz
    (2020), section 4, where the sum is called intractable; that it is not, at depth 1 and in the last layer, is ours. The
    baseline is that of Kool, van Hoof and Welling (2019).

    Args:
        samples: S, for depth 2 and more.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> x = torch.tensor([[0, 1, 1, 0]])
    >>> loss = Marginal()(flow, x)
    >>> bool((loss.bound - flow().log_prob(x)).abs() < 1e-5)
    True
    """

    trains_mixtures: ClassVar[bool] = True
    one_path: ClassVar[bool] = True

    def __init__(self, samples: int = 4) -> None:
        super().__init__()
        if samples < 1:
            raise ConfigError(f"an estimator needs at least one sample, and got samples={samples}")
        self.samples = samples

    def config(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int] | None:
        return None if flow.depth == 1 else (self.samples, flow.depth - 1, flow.features)

    def check(self, flow: LatentFlow) -> None:
        if isinstance(flow, Mixture):
            flow.check_trainable()
        if not flow.last_layer_summable:
            raise ModelError(
                "the marginal sums the last layer out, which must not see its own u; use a score function"
            )

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        if flow.depth == 1:
            value = flow.log_marginal_total(flow.start(x), context).mean()
            return Loss(surrogate=-value, bound=value.detach())
        assert draws is not None
        trace = flow.run(x, draws=draws, context=context, stop=flow.depth - 1)
        log_m = flow.log_marginal_total(trace.end, context)  # (S, B)
        score = trace.log_p().sum((-1, -2))  # (S, B)
        signal = centred(log_m.detach())
        return Loss(surrogate=-(log_m + signal * score).mean(), bound=log_m.detach().mean())
