"""Control variates from relaxed choices: what `Rebar` and `Relax` share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from xorflow.errors import ConfigError, ModelError
from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.descendants import structure
from xorflow.estimators.layerwise import (
    after,
    descendant_sums,
    end_rewards,
    logit_of,
    require_binary,
    require_no_own,
    require_summable,
)
from xorflow.estimators.relaxed_states import Relaxed, RelaxedPoint, frozen_choices, relaxed_rewards
from xorflow.flows import LatentFlow, Point
from xorflow.flows.choices import outcomes


class RelaxedControl(Estimator):
    """One pass with hard choices, and at each layer a control variate of the relaxed choice that it came from.

    Only the layer whose gradient is taken is relaxed. What follows it enters the rewards as the pass drew it, and the control
    variate by its means, so that the control variate is a continuous function of the relaxed choice alone.

    Args:
        eta: the factor of the relaxed rewards at the start.
        tau: their temperature at the start.
        sum_last: take the expectation over the last layer instead of drawing it.
    """

    name: str
    eta: nn.Parameter
    log_tau: nn.Parameter

    def __init__(self, eta: float, tau: float, sum_last: bool) -> None:
        super().__init__()
        if not tau > 0:
            raise ConfigError(f"tau, a temperature, is greater than 0; got {tau}")
        self._start = {"eta": float(eta), "tau": float(tau)}
        self.sum_last = sum_last
        self.sums = nn.ModuleList()
        self._prepared_for: tuple[object, ...] | None = None
        self._parameters_for: tuple[int, int] | None = None

    def config(self) -> dict[str, Any]:
        return self._start | {"sum_last": self.sum_last}

    def _drawn_layers(self, flow: LatentFlow) -> int:
        return flow.depth - self.sum_last

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int]:
        return 2, self._drawn_layers(flow), flow.features

    def check(self, flow: LatentFlow) -> None:
        require_binary(flow, self.name)
        require_no_own(flow, self.name, "relaxes all choices of a layer at once")
        if self.sum_last:
            require_summable(flow)
            if flow.depth == 1:
                raise ModelError(
                    f"one layer that is summed out leaves nothing to draw, and {self.name}'s control variate without "
                    "parameters; use analytic, which is the same gradient"
                )

    def prepare(self, flow: LatentFlow, total_steps: int | None = None) -> None:
        del total_steps
        layers, like = self._drawn_layers(flow), flow.base.logits
        if self._parameters_for != (layers, flow.features):
            self._parameters_for = (layers, flow.features)
            self.eta = nn.Parameter(like.new_full((layers,), self._start["eta"]))
            self.log_tau = nn.Parameter(like.new_full((layers,), self._start["tau"]).log())
            self.make_parameters(layers, like)
        key = (like.device, *structure(flow))
        if self._prepared_for != key:
            self._prepared_for = key
            self.sums = descendant_sums(flow, layers)

    @abstractmethod
    def make_parameters(self, layers: int, like: Tensor) -> None:
        """Make what the control variate has beside eta and tau."""

    @abstractmethod
    def free(self, layer: int, z: Tensor, logits: Tensor, outcomes: Tensor) -> Tensor | None:
        """What is added to the relaxed rewards, feature by feature, (..., D); None for nothing."""

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        assert draws is not None
        point, passed = flow.start(x), []
        for index in range(self._drawn_layers(flow)):
            choices = flow.layers[index].generator_choices(point, context)
            with torch.no_grad():
                u = choices.sample(draws[0, ..., index, :])
            passed.append((point, choices, u))
            point = after(flow, point, u)
        rewards = end_rewards(flow, point, context)  # (B, D)
        value = rewards.sum(-1)
        surrogate = value  # the gradient of a learned base and, where it is summed out, of the last layer
        control = flow.base.logits.new_zeros(())
        for index, (before, choices, u) in enumerate(passed):
            noise = draws[:, ..., index, :]
            ends = self.sums[index](rewards.detach())
            slope = self._slope(flow, before, choices.logits.detach(), u, ends, noise, context)
            surrogate = surrogate + (slope.detach() * choices.logits).sum(-1)
            control = control + slope.square().mean()
        return Loss(surrogate=-surrogate.mean(), bound=value.detach().mean(), control=control)

    def _slope(
        self,
        flow: LatentFlow,
        before: Point,
        logits: Tensor,
        u: Tensor,
        rewards: Tensor,
        noise: Tensor,
        context: Tensor | None,
    ) -> Tensor:
        """The estimate of the gradient in the logits (B, D), with the graph of the estimator's own parameters alone."""
        z = logits + logit_of(noise[0])
        again, its_slope = conditional(logits, u, noise[1])
        value, slope = self._controlled(flow, before, logits, torch.stack((z, again)), context)
        score = u - torch.sigmoid(logits)
        return (rewards - self.sums[before.layer](value[1])) * score + slope[0] - slope[1] * its_slope

    def _controlled(
        self, flow: LatentFlow, before: Point, logits: Tensor, z: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The control variate by feature at z (2, B, D), and the derivative of its sum in each z."""
        index = before.layer
        tables = [table.detach() for table in flow.base.log_table()]
        (led_to,) = outcomes(flow.layers[index].transform, flow.base, before.state)
        led_to, start = led_to.detach(), RelaxedPoint.of(flow, before)

        def by_feature(z: Tensor) -> Tensor:
            point = start.after(flow, Relaxed(torch.sigmoid(z * torch.exp(-self.log_tau[index]))))
            for later in range(index + 1, flow.depth):
                mean = frozen_choices(flow.layers[later], point.seen(), context).mean
                point = point.after(flow, Relaxed(mean))
            relaxed = self.eta[index] * relaxed_rewards(flow.base, point.state.values, tables)
            added = self.free(index, z, logits, led_to)
            return relaxed if added is None else relaxed + added

        value, pull = torch.func.vjp(by_feature, z)  # pyright: ignore[reportAssignmentType]
        return value, pull(torch.ones_like(value))[0]


def conditional(logits: Tensor, u: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    r"""A relaxed choice given the hard one, :math:`\tilde z \mid u`, and its derivative in the logits.

    The uniform behind z is drawn again where it leads to u: below 1 - p for u = 0, above for u = 1; its logit, plus the logits.
    """
    eps = torch.finfo(uniforms.dtype).eps
    w = uniforms.clamp(eps, 1 - eps)
    low, high = w.log(), torch.log1p(-w)
    up, down = logits + low, high - logits
    z = torch.where(u > 0, softplus(up, threshold=50.0) - high, low - softplus(down, threshold=50.0))
    return z, torch.sigmoid(torch.where(u > 0, up, down))
