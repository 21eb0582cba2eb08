"""The marginal likelihood: exact at depth 1, the last layer summed out otherwise."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
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

    Of a `Mixture` of flows of depth 1: its exact likelihood; or, `in_turn`, the mean of its components', a bound on it, each
    row by one of them. The components may share a network, which then learns several orderings.

    With `grey`, for binary data that are drawn afresh from chances g, as images are from grey values, at depth 1,

    .. math:: \sum_d \Big( g_d \log p(x_d = 1 \mid x_{<d}) + (1 - g_d) \log p(x_d = 0 \mid x_{<d}) \Big):

    what comes before a feature says nothing about its own draw, so the expectation over draws is that of log p(x), and so is
    the gradient's, without the noise of a feature's own draw. Of mixtures this holds component by component.

    Cost: 1 pass at depth 1; 1 + S (L - 1) at depth L; of a mixture of M flows M passes, or 1 in turn. Hesselink and Aziz
    (2020), section 4, where the sum is called intractable; that it is not, at depth 1 and in the last layer, is ours. The
    baseline is that of Kool, van Hoof and Welling (2019).

    Args:
        samples: S, for depth 2 and more.
        in_turn: a mixture's components take turns: of M equal parts of a batch each learns one.
        grey: look at the chances with which data were drawn.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> x = torch.tensor([[0, 1, 1, 0]])
    >>> loss = Marginal()(flow, x)
    >>> bool((loss.bound - flow().log_prob(x)).abs() < 1e-5)
    True
    """

    trains_mixtures: ClassVar[bool] = True

    def __init__(self, samples: int = 4, in_turn: bool = False, grey: bool = False) -> None:
        super().__init__()
        if samples < 1:
            raise ConfigError(f"an estimator needs at least one sample, and got samples={samples}")
        self.samples, self.in_turn, self.looks_at_grey = samples, in_turn, grey

    def config(self) -> dict[str, Any]:
        return {"samples": self.samples, "in_turn": self.in_turn, "grey": self.looks_at_grey}

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int] | None:
        return None if flow.depth == 1 else (self.samples, flow.depth - 1, flow.features)

    def check(self, flow: LatentFlow) -> None:
        if isinstance(flow, Mixture):
            flow.check_trainable()
        elif self.in_turn:
            raise ModelError(
                "in_turn is for the components of a mixture, and this is a single flow; leave it out"
            )
        if not flow.last_layer_summable:
            raise ModelError(
                "the marginal sums the last layer out, which must not see its own u; use a score function"
            )
        if self.looks_at_grey:
            self._check_grey(flow)

    def _check_grey(self, flow: LatentFlow) -> None:
        if flow.depth > 1 or not flow.states.binary:
            raise ModelError(
                "grey is for binary features in flows of depth 1, where a feature's draw enters its own term alone; leave "
                "it out"
            )
        if isinstance(flow, Mixture) and not self.in_turn:
            raise ModelError(
                "the likelihood of a mixture has no term for each feature, so that grey is for its components in turn: give "
                "in_turn too, or leave grey out"
            )

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        if self.in_turn:
            return _mean_in_turn(flow, x, context, None)
        if flow.depth == 1:
            value = flow.log_marginal_total(flow.start(x), context).mean()
            return Loss(surrogate=-value, bound=value.detach())
        assert draws is not None
        trace = flow.run(x, draws=draws, context=context, stop=flow.depth - 1)
        log_m = flow.log_marginal_total(trace.end, context)  # (S, B)
        score = trace.log_p().sum((-1, -2))  # (S, B)
        signal = centred(log_m.detach())
        return Loss(surrogate=-(log_m + signal * score).mean(), bound=log_m.detach().mean())

    def grey_loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, chances: Tensor) -> Loss:
        if self.in_turn:
            return _mean_in_turn(flow, x, context, chances)
        value = flow.expected_log_marginal(x, chances, context).mean()
        return Loss(surrogate=-value, bound=value.detach())


def _mean_in_turn(
    flow: LatentFlow | Mixture, x: Tensor, context: Tensor | None, chances: Tensor | None
) -> Loss:
    """The mean over components, each estimated by its own part of the rows."""
    assert isinstance(flow, Mixture)
    components = flow.latent_components()
    if len(x) < len(components):
        raise ModelError(
            f"components in turn need a row each, and {len(x)} rows came for {len(components)} components; choose larger "
            "batches, or pass them in fewer parts (--accumulate)"
        )
    means = []
    for component, rows in zip(components, torch.arange(len(x)).tensor_split(len(components)), strict=True):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        own = None if context is None else context[part]
        if chances is None:
            values = component.log_marginal_total(component.start(x[part]), own)
        else:
            values = component.expected_log_marginal(x[part], chances[part], own)
        means.append(values.mean())
    value = torch.stack(means).mean()
    return Loss(surrogate=-value, bound=value.detach())
