"""A control variate from relaxed rewards and a small network of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from xorflow.errors import ConfigError
from xorflow.estimators.relaxed_control import RelaxedControl


class Relax(RelaxedControl):
    r"""`Rebar` with a free part in its control variate, for :math:`L = E_{p(u|x)}[\log p_Y(x \ominus u)]`.

    .. math:: \frac{\partial L}{\partial \phi_d} \approx \big[A_d(b) - C_d(\tilde z)\big](b_d - p_d)
              + \frac{\partial C(z)}{\partial \phi_d} - \frac{\partial C(\tilde z)}{\partial \phi_d}, \qquad
              C(z) = \eta\, R\big(\sigma(z / \tau)\big) + \sum_e h(z_e)

    with h a network of one hidden layer, the same for all features of a layer, which sees z_e, the logit of the choice, and
    the rewards that either value of it would have if no layer followed. At the start h = 0.

    Unbiased for the gradient of L whatever its parameters are: :math:`\eta`, :math:`\tau` and h are trained by the second
    loss, the mean square of the estimate. Only for binary choices that are independent within a layer. A learned base gets
    the gradient of the rewards.

    Cost: the passes of `Rebar`, and h at z and :math:`\tilde z`. Grathwohl et al. (2018).

    Args:
        hidden: the width of h.
        eta: the factor at the start.
        tau: the temperature at the start.
        sum_last: take the expectation over the last layer's choices instead of drawing them: less variance, unbiased too.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> loss = Relax()(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> (loss.surrogate + loss.control).backward()
    """

    name = "RELAX"

    def __init__(self, hidden: int = 8, eta: float = 1.0, tau: float = 0.5, sum_last: bool = False) -> None:
        super().__init__(eta, tau, sum_last)
        if hidden < 1:
            raise ConfigError(
                f"the free control variate of RELAX is a network with at least one hidden unit; got hidden={hidden}: without "
                "one it has no parameters, and the estimator is rebar"
            )
        self.hidden = hidden
        self.networks = nn.ModuleList()

    def config(self) -> dict[str, Any]:
        return {"hidden": self.hidden} | super().config()

    def make_parameters(self, layers: int, like: Tensor) -> None:
        self.networks = nn.ModuleList(_network(self.hidden) for _ in range(layers))
        self.networks.to(like.device, like.dtype)

    def free(self, layer: int, z: Tensor, logits: Tensor, outcomes: Tensor) -> Tensor:
        seen = torch.broadcast_tensors(z, logits, *outcomes.unbind(-1))
        return self.networks[layer](torch.stack(seen, -1)).squeeze(-1)


def _network(hidden: int) -> nn.Sequential:
    last = nn.Linear(hidden, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), last)
