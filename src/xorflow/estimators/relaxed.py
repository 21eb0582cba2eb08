"""Gradients through the choices themselves: biased, but where rewards are linear in them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from xorflow._states import Layout
from xorflow.estimators.base import Bias, Estimator, Loss, Part, Target
from xorflow.estimators.entropy import EntropyBonus
from xorflow.estimators.layerwise import logit_of, pushed, require_no_own
from xorflow.estimators.relaxed_states import (
    Relaxed,
    RelaxedPoint,
    checked_temperature,
    relaxed_rewards,
    straight_through,
)
from xorflow.flows import Choices, LatentFlow, Point
from xorflow.flows.choices import choose


class _ThroughChoices(Estimator):
    """One pass whose choices carry gradients of their own, at a temperature."""

    def __init__(self, tau: float = 1.0) -> None:
        super().__init__()
        self.tau = checked_temperature(tau)

    def check(self, flow: LatentFlow) -> None:
        require_no_own(self, flow, "takes gradients through all choices of a layer at once")

    @abstractmethod
    def choose(self, choices: Choices, layout: Layout, noise: Tensor | None) -> Relaxed:
        """A layer's choices, from its logits and its noise (S, B, D)."""

    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        value, _ = self.value(flow, start, draws)
        return Loss.of(value, value)

    def value(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> tuple[Tensor, list[Choices]]:
        """log p_Y at the end of the pass, (B,), and the choices that it met."""
        point, met = RelaxedPoint.of(flow, start), []
        for index, layer in enumerate(flow.layers):
            choices = layer.generator_choices(point.seen())
            noise = None if draws is None else draws[..., index, :]
            point = point.after(flow, self.choose(choices, layer.layout, noise))
            met.append(choices)
        return relaxed_rewards(flow.base, point.state.values).sum(-1), met


class StraightThrough(_ThroughChoices):
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
        self.entropy, self.anneal, self.earlier = entropy, anneal, earlier
        self.bonus = EntropyBonus(entropy, anneal, earlier)

    def target(self, flow: LatentFlow) -> Target:
        return self.bonus.target(flow)

    def bias_of(self, flow: LatentFlow, part: Part) -> Bias | None:
        if part.role == "base":
            return Bias("the base gets the gradient of the greedy flow's likelihood")
        if flow.depth > 1:
            return Bias("later layers see the greedy choices, and not draws")
        return None

    def prepare(self, flow: LatentFlow, total_steps: int | None = None) -> None:
        self.bonus.prepare(flow.base.logits, total_steps)

    def choose(self, choices: Choices, layout: Layout, noise: Tensor | None) -> Relaxed:
        del noise
        return straight_through(choices.mode(), choices.mean, layout)

    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        value, met = self.value(flow, start, draws)
        surrogate = value
        if self.bonus.active:
            surrogate = sum(self.bonus.weigh([c.entropy().sum(-1) for c in met]), start=value)
        return Loss.of(surrogate, value)

    def update(self, stats: Mapping[str, Tensor]) -> None:
        del stats
        self.bonus.update()


class StraightThroughGumbel(_ThroughChoices):
    r"""Hard choices forward, the relaxed ones of `Concrete` backward.

    .. math:: u = h + s - \mathrm{sg}[s], \qquad s = \sigma(z / \tau),\; h = 1[z > 0],\; z = \phi + \mathrm{logit}\, v, \qquad
              S = \log p_Y\big(x \ominus u^{(1)} \ominus \dots \ominus u^{(L)}\big)

    and the softmax and the largest entry of :math:`\phi + \gamma` for more than two values.

    Biased for the gradient of the special-case bound L at every :math:`\tau > 0`. At depth 1 its expectation is that of
    `Concrete`, since rewards are linear; at depth 2 and more it differs, as networks see hard choices. The value is the bound
    of the sample.

    Cost: L passes. Jang, Gu and Poole (2017).

    Args:
        tau: the temperature of the backward pass.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> StraightThroughGumbel()(flow, torch.tensor([[0, 1, 1, 0]])).surrogate.backward()
    """

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int]:
        alphabets = [layer.transform.choices for layer in flow.layers]
        # of a choice: one for two values, otherwise one for each
        width = max(1 if choices.binary else choices.width for choices in alphabets)
        return width, flow.depth, flow.features

    def bias_of(self, flow: LatentFlow, part: Part) -> Bias | None:
        del flow
        return None if part.role == "base" else Bias("the gradient is that of relaxed choices")

    def choose(self, choices: Choices, layout: Layout, noise: Tensor | None) -> Relaxed:
        assert noise is not None
        z = _disturbed(choices, layout, noise)
        return straight_through(
            Choices(z.detach(), layout).mode(), Choices(z / self.tau, layout).mean, layout
        )


