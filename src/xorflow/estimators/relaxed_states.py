r"""States and choices that carry gradients, for estimators that differentiate through them; nothing else knows relaxed states.

Relaxed, a state is floats in the layout of logits (see `Alphabet`): a bit in [0, 1], a category as a point of the simplex. Two
kinds occur. *Soft* values lie inside; *hard* ones are corners, with a gradient as if they did not: straight through. The
transform is multilinear,

.. math:: y_j = \sum_u u_u\, x_{t_u(j)}

with x, u and y relaxed: linear in K where one of the two is hard, since then it is a gather, and of K^2 products where both
are soft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import one_hot

from xorflow._math import Function
from xorflow._states import Layout
from xorflow.bases import FactorisedBase, of_bits
from xorflow.errors import ConfigError, ModelError
from xorflow.flows import Choices, LatentFlow, Layer, Point
from xorflow.transforms import Transform

_WIDEST_SOFT = 256
"""The most categories of a feature whose state and choice may both be soft."""


@dataclass(frozen=True)
class Relaxed:
    """A relaxed state or choice.

    Attributes:
        values: its numbers, (..., flat).
        integers: the integers (..., D) that it stands for, if it is hard.
        graded: whether its numbers may carry a gradient.
    """

    values: Tensor
    integers: Tensor | None = None
    graded: bool = True

    @classmethod
    def of(cls, integers: Tensor, layout: Layout, dtype: torch.dtype) -> Relaxed:
        """Integers as they are, without a gradient."""
        return cls(layout.corners(integers, dtype), integers, graded=False)


def straight_through(integers: Tensor, soft: Tensor, layout: Layout) -> Relaxed:
    """Hard values whose gradient is that of soft ones."""
    hard = layout.corners(integers, soft.dtype)
    return Relaxed(hard + (soft - soft.detach()), integers)  # in this order it is exactly a corner


@dataclass(frozen=True)
class RelaxedPoint:
    """A `Point` whose state and previous choice are relaxed."""

    start: Point
    state: Relaxed
    previous: Relaxed | None = None
    layer: int = 0

    @classmethod
    def of(cls, flow: LatentFlow, point: Point) -> RelaxedPoint:
        """A point of integers."""
        previous = None
        if point.previous is not None:
            previous = Relaxed.of(point.previous, flow.layers[point.layer - 1].layout, flow.dtype)
        return cls(point, Relaxed.of(point.state, flow.base.layout, flow.dtype), previous, point.layer)

    def seen(self) -> Point:
        """What networks see."""
        previous = None if self.previous is None else self.previous.values
        return Point(self.start.x, self.state.values, previous, self.layer, self.start.context)

    def after(self, flow: LatentFlow, u: Relaxed) -> RelaxedPoint:
        """The point behind the next layer, where it takes the choice u."""
        layer = flow.layers[self.layer]
        return RelaxedPoint(self.start, moved(layer, flow.base.layout, self.state, u), u, self.layer + 1)


def moved(layer: Layer, states: Layout, x: Relaxed, u: Relaxed) -> Relaxed:
    """The state that a layer's transform leads to, from relaxed states and choices."""
    transform = layer.transform
    both_hard = x.integers is not None and u.integers is not None
    integers = transform.to_base(x.integers, u.integers) if both_hard else None  # pyright: ignore[reportArgumentType]
    if transform.is_xor:
        values = (
            x.values + u.values - 2 * x.values * u.values
        )  # any |x - u| or (x + u) % 2 has the wrong slope
        return Relaxed(values, integers, x.graded or u.graded)
    by_group, places = [], []
    for features in _alike(transform):
        of_x, of_u = _part(states, x.values, features), _part(layer.layout, u.values, features)
        d = torch.tensor(features, device=of_x.device)
        if x.integers is not None and u.integers is not None:
            hard = (x.integers[..., features].long(), u.integers[..., features].long())
            part: Tensor = _Straight.apply(of_x, of_u, *hard, d, transform)  # pyright: ignore[reportAssignmentType]
        elif x.integers is not None and not x.graded:
            part = _spread(transform, x.integers[..., features].long(), of_u, d)
        else:
            part = _both_soft(transform, of_x, of_u, d)
        by_group.append((part[..., 1:] if part.shape[-1] == 2 else part).flatten(-2))
        places.append(transform.states.positions(features))
    lead = torch.broadcast_shapes(*(part.shape[:-1] for part in by_group))
    packed = torch.cat([part.expand(*lead, part.shape[-1]) for part in by_group], -1)
    order = torch.cat(places).argsort().to(packed.device)
    return Relaxed(packed.index_select(-1, order), integers, x.graded or u.graded)


def _alike(transform: Transform) -> list[list[int]]:
    """Features with as many categories and as many choices."""
    alike: dict[tuple[int, int], list[int]] = {}
    for feature, sizes in enumerate(zip(transform.states.sizes, transform.choices.sizes, strict=True)):
        alike.setdefault(sizes, []).append(feature)
    return list(alike.values())


