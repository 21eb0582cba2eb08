"""Where in a model the numbers stopped being finite."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from xorflow.data import Split
from xorflow.flows import GREEDY, LatentFlow, Mixture

_ROWS = 64


def where_not_finite(weights: Mapping[str, Tensor], flow: LatentFlow | Mixture, data: Split) -> str:
    """The first gradient, weight or layer that is not finite, as the end of a sentence; nothing if all are.

    Args:
        weights: by name, with their gradients where they are still there.
        flow: the model that they belong to.
        data: rows of which a few are passed through the model: certain choices have no gradient, and weights may then stay
            finite while the numbers made of them are not.
    """
    grads = ((name, p.grad) for name, p in weights.items() if p.grad is not None)
    if (name := _first_not_finite(grads)) is not None:
        return f"; the first gradient that is not finite is that of {_with_layer(name)}"
    if (name := _first_not_finite(weights.items())) is not None:
        return f"; the first weight that is not finite is that of {_with_layer(name)}"
    if (layer := _first_layer_not_finite(flow, data)) is not None:
        return f"; all weights are finite, and the output of the network in layer {layer} is not"
    return ""


def _first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    return next((name for name, tensor in named if not bool(tensor.isfinite().all())), None)


def _with_layer(name: str) -> str:
    """The name of a parameter and, if it is of a layer, which one, as people count.

    >>> _with_layer("layers.1.conditioner.net.0.weight")
    'layers.1.conditioner.net.0.weight, in layer 2'
    """
    match = re.match(r"(?:.*?\.)?layers\.(\d+)\.", name)
    return name if match is None else f"{name}, in layer {int(match[1]) + 1}"


@torch.no_grad()
def _first_layer_not_finite(flow: LatentFlow | Mixture, data: Split) -> int | None:
    some = torch.arange(min(_ROWS, len(data)), device=data.device)
    batch = data.gather(some, generator=torch.Generator(data.device).manual_seed(0))
    for part in flow if isinstance(flow, Mixture) else [flow]:
        passed = part.run(part.encode(batch.x), draws=GREEDY, context=batch.context)
        for number, choices in enumerate(passed.generator, 1):
            if not bool(choices.logits.isfinite().all()):
                return number
    return None
