"""Bounds of several samples, and their gradients with a control variate for each sample."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from xorflow.errors import ConfigError, ModelError
from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.layerwise import require_summable
from xorflow.estimators.sampled_objective import mean_of_others
from xorflow.flows import LatentFlow


class VIMCO(Estimator):
    r"""The importance-weighted bound :math:`L_K = E\big[\log \tfrac1K \sum_k w_k\big] \le \log p(x)`, by VIMCO.

    .. math:: S = \sum_k \mathrm{sg}[\hat L - \hat L_{-k}] \log q(u_k \mid x) + \mathrm{sg}[\tilde w_k] \log w_k, \qquad
              w_k = p_Y(x \ominus u_k)\, \frac{p(u_k \mid x)}{q(u_k \mid x)},

    with :math:`\hat L = \log \tfrac1K \sum_k w_k`, :math:`\tilde w` the normalised weights, and :math:`\hat L_{-k}` the same
    with w_k replaced by the geometric mean of the others, which is independent of u_k. With `proposal=p` choices are drawn
    from the generator, q := p, and :math:`w_k = p_Y(x \ominus u_k)`.

    With `sum_last` the last layer is summed out: :math:`w_k = M(x_k^{(L-1)})\, p/q` with the choices of the layers before it
    only, M as in `MaximumLikelihood`. The bound is then tighter for every K, and at depth 1 it is log p(x) itself.

    Unbiased for the gradient of the bound :math:`L_K`, for generator, posterior and a learned base; the bound grows with K.
    What is reported as bound is :math:`\hat L`.

    Cost: K L passes, the first layer's only once; with `proposal=q` twice that. Burda, Grosse and Salakhutdinov (2016); Mnih
    and Rezende (2016).

    Args:
        samples: K, at least 2.
        proposal: `p`, the generator, or `q`, the posterior.
        sum_last: sum the last layer out.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> loss = VIMCO(samples=3)(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> loss.surrogate.backward()
    """

    def __init__(self, samples: int = 4, proposal: Literal["p", "q"] = "p", sum_last: bool = False) -> None:
        super().__init__()
        if samples < 2:
            raise ConfigError(
                f"a bound of several samples compares each with the others, and needs samples=2 or more; got {samples}"
            )
        if proposal not in ("p", "q"):
            raise ConfigError(f"proposal is p, the generator, or q, the posterior; got {proposal!r}")
        self.samples, self.sum_last = samples, sum_last
        self.proposal: Literal["p", "q"] = proposal

    def config(self) -> dict[str, Any]:
        return {"samples": self.samples, "proposal": self.proposal, "sum_last": self.sum_last}

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int] | None:
        layers = flow.depth - self.sum_last
        return (self.samples, layers, flow.features) if layers else None

    def not_capturable(self, flow: LatentFlow) -> str | None:
        return None if self.proposal == "q" else super().not_capturable(flow)

    def check(self, flow: LatentFlow) -> None:
        if self.sum_last:
            require_summable(flow)
        if self.proposal == "q" and not flow.has_posterior:
            raise ModelError(
                "proposal=q needs a posterior in every layer; build Layer(..., posterior=MLP(...)), or train with "
                "posterior=mlp"
            )

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        if draws is None:  # depth 1, summed out: nothing is left to draw
            value = flow.log_marginal_total(flow.start(x), context).mean()
            return Loss(surrogate=-value, bound=value.detach())
        log_w, score = self.weigh(flow, x, context, draws)
        with torch.no_grad():
            bound, signal = vimco(log_w)
            share = torch.softmax(log_w, 0)
        surrogate = (signal * score + share * log_w).sum(0)
        return Loss(surrogate=-surrogate.mean(), bound=bound.mean())

    def weigh(
        self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The log-weights of samples and the log-probabilities that they were drawn with, both (K, B), with graph."""
        stop = flow.depth - self.sum_last
        trace = flow.run(x, draws=draws, context=context, stop=stop, proposal=self.proposal)
        log_w = (
            flow.log_marginal_total(trace.end, context)
            if self.sum_last
            else flow.base.log_prob(trace.end.state).sum(-1)
        )
        log_p = trace.log_p().sum((-1, -2))
        if self.proposal == "p":
            return log_w, log_p
        log_q = trace.log_q().sum((-1, -2))
        return log_w + log_p - log_q, log_q


def vimco(log_w: Tensor) -> tuple[Tensor, Tensor]:
    """The bound (...) of log-weights (K, ...), and for each sample what it adds to a bound without it, (K, ...)."""
    samples = len(log_w)
    bound = torch.logsumexp(log_w, 0)
    itself = torch.eye(samples, dtype=torch.bool, device=log_w.device)
    itself = itself.reshape(samples, samples, *(1,) * (log_w.dim() - 1))
    replaced = torch.where(itself, mean_of_others(log_w).unsqueeze(1), log_w)  # (K, K, ...)
    return bound - math.log(samples), bound - torch.logsumexp(replaced, 1)
