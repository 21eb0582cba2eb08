"""What is said when numbers stop being finite, and where in a model they did."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xorflow.data import Split
from xorflow.errors import TrainingError
from xorflow.flows import GREEDY, Mixture
from xorflow.training.checkpoint import has_snapshot
from xorflow.training.registry import Trainable

if TYPE_CHECKING:
    from xorflow.training.trainer import Trainer

_ROWS = 64


def not_finite(trainer: Trainer, what: str, step: int) -> TrainingError:
    """The error of a run in which something is not finite at a step: where, what is kept, and what to do."""
    # those of the flow by their own names, and those of the estimator as its own
    weights = {name.removeprefix("flow."): p for name, p in trainer.module.named_parameters()}
    where = where_not_finite(weights, trainer.flow, trainer.dataset.train)
    if not trainer.checks_each_step:  # many steps may lie between what went wrong and this
        device = trainer.device.type
        where += f" (on {device} steps are not looked at one by one, and others may have been before it)"
    folder, epoch = trainer.run_folder, -(-step // trainer.steps_per_epoch)
    saved = folder is not None and has_snapshot(folder)
    kept = f"; the last good checkpoint is kept in {folder}" if saved else ""
    return TrainingError(
        f"{what} is not finite at step {step} (epoch {epoch}){where}{kept}: "
        "train again into another folder with a smaller lr, or with clip=1"
    )


def where_not_finite(weights: Mapping[str, Tensor], flow: Trainable, data: Split) -> str:
    """The first gradient, weight or layer that is not finite, as the end of a sentence; nothing if all are.

    Args:
        weights: by name, with their gradients where they are still there.
        flow: the model that they belong to.
        data: rows of which a few are passed through the model: certain choices have no gradient, and weights may then stay
            finite while the numbers made of them are not.
    """
    gradients = {name: p.grad for name, p in weights.items() if p.grad is not None}
    for what, tensors in (("gradient", gradients), ("weight", weights)):
        name = next((name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())), None)
        if name is not None:
            return f"; the first {what} that is not finite is that of {_with_layer(name)}"
    if (layer := _first_layer_not_finite(flow, data)) is not None:
        return f"; all weights are finite, and the output of the network in layer {layer} is not"
    return ""


def _with_layer(name: str) -> str:
    """The name of a parameter and, if it is of a layer, which one, as people count.

    >>> _with_layer("layers.1.conditioner.net.layers.0.weight")
    'layers.1.conditioner.net.layers.0.weight, in layer 2'
    """
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return name if layer is None else f"{name}, in layer {int(layer[1]) + 1}"


@torch.no_grad()
def _first_layer_not_finite(flow: Trainable, data: Split) -> int | None:
    some = torch.arange(min(_ROWS, len(data)), device=data.device)
    batch = data.gather(some, generator=torch.Generator(data.device).manual_seed(0))
    for part in flow if isinstance(flow, Mixture) else [flow]:
        passed = part.run(part.start(batch.x, batch.context), draws=GREEDY)
        for number, choices in enumerate(passed.generator, 1):
            if not bool(choices.logits.isfinite().all()):
                return number
    return None
