"""Relaxed choices with a temperature: biased gradients through the choices themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xorflow._states import Layout
from xorflow.errors import ConfigError
from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.layerwise import after, logit_of, require_no_own
from xorflow.estimators.relaxed_states import Relaxed, RelaxedPoint, relaxed_rewards, straight_through
from xorflow.flows import Choices, LatentFlow

_WHY = "takes gradients through all choices of a layer at once"


class Concrete(Estimator):
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
        super().__init__()
        self.tau = checked_temperature(tau)

    def config(self) -> dict[str, Any]:
        return {"tau": self.tau}

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int]:
        return noise_width(flow), flow.depth, flow.features

    def check(self, flow: LatentFlow) -> None:
        require_no_own(flow, "concrete", _WHY)

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        assert draws is not None
        hard = flow.start(x)
        soft = RelaxedPoint.of(flow, hard)
        for index, layer in enumerate(flow.layers):
            noise = draws[..., index, :]
            choices = layer.generator_choices(soft.seen(), context)
            with torch.no_grad():
                plain = choices if index == 0 else layer.generator_choices(hard, context)
                hard = after(flow, hard, Choices(disturbed(plain, layer.layout, noise), layer.layout).mode())
            squashed = Choices(disturbed(choices, layer.layout, noise) / self.tau, layer.layout).mean
            soft = soft.after(flow, Relaxed(squashed))
        value = relaxed_rewards(flow.base, soft.state.values).sum(-1)
        with torch.no_grad():
            bound = flow.base.log_prob(hard.state).sum(-1).mean()
        return Loss(surrogate=-value.mean(), bound=bound)


class StraightThroughGumbel(Estimator):
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

    def __init__(self, tau: float = 1.0) -> None:
        super().__init__()
        self.tau = checked_temperature(tau)

    def config(self) -> dict[str, Any]:
        return {"tau": self.tau}

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int]:
        return noise_width(flow), flow.depth, flow.features

    def check(self, flow: LatentFlow) -> None:
        require_no_own(flow, "st-gumbel", _WHY)

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        assert draws is not None

        def choose(choices: Choices, layer: int) -> Relaxed:
            layout = flow.layers[layer].layout
            z = disturbed(choices, layout, draws[..., layer, :])
            soft = Choices(z / self.tau, layout).mean
            return straight_through(Choices(z.detach(), layout).mode(), soft, layout)

        value = relaxed_rewards(flow.base, end_of_pass(flow, x, context, choose).state.values).sum(-1)
        return Loss(surrogate=-value.mean(), bound=value.detach().mean())


def end_of_pass(
    flow: LatentFlow, x: Tensor, context: Tensor | None, choose: Callable[[Choices, int], Relaxed]
) -> RelaxedPoint:
    """The end of a pass whose choices, relaxed or hard, carry gradients of their own."""
    point = RelaxedPoint.of(flow, flow.start(x))
    for index, layer in enumerate(flow.layers):
        point = point.after(flow, choose(layer.generator_choices(point.seen(), context), index))
    return point


def noise_width(flow: LatentFlow) -> int:
    """How many uniforms a choice takes: one for two values, otherwise one for each."""
    return max(1 if c.binary else c.width for c in (layer.transform.choices for layer in flow.layers))


def disturbed(choices: Choices, layout: Layout, uniforms: Tensor) -> Tensor:
    """Packed logits and noise, of which the largest is a draw: logistic for bits, Gumbel for the values of others."""
    eps = torch.finfo(uniforms.dtype).eps
    noise = []
    for number, group in enumerate(layout.alphabet.groups):
        of_group = uniforms[: group.each].index_select(-1, layout.features(number))
        if group.binary:
            noise.append(logit_of(of_group[0]))
        else:
            noise.append(-torch.log(-torch.log(of_group.clamp(eps, 1 - eps))).movedim(0, -1))
    return choices.logits + layout.packed(noise)


def checked_temperature(tau: float) -> float:
    if not tau > 0:
        raise ConfigError(f"tau, a temperature, is greater than 0; got {tau}")
    return float(tau)
