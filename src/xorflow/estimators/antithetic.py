"""Several choices at each layer that repel each other, and what follows each of them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.descendants import structure
from xorflow.estimators.layerwise import (
    after,
    descendant_sums,
    end_rewards,
    require_binary,
    require_no_own,
    require_summable,
)
from xorflow.flows import Choices, LatentFlow, Point


class Antithetic(Estimator):
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

    name: str

    def __init__(self, arms: int, uniforms: int, sum_last: bool, common: bool) -> None:
        super().__init__()
        self.arms, self.uniforms = arms, uniforms
        self.sum_last, self.common = sum_last, common
        self.sums = nn.ModuleList()
        self._prepared_for: tuple[object, ...] | None = None

    def config(self) -> dict[str, Any]:
        return {"sum_last": self.sum_last, "common": self.common}

    def _drawn_layers(self, flow: LatentFlow) -> int:
        return flow.depth - self.sum_last

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int] | None:
        layers = self._drawn_layers(flow)
        suffixes = 0 if self.common else (self.arms - 1) * (layers - 1)  # none after the last layer
        return (self.uniforms + suffixes, layers, flow.features) if layers else None

    def check(self, flow: LatentFlow) -> None:
        require_binary(flow, self.name)
        require_no_own(flow, self.name, "needs the choices of a layer to be independent given what it sees")
        if self.sum_last:
            require_summable(flow)

    def prepare(self, flow: LatentFlow, total_steps: int | None = None) -> None:
        del total_steps
        key = (flow.device, *structure(flow))
        if self._prepared_for != key:
            self._prepared_for = key
            self.sums = descendant_sums(flow, self._drawn_layers(flow))

    @abstractmethod
    def choose(self, choices: Choices, uniforms: Tensor) -> Tensor:
        """The arms (n, B, D), from uniforms (N, B, D)."""

    @abstractmethod
    def slope(self, choices: Choices, arms: Tensor, rewards: Tensor) -> Tensor:
        """An estimate of the gradient in the logits (B, D), from the arms and their rewards, both (n, B, D)."""

    def loss(self, flow: LatentFlow, x: Tensor, context: Tensor | None, draws: Tensor | None) -> Loss:
        point = flow.start(x)
        passed: list[tuple[Point, Choices, Tensor]] = []
        for index in range(self._drawn_layers(flow)):
            assert draws is not None
            choices = flow.layers[index].generator_choices(point, context)
            with torch.no_grad():
                arms = self.choose(choices, draws[: self.uniforms, ..., index, :])
            passed.append((point, choices, arms))
            point = after(flow, point, arms[0])
        rewards = end_rewards(flow, point, context)  # (B, D)
        value = rewards.sum(-1)
        surrogate = value  # the gradient of a learned base and, where it is summed out, of the last layer
        for index, (before, choices, arms) in enumerate(passed):
            assert draws is not None
            with torch.no_grad():
                others = self._others(flow, after(flow, before, arms[1:]), context, draws)
                ends = self.sums[index](torch.cat((rewards.detach().unsqueeze(0), others)))
                slope = self.slope(choices, arms, ends)
            surrogate = surrogate + (slope * choices.logits).sum(-1)
        return Loss(surrogate=-surrogate.mean(), bound=value.detach().mean())

    def _others(self, flow: LatentFlow, point: Point, context: Tensor | None, draws: Tensor) -> Tensor:
        """The rewards (n - 1, B, D) of the arms that the pass does not follow."""
        stop = self._drawn_layers(flow)
        if not self.common:
            first = self.uniforms + (point.layer - 1) * (self.arms - 1)
            fresh = draws[first : first + self.arms - 1, ..., point.layer :, :]
            point = flow.run(point, draws=fresh, context=context, stop=stop).end
        for index in range(point.layer, stop):
            choices = flow.layers[index].generator_choices(point, context)
            same = draws[: self.uniforms, ..., index, :].unsqueeze(1)  # for all arms
            point = after(flow, point, self.choose(choices, same)[0])
        return end_rewards(flow, point, context)
