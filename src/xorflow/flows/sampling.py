r"""From base to data, exactly, without one network pass for each feature.

A layer's inverse solves :math:`x = t_u(y),\ u = u(x, \text{noise})`, where u_d sees x before d only. With the noise held,
a fixed-point iteration on the whole vector gets at least one more feature of the ordering right in each pass, so it converges
within D + 1 passes, in practice within few: it ends with a full pass that changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from xorflow.conditioners.base import Incremental
from xorflow.errors import Intractable, ModelError
from xorflow.flows.layer import Layer
from xorflow.flows.stack import Draws, Stack, choose
from xorflow.flows.trace import Point
from xorflow.flows.ways import Absent, Way, by_the_quickest, check

_BLOCK_SIZE = 56
"""Features decoded together: large enough to amortise a block's overhead, small enough to converge in few rounds."""


@dataclass(frozen=True)
class SampleNoise:
    """The uniforms that a sample is a function of: `base` (..., D) and `layers` (..., L, D)."""

    base: Tensor
    layers: Tensor

    @classmethod
    def draw(cls, flow: Stack, shape: torch.Size, generator: torch.Generator | None = None) -> SampleNoise:
        """Fresh noise for `shape` samples, on the flow's device."""
        size = (*shape, flow.depth + 1, flow.features)
        uniforms = torch.rand(size, dtype=flow.dtype, device=flow.device, generator=generator)
        return cls(uniforms[..., 0, :], uniforms[..., 1:, :])


@torch.no_grad()
def invert(flow: Stack, y: Tensor, draws: Draws, context: Tensor | None) -> Tensor:
    """Encoded x from encoded y with the noise held: uniforms (..., L, D), or greedy choices."""
    if flow.is_chain:
        return _fixed_point(lambda x: _joint_step(flow, x, y, draws, context), y, flow.features)
    state = y
    for index in reversed(range(flow.depth)):
        layer_draws = draws if isinstance(draws, str) else draws[..., index : index + 1, :]
        state = _invert_layer(flow, index, state, layer_draws, context)
    return state


@torch.no_grad()
def complete(
    flow: Stack, x: Tensor, known: Tensor, y: Tensor, draws: Draws, context: Tensor | None
) -> Tensor:
    r"""Encoded x that agrees with the given one at the features `known` (D,), the others drawn given those.

    Exact where :math:`p(x_d \mid x_{<d})` needs no latent choice of the past: one layer that does not see its own u, or a
    deterministic flow in one ordering; and where every parent of a known feature is known.
    """
    deterministic = isinstance(draws, str)
    if flow.depth > 1 and not (deterministic and flow.shares_one_order):
        raise Intractable(
            "completion needs p(x_d | x before d) exactly, which a latent flow has at depth 1 and a deterministic flow in "
            f"one shared ordering; this one has depth {flow.depth}: try flow.greedy() with one ordering, or depth 1"
        )
    if not deterministic and not flow.last_layer_summable:
        raise Intractable(
            "completion needs p(x_d | x before d) exactly, and this latent flow's layer sees its own u, whose past values "
            "what is given does not determine: try flow.greedy(), or a layer that does not see 'own'"
        )
    _check_closed(flow.layers[0], known)
    hold = known if flow.states.binary else known.unsqueeze(-1)  # (D,) or (D, 1), against (..., D[, K])

    def step(guess: Tensor) -> Tensor:
        return torch.where(hold, x, _joint_step(flow, guess, y, draws, context))

    return _fixed_point(step, torch.where(hold, x, y), flow.features)


def _invert_layer(flow: Stack, index: int, y: Tensor, draws: Draws, context: Tensor | None) -> Tensor:
    layer = flow.layers[index]

    def step(x: Tensor) -> Tensor:
        trace = flow.run(Point(x, x, None, index), draws=draws, context=context, stop=index + 1)
        return layer.transform.relaxed_to_data(y, trace.us[0])

    if layer.conditioner.mask is not None:  # a coupling layer's network sees only what the layer leaves alone
        return step(y)

    def go(way: Way, deadline: float) -> Tensor:
        guess = y if way is Way.PASSES else _propose(flow, layer, y, draws, context, way, deadline)
        return _fixed_point(step, guess, flow.features, deadline)

    return by_the_quickest(layer, y, draws if isinstance(draws, str) else "drawn", go)


