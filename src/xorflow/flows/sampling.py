r"""From base to data, exactly, without one network pass for each feature.

A layer's inverse solves :math:`x = t_u(y),\ u = u(x, \text{noise})`, where u_d sees x before d only. With the noise held,
a fixed-point iteration on the whole vector gets at least one more feature of the ordering right in each pass, so it converges
within D + 1 passes, in practice within few: it ends with a full pass that changes nothing.

Which way a layer is inverted is a rule, not a race: a coupling takes one pass; a network that can be evaluated along its
ordering is, on CUDA in one launch where there is one, and otherwise block by block; any other network is iterated from y.
What decoding finds is right but for rounding, and the iteration goes on from there, as a rule for the one pass that confirms
it. All ways give the same integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from xorflow._states import Layout
from xorflow.conditioners.base import Incremental
from xorflow.flows.choices import Choices, Draws, choose
from xorflow.flows.layer import Layer, LayerList, Point

_BLOCK_SIZE = 56
"""Features decoded together: large enough to amortise a block's overhead, small enough to converge in few rounds."""


@dataclass(frozen=True)
class SampleNoise:
    """The uniforms that samples are a function of: `base` (N, D), `layers` (N, L, D) and, of a mixture, `component` (N,)."""

    base: Tensor
    layers: Tensor
    component: Tensor | None = None


@torch.no_grad()
def invert(
    layers: LayerList, y: Tensor, draws: Draws, context: Tensor | None, *, together: bool = False
) -> Tensor:
    """Integers x from integers y with the noise held: uniforms (..., L, D), or greedy choices.

    Layers that see more than the running state are inverted `together`.
    """
    if together:
        return _fixed_point(lambda x: _joint_step(layers, x, y, draws, context), y)
    for index in reversed(range(len(layers))):
        of_layer = draws if isinstance(draws, str) else draws[..., index, :]
        y = invert_layer(layers[index], y, of_layer, context)
    return y


def invert_layer(layer: Layer, y: Tensor, draws: Draws, context: Tensor | None) -> Tensor:
    """x from y of one layer, by the rule that this module states."""
    if layer.conditioner.mask is not None:  # a coupling layer's network sees only what the layer leaves alone
        return _step(layer, y, y, draws, context)
    return by_passes(layer, y, draws, context, by_decoding(layer, y, draws, context))


def by_passes(
    layer: Layer, y: Tensor, draws: Draws, context: Tensor | None, guess: Tensor | None = None
) -> Tensor:
    """The fixed-point iteration, from y or from a better guess."""
    return _fixed_point(lambda x: _step(layer, x, y, draws, context), y if guess is None else guess)


def by_decoding(layer: Layer, y: Tensor, draws: Draws, context: Tensor | None) -> Tensor | None:
    """x, right but for rounding, by a network that can be evaluated along its ordering; None if it can't."""
    decoder = layer.conditioner.incremental(len(y), context, _BLOCK_SIZE) if y.dim() == 2 else None
    if decoder is None:
        return None
    order = torch.tensor(layer.conditioner.order, device=y.device)
    base = y.index_select(-1, order)
    noise = draws if isinstance(draws, str) else draws.index_select(-1, order)
    decoded = None
    if layer.transform.is_xor:
        # uniforms of one half are what the most probable choice is drawn by
        halves = torch.full(base.shape, 0.5, device=y.device) if isinstance(noise, str) else noise
        decoded = decoder.decode(base, halves)
    if decoded is None:
        decoded = _decode(layer, decoder, order, base, noise)
    return torch.empty_like(decoded).index_copy_(-1, order, decoded)


def _decode(layer: Layer, decoder: Incremental, order: Tensor, base: Tensor, noise: Draws) -> Tensor:
    """x in the arrangement of the ordering, decoded block by block."""
    decoded = torch.empty_like(base)
    layouts: dict[tuple[int, ...], Layout] = {}
    for ranks in decoder.blocks:
        features = order[ranks]
        sizes = layer.transform.choices.of(features.tolist()).sizes
        if sizes not in layouts:
            layouts[sizes] = layer.layout.of(features.tolist())
        block_noise = noise if isinstance(noise, str) else noise[..., ranks]
        x, size = base[:, ranks], ranks.stop - ranks.start
        for trial in range(size):  # trial k gets at least the block's first k + 1 features right
            u = choose(Choices(decoder.logits(ranks, x), layouts[sizes]), block_noise)
            before, x = x, layer.transform.to_data(base[:, ranks], u, features)
            # a comparison makes the host wait for the device
            if trial + 1 < size and torch.equal(x, before):
                break
        decoder.update(ranks, x)
        decoded[:, ranks] = x
    return decoded


def _step(layer: Layer, x: Tensor, y: Tensor, draws: Draws, context: Tensor | None) -> Tensor:
    """x from y by the choices that a guess of x leads to."""
    u, _ = layer.choose(Point(x, x), draws, context)
    return layer.transform.to_data(y, u)


def _joint_step(layers: LayerList, x: Tensor, y: Tensor, draws: Draws, context: Tensor | None) -> Tensor:
    """All layers at once: triangular, hence convergent, if they share one ordering."""
    trace = layers.run(Point(x, x), draws, context)
    for layer, u in zip(reversed(list(layers)), reversed(trace.us), strict=True):
        y = layer.transform.to_data(y, u)
    return y


def _fixed_point(step: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    x = start
    for _ in range(x.shape[-1] + 1):
        following = step(x)
        if torch.equal(following, x):
            return x
        x = following
    raise AssertionError("an autoregressive layer converges within D + 1 passes")
