"""The special case with prefixes drawn from a proposal: the estimator of the paper's appendix C, with its weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from xorflow._states import Layout
from xorflow.errors import ConfigError, ModelError
from xorflow.estimators.base import Estimator, Loss
from xorflow.flows import Choices, LatentFlow, Layer, Point
from xorflow.flows.choices import choose, outcomes


class ProposalPrefix(Estimator):
    r"""The gradient of :math:`L = E_{p(u|x)}[\log p_Y(x \ominus u)]`, prefixes drawn from :math:`\rho` instead of p.

    .. math:: S = \sum_d \mathrm{sg}[\omega_d\, r_d(u_d)]\, \big(\log p(u_d \mid v_{<d}) + \log p(v_{<d})\big), \qquad
              \omega_d = \frac{p(v_{<d})}{\rho(v_{<d})},

    with v drawn from :math:`\rho` and each u_d from p given the prefix of v. Here :math:`\rho` mixes the generator's
    conditionals with uniform ones, and carries no gradient. At depth L, u_d is a choice of the last layer, and its prefix has
    all choices of the layers before as well.

    Unbiased for the gradient of L with every mixture; with `mix=0`, :math:`\rho = p` and all weights are 1, and at depth 1 the
    two terms are those of `SpecialCase`. The weights are products of up to L D ratios, so with `mix > 0` their variance grows
    with these.

    Cost: L passes if no layer sees its own u; otherwise, for a layer that does, as many as drawing v takes, and one more.
    Hesselink and Aziz (2020), appendix C.

    Args:
        mix: the share of the uniform distribution in :math:`\rho`, from 0 to 1.
        sum_last: take the expectation over each u_d given its prefix instead of drawing it: less variance, unbiased too.

    >>> import torch, xorflow as xf
    >>> _ = torch.manual_seed(0)
    >>> sees = {"state": "before", "own": "before"}
    >>> flow = xf.LatentFlow([xf.Layer(xf.MADE(4, hidden=(8,), sees=sees))], xf.FactorisedBase(4))
    >>> ProposalPrefix(mix=0.1)(flow, torch.tensor([[0, 1, 1, 0]])).surrogate.backward()
    """

    def __init__(self, mix: float = 0.0, sum_last: bool = False) -> None:
        super().__init__()
        if not 0 <= mix <= 1:
            raise ConfigError(
                f"mix, the share of the uniform distribution, is a number from 0 to 1; got {mix}"
            )
        self.mix, self.sum_last = mix, sum_last

    def config(self) -> dict[str, Any]:
        return {"mix": self.mix, "sum_last": self.sum_last}

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int]:
        return (
            1 if self.sum_last else 2,
            flow.depth,
            flow.features,
        )  # of the second, only the last layer's is used

    def check(self, flow: LatentFlow) -> None:
        if flow.layers[-1].conditioner.order is None:
            raise ModelError(
                "prefixes from a proposal need a last layer with an ordering; use the special case for other flows"
            )

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        assert draws is not None
        point, last = flow.start(x), flow.layers[-1]
        log_p = log_weight = flow.base.logits.new_zeros(())  # of the layers before the last, (B, 1) or less
        for index, layer in enumerate(flow.layers[:-1]):
            v, choices, ratio = self._prefix(layer, point, draws[0, ..., index, :], context)
            log_p = log_p + choices.log_prob(v).sum(-1, keepdim=True)
            log_weight = log_weight + ratio.sum(-1, keepdim=True)
            point = Point(point.x, layer.transform.to_base(point.state, v), v, index + 1)
        v, choices, ratio = self._prefix(last, point, draws[0, ..., -1, :], context)
        order = _on_device(last.conditioner.order or (), x.device)
        log_p = log_p + _before(choices.log_prob(v), order)
        omega = (log_weight + _before(ratio, order)).exp()
        if self.sum_last:
            rewards = choices.expectation(outcomes(last.transform, flow.base, point.state))
        else:
            u = choose(choices, draws[1, ..., -1, :])
            rewards = flow.base.log_prob(last.transform.to_base(point.state, u))
            log_p = log_p + choices.log_prob(u)
        score = (omega * rewards.detach() * log_p).sum(-1)
        direct = (omega * rewards).sum(-1)  # the gradient of a learned base, and of what is summed out
        return Loss(surrogate=-(score + direct).mean(), bound=direct.detach().mean())

    def _prefix(
        self, layer: Layer, point: Point, draws: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Choices, Tensor]:
        """v ~ rho, the generator's choices given it, and log p - log rho of each choice, (..., D), without gradient."""
        if layer.autoregressive_in_u:
            v = self._draw_prefix(layer, point, draws, context)
            choices = layer.generator_choices(point, context, v)
        else:
            choices = layer.generator_choices(point, context)
            v = self._chosen(choices, draws, layer.layout)
        return v, choices, choices.log_prob(v).detach() - self.log_rho(choices, v)

    def log_rho(self, choices: Choices, v: Tensor) -> Tensor:
        """log rho(v_d | v_<d), (..., D), without gradient."""
        probability = choices.log_prob(v).detach().exp()
        sizes = _on_device(choices.alphabet.sizes, v.device)
        return ((1 - self.mix) * probability + self.mix / sizes.to(probability.dtype)).log()

    @torch.no_grad()
    def _draw_prefix(self, layer: Layer, point: Point, draws: Tensor, context: Tensor | None) -> Tensor:
        """v ~ rho of a layer that sees it, by fixed-point iteration: after pass k at least k features are right."""
        alphabet = layer.transform.choices
        if not draws.is_floating_point():
            return alphabet.integers(draws)
        v = torch.zeros(draws.shape, dtype=alphabet.dtype, device=draws.device)
        for _ in range(alphabet.features + 1):
            following = self._chosen(layer.generator_choices(point, context, v), draws, layer.layout)
            if torch.equal(following, v):
                return following
            v = following
        return v

    @torch.no_grad()
    def _chosen(self, choices: Choices, draws: Tensor, layout: Layout) -> Tensor:
        """v by the draws: by inversion of rho's distribution function at uniforms, or given as integers."""
        if not draws.is_floating_point():
            return choices.alphabet.integers(draws)
        drawn = []
        for log_probs, uniforms in zip(choices.log_probs(), layout.split(draws), strict=True):
            mixed = (1 - self.mix) * log_probs.exp() + self.mix / log_probs.shape[-1]
            drawn.append((uniforms.unsqueeze(-1) > mixed.cumsum(-1)[..., :-1]).sum(-1))
        return choices.alphabet.integers(layout.joined(drawn))


def _before(values: Tensor, order: Tensor) -> Tensor:
    """The sum over the features strictly before each one in the ordering."""
    arranged = values.index_select(-1, order)
    total = arranged.cumsum(-1) - arranged
    return total.index_select(-1, order.argsort())


@functools.lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied once: a captured step can't copy from the host."""
    return torch.tensor(numbers, device=device)