def _propose(
    flow: Stack, layer: Layer, y: Tensor, draws: Draws, context: Tensor | None, way: Way, deadline: float
) -> Tensor:
    """x, right but for rounding, by a conditioner that can be evaluated along its ordering."""
    rows = y.dim() == 2 + (not flow.states.binary)
    decoder = layer.conditioner.incremental(len(y), context, _BLOCK_SIZE) if rows else None
    if decoder is None or (way is Way.LAUNCH and not layer.transform.is_xor):
        raise Absent
    order = torch.tensor(layer.conditioner.order, device=y.device)
    feature_dim = -1 if flow.states.binary else -2
    base = y.index_select(feature_dim, order)
    noise = draws if isinstance(draws, str) else draws[..., 0, :].index_select(-1, order)
    if way is Way.LAUNCH:
        x = decoder.decode(base, torch.full_like(base, 0.5) if isinstance(noise, str) else noise)
        if x is None:
            raise Absent
    else:
        x = _decode(flow, layer, decoder, order, base, noise, deadline)
    return torch.empty_like(x).index_copy_(feature_dim, order, x)


def _decode(
    flow: Stack,
    layer: Layer,
    decoder: Incremental,
    order: Tensor,
    base: Tensor,
    noise: Draws,
    deadline: float,
) -> Tensor:
    """x in the arrangement of the ordering, decoded block by block."""
    decoded = torch.empty_like(base)
    for block in decoder.blocks:
        check(deadline)
        ranks = slice(block.first, block.last)
        features = order[ranks]
        block_noise = noise if isinstance(noise, str) else noise[..., ranks]
        x, size = base[:, ranks], block.last - block.first
        for trial in range(size):  # trial k gets at least the block's first k + 1 features right
            logits = layer.conditioner.shape_logits(decoder.logits(block, flow.states.flatten(x)), size)
            u = choose(layer.choices_of(logits, features), block_noise, layer.transform.choices, flow.dtype)
            before, x = x, layer.transform.relaxed_to_data(base[:, ranks], u, features)
            # a comparison makes the host wait for the device
            if trial + 1 < size and torch.equal(x, before):
                break
        decoder.update(block, flow.states.flatten(x))
        decoded[:, ranks] = x
    return decoded


def _joint_step(flow: Stack, x: Tensor, y: Tensor, draws: Draws, context: Tensor | None) -> Tensor:
    """All layers at once: triangular, hence convergent, if they share one ordering."""
    trace = flow.run(x, draws=draws, context=context)
    for layer, u in zip(reversed(list(flow.layers)), reversed(trace.us), strict=True):
        y = layer.transform.relaxed_to_data(y, u)
    return y


def _fixed_point(
    step: Callable[[Tensor], Tensor], start: Tensor, features: int, deadline: float = math.inf
) -> Tensor:
    x = start
    for _ in range(features + 1):
        following = step(x)
        if torch.equal(following, x):
            return x
        check(deadline)
        x = following
    raise AssertionError("an autoregressive layer converges within D + 1 passes")


def _check_closed(layer: Layer, known: Tensor) -> None:
    """Every parent of a known feature must be known."""
    order, mask = layer.conditioner.order, layer.conditioner.mask
    if mask is not None:
        mask = mask.to(known.device)
        if bool((known & ~mask).any()) and not bool(known[mask].all()):
            raise ModelError(
                "with a coupling layer, transformed features can be given only together with all features that it sees"
            )
        return
    assert order is not None
    in_order = known[torch.tensor(order, device=known.device)]
    count = int(in_order.sum())
    if not bool(in_order[:count].all()):
        missing = order[int((~in_order).nonzero()[0, 0])]
        raise ModelError(
            f"what is given must be a prefix of the flow's ordering, and feature {missing} is missing among the first "
            f"{count}; give that one too, or train a flow in an ordering that begins with the features you will give"
        )
