"""The weights of a run, and the model that they belong to, which is never larger than they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xorflow.errors import CheckpointError
from xorflow.training.specs import Trainable, flow_from_spec, sizes_in
from xorflow.training.storage import load_tensors

_ALWAYS = 2**26
"""So many numbers a model may make while it is built, however few weights it has: masks, orderings, receptive fields."""

_EACH = 100
"""And so many for each weight."""

_MAKERS = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye}


def read_weights(run: Path, stem: str = "weights") -> dict[str, Tensor]:
    """The weights in the folder of a run, as they were written there."""
    weights = load_tensors(run, stem)
    for name, tensor in weights.items():
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"weights are finite numbers, and {name} in {run} has others; restore the folder, or train again"
            )
    return weights


def model_for(
    spec: Mapping[str, Any], weights: Mapping[str, Tensor], parts: Mapping[str, type[nn.Module]] | None = None
) -> Trainable:
    """The model of a spec, with fresh weights of the sizes of these; one of a larger model is refused before it is built."""
    numbers = sum(tensor.numel() for tensor in weights.values())
    layers, largest = sizes_in(spec)
    with torch.random.fork_rng(devices=[]), _AtMost(_ALWAYS + _EACH * numbers) as limit:
        if layers > len(weights) or largest > max(numbers, 2**16):
            raise limit.error()
        return flow_from_spec(spec, parts)


def install(flow: Trainable, weights: Mapping[str, Tensor], where: Path) -> None:
    """Put weights into a flow, which takes over their type."""
    expected = flow.state_dict()
    for name, tensor in expected.items():
        if name not in weights or weights[name].shape != tensor.shape:
            came = "nothing" if name not in weights else f"shape {tuple(weights[name].shape)}"
            raise CheckpointError(
                f"the weights in {where} are not those of its configuration: {name} has {came} instead of "
                f"shape {tuple(tensor.shape)}; restore the folder, or train again"
            )
        if weights[name].dtype not in (torch.float32, torch.float64):
            raise CheckpointError(
                f"weights are float32 or float64, and {name} in {where} is {weights[name].dtype}; restore the folder"
            )
    if any(t.dtype == torch.float64 for t in weights.values()):
        flow.double()
    flow.load_state_dict({name: weights[name] for name in expected})


class _AtMost(TorchFunctionMode):
    """Within this block no more than so many numbers are made, counted before they are."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._left = most

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        self._left -= _count(func, args)
        if self._left < 0:
            raise self.error()
        return func(*args, **(kwargs or {}))

    def error(self) -> CheckpointError:
        return CheckpointError(
            "the model in this configuration is larger than its weights, so they are not of it; restore the folder"
        )


def _count(func: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """About how many numbers an operation makes: a factory's size, or that to which its operands are broadcast."""
    if func is torch.arange:
        return int(max((a for a in args if isinstance(a, int | float)), default=0))
    if func in _MAKERS:
        first = args[0] if args and not isinstance(args[0], int) else args
        return math.prod(size for size in first if isinstance(size, int))
    shapes = [argument.shape for argument in args if isinstance(argument, Tensor)]
    widths = [1] * max((len(shape) for shape in shapes), default=0)
    for shape in shapes:
        for place, size in enumerate(reversed(shape)):
            widths[place] = max(widths[place], size)
    return math.prod(widths)
