"""What a gradient costs: network passes and time; and how a step is repeated, as one captured launch where it can be."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from xorflow.flows import LatentFlow

_TIMED_BLOCKS, _STEPS_A_BLOCK = 5, {"cuda": 40, "cpu": 1}
_WARM_UP_STEPS = 3
"""Before a capture or a clock: libraries allocate what they will."""


@contextmanager
def counted_passes(flow: LatentFlow, rows: int) -> Iterator[dict[str, float]]:
    """Counts evaluations of networks, in batches; `backward` are those that a gradient goes back through."""
    passes = {"forward": 0.0, "backward": 0.0}

    def count(module: Any, inputs: object, output: Tensor) -> None:
        del inputs
        values = 1 if module.choices.binary else output.shape[-1]  # logits are (..., D), or (..., D, U)
        share = output.numel() / (flow.features * values) / rows
        passes["forward"] += share
        passes["backward"] += share * output.requires_grad

    networks = [n for layer in flow.layers for n in (layer.conditioner, layer.posterior) if n is not None]
    hooks = [network.register_forward_hook(count) for network in networks]
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


# ---- repetition ----


def repeatable(
    step: Callable[[torch.Generator], object],
    noise: Callable[[], torch.Generator],
    device: torch.device,
    *,
    captured: bool,
) -> tuple[Callable[[], object], str]:
    """The step as something to be called again and again, and whether that is one captured launch or not.

    It has then been executed a few times.
    """
    if device.type == "cuda" and captured:
        try:
            return _captured(step, noise(), device), "captured"
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a step that copies from the host, such as one of a network that we do not know
            torch.cuda.synchronize(device)
    generator = noise()  # a generator that a capture failed with is of no use any more
    step(generator)
    return lambda: step(generator), "eager"


def _captured(
    step: Callable[[torch.Generator], object], generator: torch.Generator, device: torch.device
) -> Callable[[], object]:
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UP_STEPS):
            step(generator)
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        step(generator)
    return graph.replay


def milliseconds(advance: Callable[[], object], device: torch.device) -> float:
    """The median time of a step: by events on a CUDA device, by the clock elsewhere."""
    steps = _STEPS_A_BLOCK.get(device.type, 1)
    for _ in range(_WARM_UP_STEPS):
        advance()
    return statistics.median(_block(advance, device, steps) / steps for _ in range(_TIMED_BLOCKS))


def _block(advance: Callable[[], object], device: torch.device, steps: int) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(steps):
            advance()
        return 1000 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        advance()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
