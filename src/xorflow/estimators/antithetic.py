"""Several choices at each layer that repel each other, and what follows each of them."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from xorflow.estimators.layerwise import (
    ByLayer,
    Step,
    end_rewards,
    require_binary,
    require_no_own,
    require_samples,
)
from xorflow.flows import Choices, LatentFlow, Layer, Point


class Antithetic(ByLayer):
    """What `DisARM` and `ARMS` share: one pass, and at each of its layers further arms with suffixes of their own.

    At layer l, given the choices before it, n arms are drawn jointly. The first goes on as the pass; from each of the others
    a sample of the layers after l is drawn, fresh and independent or from the pass's own uniforms. Either way each arm's
    reward has its right expectation, which is all that estimates linear in the rewards need.

    Args:
        arms: n.
        uniforms: how many uniforms a choice of all arms takes.
        sum_last: take the expectation over the last layer instead of drawing it.
        common: draw what follows the other arms from the uniforms of the pass.
    """

    def __init__(self, arms: int, uniforms: int, sum_last: bool, common: bool) -> None:
        super().__init__(sum_last)
        self.arms, self.uniforms, self.common = arms, uniforms, common

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int] | None:
        layers = self.drawn_layers(flow)
        suffixes = 0 if self.common else (self.arms - 1) * (layers - 1)  # none after the last layer
        return (self.uniforms + suffixes, layers, flow.features) if layers else None

    def check(self, flow: LatentFlow) -> None:
        require_binary(self, flow)
        require_no_own(self, flow, "needs the choices of a layer to be independent given what it sees")
        super().check(flow)

    @abstractmethod
    def choose(self, choices: Choices, uniforms: Tensor) -> Tensor:
        """The arms (n, B, D), from uniforms (N, B, D)."""

    @abstractmethod
    def slope(self, choices: Choices, arms: Tensor, rewards: Tensor) -> Tensor:
        """An estimate of the gradient in the logits (B, D), from the arms and their rewards, both (n, B, D)."""

    def draw_at(self, layer: Layer, point: Point, noise: Tensor) -> tuple[Tensor, Choices]:
        choices = layer.generator_choices(point)
        with torch.no_grad():
            return self.choose(choices, noise[: self.uniforms]), choices

    def estimate(self, step: Step, rewards: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            ends = self.sums[step.index](torch.cat((rewards.unsqueeze(0), self._others(step))))
            slope = self.slope(step.choices, step.drawn, ends)
        return (slope * step.choices.logits).sum(-1), None

    def _others(self, step: Step) -> Tensor:
        """The rewards (n - 1, B, D) of the arms that the pass does not follow."""
        flow, point = step.flow, step.after(step.drawn[1:])
        stop = self.drawn_layers(flow)
        if not self.common:
            first = self.uniforms + (point.layer - 1) * (self.arms - 1)
            fresh = step.draws[first : first + self.arms - 1, ..., point.layer :, :]
            point = flow.run(point, draws=fresh, stop=stop).end
        for index in range(point.layer, stop):
            same = step.draws[..., index, :].unsqueeze(1)  # for all arms
            arms, _ = self.draw_at(flow.layers[index], point, same)
            point = point.after(flow.layers[index], arms[0])
        return end_rewards(flow, point)


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

    def __init__(self, sum_last: bool = False, common: bool = False) -> None:
        super().__init__(2, 1, sum_last, common)

    def choose(self, choices: Choices, uniforms: Tensor) -> Tensor:
        e = uniforms[0]
        return torch.stack((choices.sample(e), choices.sample(1 - e)))

    def slope(self, choices: Choices, arms: Tensor, rewards: Tensor) -> Tensor:
        likelier = torch.sigmoid(choices.logits.abs())  # max(p, 1 - p)
        arms = arms.to(rewards.dtype)
        return 0.5 * (rewards[0] - rewards[1]) * (arms[0] - arms[1]) * likelier


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

    def __init__(self, samples: int = 4, sum_last: bool = False, common: bool = False) -> None:
        super().__init__(
            require_samples(samples, "antithetic choices come in twos or more"), samples, sum_last, common
        )
        self.samples = samples

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
