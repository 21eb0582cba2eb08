"""Several binary choices that repel each other as much as a copula of a Dirichlet distribution allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xorflow.errors import ConfigError
from xorflow.estimators.antithetic import Antithetic
from xorflow.flows import Choices


class ARMS(Antithetic):
    r"""n mutually antithetic choices at each layer, for the special-case bound :math:`L = E_{p(u|x)}[\log p_Y(x \ominus u)]`.

    .. math:: \frac{\partial L}{\partial \phi_d} \approx \frac{1}{(n - 1)(1 - \rho_d)} \sum_i \Big(A_d(b_i) - \frac1n \sum_j
              A_d(b_j)\Big) (b_{i,d} - p_d),

    with :math:`\rho_d` the correlation of two arms. They come from a point of the simplex, :math:`\delta \sim \mathrm{Dir}(1,
    \dots, 1)`: :math:`V_i = (1 - \delta_i)^{n-1}` is uniform, and the rarer value, of probability r, is taken where
    :math:`V_i < r`. Then :math:`P(V_i < r, V_j < r) = \max(0, 2 r^{1/(n-1)} - 1)^{n-1}`, which gives :math:`\rho_d`.

    As in `DisARM`, which is the case n = 2, sample by sample: A_d are the rewards that u_d can change, and with several layers
    the arms of a layer share the choices before it and have samples of their own after it.

    Unbiased for the gradient of L. Only for binary choices that are independent within a layer: for others it is refused. A
    learned base gets the gradient of the rewards.

    Cost: L passes, and (n - 1) L (L - 1) / 2 of suffixes without gradient. Dimitriev and Zhou (2021).

    Args:
        samples: n, at least 2.
        sum_last: take the expectation over the last layer's choices instead of drawing them: less variance, unbiased too.
        common: draw what follows the arms of a layer from the same uniforms instead of independently: unbiased too.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> ARMS(samples=3)(flow, torch.tensor([[0, 1, 1, 0]])).surrogate.backward()
    """

    name = "ARMS"

    def __init__(self, samples: int = 4, sum_last: bool = False, common: bool = False) -> None:
        if samples < 2:
            raise ConfigError(
                f"antithetic choices come in twos or more: samples is at least 2; got {samples}"
            )
        super().__init__(samples, samples, sum_last, common)

    def config(self) -> dict[str, Any]:
        return {"samples": self.arms} | super().config()

    def choose(self, choices: Choices, uniforms: Tensor) -> Tensor:
        repelling = dirichlet_copula(uniforms)
        return choices.sample(torch.where(choices.logits < 0, 1 - repelling, repelling))

    def slope(self, choices: Choices, arms: Tensor, rewards: Tensor) -> Tensor:
        deviations = (rewards - rewards.mean(0)) * (arms - choices.mean)
        return deviations.sum(0) / ((self.arms - 1) * one_less_correlation(choices.logits, self.arms))


def dirichlet_copula(uniforms: Tensor) -> Tensor:
    """From independent uniforms (n, ...) to uniforms of which few can be small together, (n, ...)."""
    waits = -uniforms.clamp_min(torch.finfo(uniforms.dtype).tiny).log()
    return (1 - waits / waits.sum(0)) ** (len(uniforms) - 1)


def one_less_correlation(logits: Tensor, arms: int) -> Tensor:
    """1 less the correlation of two arms' choices, from the logits of their probabilities."""
    rarer = torch.sigmoid(-logits.abs())
    both = (2 - rarer ** (-1 / (arms - 1))).clamp_min(0) ** (arms - 1)  # P(both rare) / P(one is)
    return (1 - both) / (1 - rarer)
