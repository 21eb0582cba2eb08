"""What estimators that go through a flow layer by layer share: what is drawn, steps, ends, and reasons to refuse."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xorflow._states import Layout
from xorflow.errors import ConfigError, ModelError
from xorflow.estimators.base import Estimator, Loss
from xorflow.estimators.credit import feature_sums
from xorflow.estimators.descendants import Reach, structure
from xorflow.flows import Choices, LatentFlow, Layer, Point


class LayerwiseEstimator(Estimator):
    """An estimator that draws the choices of all layers, or of all but the last, whose expectation it takes.

    Args:
        sum_last: take the expectation over the last layer's choices instead of drawing them.
    """

    uniforms: int = 1
    """How many a choice takes."""

    needs_draws = False
    """Whether it has a control variate, which makes no sense where nothing is left to draw."""

    def __init__(self, sum_last: bool = False) -> None:
        super().__init__()
        self.sum_last = sum_last
        self.sums = nn.ModuleList()
        self._prepared_for: tuple[object, ...] | None = None

    def drawn_layers(self, flow: LatentFlow) -> int:
        """How many layers are drawn."""
        return flow.depth - self.sum_last

    def noise_shape(self, flow: LatentFlow) -> tuple[int, int, int] | None:
        layers = self.drawn_layers(flow)
        return (self.uniforms, layers, flow.features) if layers else None

    def check(self, flow: LatentFlow) -> None:
        super().check(flow)
        if self.sum_last and not flow.last_layer_summable:
            raise ModelError("sum_last sums the last layer out, which must not see its own u; leave it out")
        if self.needs_draws and not self.drawn_layers(flow):
            raise ModelError(
                "one layer that is summed out leaves nothing to draw, and the control variate of "
                f"{type(self).__name__} without parameters; use analytic, which is the same gradient"
            )

    def prepare(self, flow: LatentFlow, total_steps: int | None = None) -> None:
        del total_steps
        key = (flow.device, *structure(flow))
        if self._prepared_for != key:
            self._prepared_for = key
            self.make_for(flow)
            self.to(flow.device)

    def make_for(self, flow: LatentFlow) -> None:
        """Make what depends on the flow's structure: from rewards the sums of those that each choice of a layer can change."""
        reach = Reach(flow, "p")
        self.sums = feature_sums([reach.rewards(layer) for layer in range(self.drawn_layers(flow))])


@dataclass(frozen=True)
class Step:
    """A layer of a pass in which choices were drawn.

    Attributes:
        flow: the model.
        draws: those of the whole pass, (S, B, L', D).
        before: where the layer began.
        choices: the distribution of its choices, with graph.
        drawn: what was drawn, (n, B, D); the first went on.
    """

    flow: LatentFlow
    draws: Tensor
    before: Point
    choices: Choices
    drawn: Tensor

    @property
    def index(self) -> int:
        """Which layer it is."""
        return self.before.layer

    @property
    def layer(self) -> Layer:
        return self.flow.layers[self.index]

    def after(self, u: Tensor) -> Point:
        """The point behind the layer, where it takes the choice u."""
        return self.before.after(self.layer, u)


class ByLayer(LayerwiseEstimator):
    """An estimator of the special-case bound that goes through a flow once, and then adds up an estimate for each layer drawn.

    A new one is `estimate`; what is drawn at a layer is changed by `draw_at`.
    """

    @abstractmethod
    def estimate(self, step: Step, rewards: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of one layer, from the rewards (B, D) at the end of the pass, without gradient.

        Returns:
            What has the gradient in the layer's logits, (B,), and what trains the estimator's own parameters, or None.
        """

    def draw_at(self, layer: Layer, point: Point, noise: Tensor) -> tuple[Tensor, Choices]:
        """What is drawn at a layer, (n, B, D), from its noise (S, B, D), and the distribution that it is drawn from."""
        u, choices, _ = layer.choose(point, noise[0])
        return u.unsqueeze(0), choices

    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        point, steps = start, []
        for index, layer in enumerate(flow.layers[: self.drawn_layers(flow)]):
            assert draws is not None
            drawn, choices = self.draw_at(layer, point, draws[..., index, :])
            steps.append(Step(flow, draws, point, choices, drawn))
            point = point.after(layer, drawn[0])
        rewards = end_rewards(flow, point)  # (B, D)
        value = rewards.sum(-1)
        estimates = [self.estimate(step, rewards.detach()) for step in steps]
        # the value's own gradient is that of a learned base and, where it is summed out, of the last layer
        surrogate = sum((of_layer for of_layer, _ in estimates), start=value)
        controls = [control for _, control in estimates if control is not None]
        return Loss.of(surrogate, value, control=torch.stack(controls).sum() if controls else None)


def end_rewards(flow: LatentFlow, point: Point) -> Tensor:
    """The log base probabilities (..., D) at the end of a pass, or expected of the last layer if the pass ends before it."""
    if point.layer == flow.depth:
        return flow.base.log_prob(point.state)
    choices, outcomes = flow.last_choices(point)
    return choices.expectation(outcomes)


def pushed(mean: Tensor, direction: Tensor, layout: Layout) -> Tensor:
    r"""How probabilities `mean` move with their logits in a direction: :math:`\mathrm{diag}(\pi) v - \pi \pi^\top v`."""
    by_group = [
        p * (1 - p) * v if group.binary else p * (v - (p * v).sum(-1, keepdim=True))
        for group, p, v in layout.alphabet.grouped(layout.logits(mean), layout.logits(direction))
    ]
    return layout.packed(by_group)


def require_samples(samples: int, why: str) -> int:
    """As many samples, at least 2."""
    if samples < 2:
        raise ConfigError(f"{why}: samples is at least 2; got {samples}")
    return samples


def require_binary(estimator: Estimator, flow: LatentFlow) -> None:
    for index, layer in enumerate(flow.layers):
        if not layer.transform.choices.binary:
            raise ModelError(
                f"{type(estimator).__name__} is for choices between two values, and layer {index + 1} has features with "
                f"{layer.transform.choices.width}; use score-function, double-cv or vimco"
            )


def require_no_own(estimator: Estimator, flow: LatentFlow, why: str) -> None:
    for index, layer in enumerate(flow.layers):
        if layer.autoregressive_in_u:
            raise ModelError(
                f"{type(estimator).__name__} {why}, and layer {index + 1} sees its own u; use score-function"
            )


def logit_of(uniforms: Tensor) -> Tensor:
    """log v - log(1 - v), finite for the zeros that a generator may give."""
    return torch.logit(uniforms, eps=torch.finfo(uniforms.dtype).eps)