def _part(layout: Layout, packed: Tensor, features: list[int]) -> Tensor:
    """The numbers of features of one size, (..., n, K); of bits both."""
    index = layout.alphabet.positions(features).to(packed.device)
    part = packed.index_select(-1, index).unflatten(-1, (len(features), -1))
    return torch.cat((1 - part, part), -1) if layout.alphabet.sizes[features[0]] == 2 else part


class _Straight(Function):
    """The corner that hard states and choices lead to; backward both gradients are gathers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(of_x: Tensor, of_u: Tensor, x: Tensor, u: Tensor, d: Tensor, transform: Transform) -> Tensor:  # noqa: ARG004  # pyright: ignore[reportIncompatibleMethodOverride]
        return one_hot(transform.value_to_base(x, u, d), of_x.shape[-1]).to(of_x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # noqa: ARG004
        of_x, of_u, x, u, d, ctx.transform = inputs
        ctx.save_for_backward(x, u, d)
        ctx.shapes = of_x.shape, of_u.shape

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        x, u, d = ctx.saved_tensors
        (of_x, of_u), g = ctx.shapes, gradients[0]
        j, k = (torch.arange(shape[-1], device=g.device) for shape in (of_x, of_u))
        d = d[:, None]
        g_x = g.gather(-1, ctx.transform.value_to_base(j, u.unsqueeze(-1), d).expand(*g.shape[:-1], len(j)))
        g_u = g.gather(-1, ctx.transform.value_to_base(x.unsqueeze(-1), k, d).expand(*g.shape[:-1], len(k)))
        return g_x.sum_to_size(of_x), g_u.sum_to_size(of_u), None, None, None, None


def _spread(transform: Transform, x: Tensor, of_u: Tensor, d: Tensor) -> Tensor:
    """From hard states and soft choices: each choice's share goes to the state that it leads to."""
    k = torch.arange(of_u.shape[-1], device=of_u.device)
    reached = transform.value_to_base(x.unsqueeze(-1), k, d[:, None])
    lead = torch.broadcast_shapes(reached.shape, of_u.shape)
    sizes = transform.states.sizes[int(d[0])]
    empty = of_u.new_zeros(*lead[:-1], sizes)
    return empty.scatter_add(-1, reached.expand(lead), of_u.expand(lead))


def _both_soft(transform: Transform, of_x: Tensor, of_u: Tensor, d: Tensor) -> Tensor:
    """From soft states and soft choices: K U products for each feature."""
    if of_x.shape[-1] > _WIDEST_SOFT:
        raise ModelError(
            f"a soft choice of a soft state takes K x U products, for K up to {_WIDEST_SOFT}; got {of_x.shape[-1]}: use "
            "st-gumbel, whose states are hard, or a score function"
        )
    j = torch.arange(of_x.shape[-1], device=of_x.device)
    k = torch.arange(of_u.shape[-1], device=of_u.device)
    source = transform.value_to_data(j, k[:, None], d[:, None, None])  # (n, U, K)
    lead = torch.broadcast_shapes(of_x.shape[:-2], of_u.shape[:-2])
    sources = (
        of_x.unsqueeze(-2)
        .expand(*lead, len(d), len(k), len(j))
        .gather(-1, source.expand(*lead, *source.shape))
    )
    return (sources * of_u.unsqueeze(-1)).sum(-2)


def relaxed_rewards(base: FactorisedBase, y: Tensor, tables: list[Tensor] | None = None) -> Tensor:
    """log p_d of relaxed y, linear in it, (..., D); with `tables` those in the place of the base's own."""
    rewards = []
    for group, part, table in base.states.grouped(base.layout.logits(y), tables or base.log_table()):
        if group.binary:
            rewards.append(of_bits(table, part))
        else:
            rewards.append((part * table).sum(-1))
    return base.layout.joined(rewards)


def relaxed_end_rewards(flow: LatentFlow, point: RelaxedPoint) -> Tensor:
    """The log base probabilities (..., D) at the end of a pass, or expected of the last layer if the pass ends before it."""
    if point.layer < flow.depth:
        choices = flow.layers[point.layer].generator_choices(point.seen())
        point = point.after(flow, Relaxed(choices.mean))
    return relaxed_rewards(flow.base, point.state.values)


def frozen_choices(layer: Layer, point: Point) -> Choices:
    """The generator's choices, through which a gradient reaches what the network sees, but not its weights."""
    network = layer.conditioner
    weights = {
        f"{place}.{name}" if place else name: parameter.detach()
        for place, module in network.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    logits = functional_call(network, weights, (point.inputs(), point.context), tie_weights=False)
    return Choices(logits, layer.layout)


def checked_temperature(tau: float) -> float:
    if not tau > 0:
        raise ConfigError(f"tau, a temperature, is greater than 0; got {tau}")
    return float(tau)
