"""A run that begins where another ended."""

from __future__ import annotations

import torch
from torch import nn

from xorflow.errors import ConfigError
from xorflow.flows import LatentFlow
from xorflow.training.build import near_identity

_NEARLY_IDENTITY = 7.0
"""The log-odds of the identity in layers that are put before those of a run: of a thousand features about one is flipped,
enough to learn from, and too little to spoil what was learned."""


@torch.no_grad()
def start_from_flow(flow: LatentFlow, before: LatentFlow, what: str, *, keep_base: bool = False) -> None:
    """Begin with a trained flow: its layers become the last ones, its base the base; the others are near the identity.

    Args:
        flow: what is to be trained; it has as many layers or more.
        before: the trained flow.
        what: its name in errors.
        keep_base: begin with the layers alone.
    """
    offset = flow.depth - before.depth
    if offset < 0:
        raise ConfigError(
            f"{what} has {before.depth} layers, and a run that starts from it has as many or more; got {flow.depth}"
        )
    for number, layer in enumerate(before.layers, 1):
        _take_over(flow.layers[offset + number - 1], layer, f"layer {number} of {what}")
    if not keep_base:
        _take_over(flow.base, before.base, f"the base of {what}")
    for layer in flow.layers[:offset]:
        layer.conditioner.start_at(near_identity(layer, _NEARLY_IDENTITY))


def _take_over(module: nn.Module, other: nn.Module, what: str) -> None:
    mine, theirs = module.state_dict(), other.state_dict()
    if {name: t.shape for name, t in mine.items()} != {name: t.shape for name, t in theirs.items()}:
        raise ConfigError(
            f"{what} has other weights than what should start from it: choose the same conditioner, hidden widths, "
            "posterior and data"
        )
    module.load_state_dict(theirs)
