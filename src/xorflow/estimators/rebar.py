"""A control variate from relaxed rewards, with a learned factor and temperature."""

from __future__ import annotations

from torch import Tensor

from xorflow.estimators.relaxed_control import RelaxedControl


class Rebar(RelaxedControl):
    r"""The score function with relaxed rewards as its control variate, for :math:`L = E_{p(u|x)}[\log p_Y(x \ominus u)]`.

    .. math:: \frac{\partial L}{\partial \phi_d} \approx \big[A_d(b) - C_d(\tilde z)\big](b_d - p_d)
              + \frac{\partial C(z)}{\partial \phi_d} - \frac{\partial C(\tilde z)}{\partial \phi_d}, \qquad
              C(z) = \eta\, R\big(\sigma(z / \tau)\big),

    with :math:`z = \phi + \mathrm{logit}\, v`, b = 1[z > 0], and :math:`\tilde z` another z that leads to the same b. A_d are
    the rewards that u_d can change, C_d the same rewards of the relaxed choice, times :math:`\eta`. With several layers only
    the layer whose gradient is taken is relaxed: the rewards are those of the hard choices drawn after it, the relaxed ones
    those of their means.

    Unbiased for the gradient of L whatever :math:`\eta` and :math:`\tau` are. These, one pair a layer, are the estimator's
    own parameters: the second loss, the mean square of the estimate, trains them along. Only for binary choices that are
    independent within a layer. A learned base gets the gradient of the rewards.

    Cost: L passes, and L (L - 1) of suffixes, with gradients in their inputs and, for the second loss, gradients of those.
    Tucker et al. (2017).

    Args:
        eta: the factor at the start.
        tau: the temperature at the start.
        sum_last: take the expectation over the last layer's choices instead of drawing them: less variance, unbiased too.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> loss = Rebar()(flow, torch.tensor([[0, 1, 1, 0]]))
    >>> (loss.surrogate + loss.control).backward()
    """

    name = "REBAR"

    def __init__(self, eta: float = 1.0, tau: float = 0.5, sum_last: bool = False) -> None:
        super().__init__(eta, tau, sum_last)

    def make_parameters(self, layers: int, like: Tensor) -> None:
        del layers, like

    def free(self, layer: int, z: Tensor, logits: Tensor, outcomes: Tensor) -> None:
        del layer, z, logits, outcomes
