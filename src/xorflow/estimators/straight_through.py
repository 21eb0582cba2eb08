"""The straight-through estimator of deterministic discrete flows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from xorflow.errors import ModelError
from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.entropy import EntropyBonus
from xorflow.estimators.relaxed_states import RelaxedPoint, relaxed_rewards, straight_through
from xorflow.flows import LatentFlow


class StraightThrough(Estimator):
    r"""Train the greedy flow, the threshold replaced by the identity in the backward pass.

    .. math:: u = o + \mathrm{sg}[h(o) - o], \qquad
              S = \log p_Y\big(x \ominus u^{(1)} \ominus \dots \ominus u^{(L)}\big)

    with o the probabilities of u, h the most probable value, and the transform in its multilinear form.

    Biased for the greedy flow's likelihood, whose gradient is zero almost everywhere. At depth 1 it is exactly the gradient
    of the special-case bound :math:`E_{p(u|x)}[\log p_Y]`: the reward is linear in each u. At depth 2 and more it is no
    gradient of a stated objective; only the last layer's is, of the bound given the greedy choices before it. The base's own
    gradient is the greedy likelihood's.

    With `entropy` w the objective gains :math:`w \sum_l H(u^{(l)})`, the entropy of the probabilities o along the greedy
    pass: at depth 1 exactly the gradient of :math:`L + w H`, which keeps o from saturating; then it is no bound.

    Cost: L passes. Bengio, Léonard and Courville (2013); for discrete flows Tran et al. (2019).

    Args:
        entropy: the weight w of the entropy bonus.
        anneal: the fraction of training from which on w falls to zero.
        earlier: the factor of w in the layers before the last.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> loss = StraightThrough()(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> loss.surrogate.backward()
    """

    def __init__(self, entropy: float = 0.0, anneal: float = 1.0, earlier: float = 1.0) -> None:
        super().__init__()
        self.bonus = EntropyBonus(entropy, anneal, earlier)

    def config(self) -> dict[str, Any]:
        return self.bonus.config()

    def prepare(self, flow: LatentFlow, total_steps: int | None = None) -> None:
        self.bonus.prepare(flow.base.logits, total_steps)

    def check(self, flow: LatentFlow) -> None:
        if any(layer.autoregressive_in_u for layer in flow.layers):
            raise ModelError(
                "straight-through gradients need layers that do not see their own u; use a score function"
            )

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        del draws
        point = RelaxedPoint.of(flow, flow.start(x))
        entropies = []
        for layer in flow.layers:
            choices = layer.generator_choices(point.seen(), context)
            if self.bonus.active:
                entropies.append(choices.entropy().sum(-1))
            point = point.after(flow, straight_through(choices.mode(), choices.mean, layer.layout))
        value = relaxed_rewards(flow.base, point.state.values).sum(-1)
        surrogate = sum(self.bonus.weigh(entropies), start=value) if self.bonus.active else value
        return Loss(surrogate=-surrogate.mean(), bound=value.detach().mean())

    def update(self, stats: Mapping[str, Tensor]) -> None:
        del stats
        self.bonus.update()
