"""Straight-through gradients of second order."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.concrete import checked_temperature, end_of_pass
from xorflow.estimators.layerwise import pushed, require_no_own
from xorflow.estimators.relaxed_states import Relaxed, corners, relaxed_rewards
from xorflow.flows import Choices, LatentFlow
from xorflow.flows.choices import choose as choose_by


class ReinMax(Estimator):
    r"""Hard choices forward; backward, Heun's rule between a sample and its probabilities.

    .. math:: \nabla u = 2\, J\big(\tfrac12(h + \pi_\tau)\big) \nabla \phi - \tfrac12 J(\pi) \nabla \phi, \qquad
              J(\pi) = \mathrm{diag}(\pi) - \pi \pi^\top, \qquad
              S = \log p_Y\big(x \ominus u^{(1)} \ominus \dots \ominus u^{(L)}\big),

    with h ~ p the hard choice, :math:`\pi` its probabilities and :math:`\pi_\tau` those at temperature :math:`\tau`.

    With :math:`\tau = 1` the gradient of a reward that is quadratic in a choice is estimated without bias: at depth 1, where
    rewards are linear, and in the last layer, it is unbiased for the gradient of the special-case bound L. In layers before
    the last, whose choices the later networks see, it is biased, of second order; and with :math:`\tau \ne 1` everywhere. The
    value is the bound of the sample; a learned base gets the gradient of the rewards.

    Cost: L passes. Liu et al. (2023).

    Args:
        tau: the temperature.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> ReinMax()(flow, torch.tensor([[0, 1, 1, 0]])).surrogate.backward()
    """

    def __init__(self, tau: float = 1.0) -> None:
        super().__init__()
        self.tau = checked_temperature(tau)

    def config(self) -> dict[str, Any]:
        return {"tau": self.tau}

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int]:
        return 1, flow.depth, flow.features

    def check(self, flow: LatentFlow) -> None:
        require_no_own(flow, "reinmax", "takes gradients through all choices of a layer at once")

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        assert draws is not None

        def choose(choices: Choices, layer: int) -> Relaxed:
            layout = flow.layers[layer].layout
            u = choose_by(choices, draws[0, ..., layer, :])
            hard = corners(u, layout, flow.dtype)
            moved = choices.logits - choices.logits.detach()  # zero, but for its gradient
            mean = choices.mean.detach()
            between = (hard + Choices(choices.logits.detach() / self.tau, layout).mean) / 2
            gradient = 2 * pushed(between, moved, layout) - pushed(mean, moved, layout) / 2
            return Relaxed(hard + gradient, u)

        value = relaxed_rewards(flow.base, end_of_pass(flow, x, context, choose).state.values).sum(-1)
        return Loss(surrogate=-value.mean(), bound=value.detach().mean())
