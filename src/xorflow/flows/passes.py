"""A pass from data to base: the one primitive that likelihoods, estimators and samples are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from xorflow.flows.choices import Choices
from xorflow.flows.layer import Layer
from xorflow.flows.trace import Draws, Known, Point, Trace, choose

Proposal = Literal["p", "q"]


def run(
    layers: Sequence[Layer],
    start: Point,
    draws: Draws,
    context: Tensor | None,
    *,
    proposal: Proposal = "p",
    known: Known | None = None,
) -> Trace:
    """Pass through `layers`, the first of which is the next one at `start`; see `LayeredFlow.run`."""
    point, us = start, []
    generator: list[Choices] = []
    posterior: list[Choices] = []
    for index, layer in enumerate(layers):
        of_layer = draws if isinstance(draws, str) else draws[..., index, :]
        if proposal == "q":
            p = None if layer.autoregressive_in_u else layer.generator_choices(point, context)
            q = layer.posterior_choices(point, context, p)
            u = choose(q, of_layer)
            p = p or layer.generator_choices(point, context, u)
            posterior.append(q)
        elif layer.autoregressive_in_u:
            u = _sequential_choice(layer, point, of_layer, context)
            p = layer.generator_choices(point, context, u)
        else:
            p = known[layer] if known and layer in known else layer.generator_choices(point, context)
            u = choose(p, of_layer)
        us.append(u)
        generator.append(p)
        point = Point(point.x, layer.transform.to_base(point.state, u), u, point.layer + 1)
    return Trace(start, point, tuple(us), tuple(generator), tuple(posterior) if proposal == "q" else None)


@torch.no_grad()
def _sequential_choice(layer: Layer, point: Point, draws: Draws, context: Tensor | None) -> Tensor:
    """u of a layer that sees its own u: iterate on the whole vector with the noise held until nothing changes.

    Pass k has at least the first k features of the ordering right, so D + 1 passes always do; usually far fewer.
    """
    choices = layer.transform.choices
    if isinstance(draws, Tensor) and not draws.is_floating_point():
        return choices.integers(draws)
    u = torch.zeros_like(point.state, dtype=choices.dtype)
    for _ in range(choices.features + 1):
        again = choose(layer.generator_choices(point, context, u), draws)
        if again.shape == u.shape and torch.equal(again, u):
            return u
        u = again
    raise AssertionError("a strictly autoregressive layer converges within D + 1 passes")