class Concrete(StraightThroughGumbel):
    r"""Relaxed choices in place of hard ones (binary Concrete, Gumbel-softmax), differentiated as they are.

    .. math:: u = \sigma\big((\phi + \mathrm{logit}\, v) / \tau\big) \quad \text{or} \quad
              u = \mathrm{softmax}\big((\phi + \gamma) / \tau\big), \qquad
              S = \log p_Y\big(x \ominus u^{(1)} \ominus \dots \ominus u^{(L)}\big),

    with v uniform, :math:`\gamma` Gumbel noise, and the transform in its multilinear form.

    Biased for the gradient of the special-case bound L at every :math:`\tau > 0`, also at depth 1, where it is
    :math:`\Delta_d\, E[\sigma'(z/\tau)/\tau]` instead of :math:`\Delta_d f_d (1 - f_d)`: right in sign, wrong in scale from
    feature to feature; right in the limit :math:`\tau \to 0`, in which its variance grows without bound. Networks see inputs
    between the categories. The value at relaxed choices is no bound: what is reported is the one of the hard choices (the
    largest of each) from the same noise.

    Cost: L passes, and L - 1 more without gradient for the reported bound. Maddison, Mnih and Teh (2017); Jang, Gu and Poole
    (2017).

    Args:
        tau: the temperature.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,)))], xf.FactorisedBase(4))
    >>> Concrete(tau=0.5)(flow, torch.tensor([[0, 1, 1, 0]])).surrogate.backward()
    """

    def __init__(self, tau: float = 0.5) -> None:
        super().__init__(tau)

    def bias_of(self, flow: LatentFlow, part: Part) -> Bias | None:
        del flow, part
        return Bias("rewards are those of relaxed choices")

    def choose(self, choices: Choices, layout: Layout, noise: Tensor | None) -> Relaxed:
        assert noise is not None
        return Relaxed(Choices(_disturbed(choices, layout, noise) / self.tau, layout).mean)

    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        assert draws is not None
        value, met = self.value(flow, start, draws)
        with torch.no_grad():
            point = start
            for index, layer in enumerate(flow.layers):
                choices = layer.generator_choices(point) if index else met[0]
                z = _disturbed(choices, layer.layout, draws[..., index, :])
                point = point.after(layer, Choices(z, layer.layout).mode())
            bound = flow.base.log_prob(point.state).sum(-1)
        return Loss.of(value, bound)


class ReinMax(_ThroughChoices):
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

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int]:
        return 1, flow.depth, flow.features

    def bias_of(self, flow: LatentFlow, part: Part) -> Bias | None:
        if part.role == "base":
            return None
        if self.tau != 1:
            return Bias("Heun's rule is of second order at temperature 1 only")
        return Bias("later layers are not quadratic in their input") if part.layer != flow.depth else None

    def choose(self, choices: Choices, layout: Layout, noise: Tensor | None) -> Relaxed:
        assert noise is not None
        u = choose(choices, noise[0])
        hard = layout.corners(u, choices.logits.dtype)
        moved = choices.logits - choices.logits.detach()  # zero, but for its gradient
        mean = choices.mean.detach()
        between = (hard + Choices(choices.logits.detach() / self.tau, layout).mean) / 2
        return Relaxed(hard + 2 * pushed(between, moved, layout) - pushed(mean, moved, layout) / 2, u)


def _disturbed(choices: Choices, layout: Layout, uniforms: Tensor) -> Tensor:
    """Packed logits and noise, of which the largest is a draw: logistic for bits, Gumbel for the values of others."""
    eps = torch.finfo(uniforms.dtype).eps
    noise = []
    for group, features in layout.alphabet.grouped(layout.features()):
        of_group = uniforms[: group.each].index_select(-1, features)
        if group.binary:
            noise.append(logit_of(of_group[0]))
        else:
            noise.append(-torch.log(-torch.log(of_group.clamp(eps, 1 - eps))).movedim(0, -1))
    return choices.logits + layout.packed(noise)
