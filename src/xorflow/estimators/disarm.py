"""Antithetic pairs of binary choices, with the coupling integrated out."""

from __future__ import annotations

import torch
from torch import Tensor

from xorflow.estimators.antithetic import Antithetic
from xorflow.flows import Choices


class DisARM(Antithetic):
    r"""Antithetic pairs at each layer, for the special-case bound :math:`L = E_{p(u|x)}[\log p_Y(x \ominus u)]`.

    .. math:: \frac{\partial L}{\partial \phi_d} \approx \tfrac12 \big(A_d(b) - A_d(\tilde b)\big) (b_d - \tilde b_d)
              \max(p_d, 1 - p_d), \qquad b = 1[e > 1 - p],\; \tilde b = 1[1 - e > 1 - p],

    with e uniform, :math:`\phi` the logits and p the probabilities of a layer, and A_d the rewards that u_d can change: in the
    last layer r_d alone. Where the two arms agree the estimate is zero.

    With several layers the pair of a layer shares the choices before it; after it each arm has a sample of its own: the one
    that the pass itself follows, and a fresh one or, with `common`, one from the same uniforms.

    Unbiased for the gradient of L. Only for binary choices that are independent within a layer: for others it is refused. A
    learned base gets the gradient of the rewards.

    Cost: L passes, and L (L - 1) / 2 of suffixes without gradient. Dong, Mnih and Tucker (2020); Yin et al. (2020).

    Args:
        sum_last: take the expectation over the last layer's choices instead of drawing them: less variance, unbiased too.
        common: draw what follows the arms of a layer from the same uniforms instead of independently: unbiased too.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> DisARM()(flow, torch.tensor([[0, 1, 1, 0]])).surrogate.backward()
    """

    name = "DisARM"

    def __init__(self, sum_last: bool = False, common: bool = False) -> None:
        super().__init__(2, 1, sum_last, common)

    def choose(self, choices: Choices, uniforms: Tensor) -> Tensor:
        e = uniforms[0]
        return torch.stack((choices.sample(e), choices.sample(1 - e)))

    def slope(self, choices: Choices, arms: Tensor, rewards: Tensor) -> Tensor:
        likelier = torch.sigmoid(choices.logits.abs())  # max(p, 1 - p)
        arms = arms.to(rewards.dtype)
        return 0.5 * (rewards[0] - rewards[1]) * (arms[0] - arms[1]) * likelier
