"""The straight-through estimator of deterministic discrete flows."""

from __future__ import annotations

from torch import Tensor

from xorflow.errors import ModelError
from xorflow.estimators.base import Estimator, Loss
from xorflow.flows import LatentFlow, Point


class StraightThrough(Estimator):
    r"""Train the greedy flow, the threshold replaced by the identity in the backward pass (Bengio et al., 2013).

    .. math:: u = o + \mathrm{sg}[h(o) - o], \qquad
              S = \log p_Y\big(x \ominus u^{(1)} \ominus \dots \ominus u^{(L)}\big)

    with o the probabilities of u, h the most probable value, and the transform in its multilinear form.

    Biased for the greedy flow's likelihood, whose gradient is zero almost everywhere. At depth 1 it is exactly the gradient
    of the special-case bound :math:`E_{p(u|x)}[\log p_Y]`: the reward is linear in each u. At depth 2 and more it is no
    gradient of a stated objective; only the last layer's is, of the bound given the greedy choices before it. The base's own
    gradient is the greedy likelihood's.

    Cost: L network passes.

    >>> import torch, xorflow as xf
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> loss = StraightThrough()(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> loss.surrogate.backward()
    """

    def check(self, flow: LatentFlow) -> None:
        if any(layer.autoregressive_in_u for layer in flow.layers):
            raise ModelError(
                "straight-through gradients need layers that do not see their own u; use a score function"
            )

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        del draws
        point = flow.start(x)
        for index, layer in enumerate(flow.layers):
            nodes = layer.generator_nodes(point, context)
            soft = nodes.mean
            u = soft + (nodes.mode() - soft).detach()
            point = Point(point.x, layer.transform.relaxed_to_base(point.state, u), u, index + 1)
        value = flow.base.log_prob(point.state).sum(-1).mean()
        return Loss(surrogate=-value, bound=value.detach())
