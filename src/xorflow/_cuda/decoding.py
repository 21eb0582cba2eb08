"""Incremental decoding by CUDA graphs: a step is captured once, and replayed for every feature.

Taken operation by operation, a step of a transformer is a few hundred kernel launches, and a device waits for the host most of
the time. What distinguishes one step from another is its number, which is kept on the device: the same graph serves all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xorflow import _devices as devices
from xorflow._devices import capturing


@dataclass(frozen=True)
class Capturable:
    """Decoding of binary states whose steps can be captured: its network, its values (B, D, 1), what steps begin with, and
    its KV cache."""

    net: Any
    values: Tensor
    fixed: Tensor
    memory: Any


def decode(decoder: Capturable, y: Tensor, uniforms: Tensor) -> Tensor | None:
    """x (B, D) for xor, in the arrangement of the ordering; None where such steps are not captured, or could not be.

    Args:
        decoder: at the beginning of its ordering.
        y: base states, in the arrangement of the ordering.
        uniforms: noise (B, D), in the same arrangement.
    """
    if y.dim() != 2 or not devices.decodes_by_graph(y.device):
        return None
    try:
        return GraphDecoder(decoder, y, uniforms).run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None


class GraphDecoder:
    """Decodes binary states, for xor, along an ordering; the arguments are those of `decode`."""

    def __init__(self, decoder: Capturable, y: Tensor, uniforms: Tensor) -> None:
        self._decoder, self._net, self._values = decoder, decoder.net, decoder.values
        self._y, self._uniforms = y.contiguous(), uniforms.contiguous()
        self._rank = torch.zeros(1, dtype=torch.int64, device=y.device)
        self._step = torch.zeros_like(self._rank)

    def run(self) -> Tensor:
        """x (B, D) in the arrangement of the ordering."""
        steps = self._net.steps_before
        active, skipped = self._captured(self._take_step), None
        if self._net.skipped:
            skipped = self._captured(self._pass_by)
        for rank in range(self._net.features):
            replay = active if skipped is None or steps[rank + 1] > steps[rank] else skipped
            replay()
        if devices.captures(self._y.device):  # the graphs use memory that goes with them
            torch.cuda.current_stream(self._y.device).synchronize()
        return self._values.squeeze(-1).index_select(1, self._net.visits).to(self._y.dtype)

    def _take_step(self) -> None:
        net = self._net
        hidden = net.embedded([self._values], self._decoder.fixed, self._rank)
        where = net.where.index_select(0, self._step)
        hidden, _ = net.net.core.extend(hidden, where, self._decoder.memory, self._step)
        self._draw(net.net.outputs(hidden))
        self._step += 1

    def _pass_by(self) -> None:
        """A skipped feature."""
        self._draw(self._net.aside([self._values], self._rank))

    def _draw(self, outputs: Tensor) -> None:
        """Draw the feature whose outputs (B, 1, 1) these are."""
        visit = self._net.visits.index_select(0, self._rank)
        logits = outputs.squeeze(-1) + self._net.net.bias.index_select(0, visit).T  # (B, 1)
        y, uniform = (t.index_select(1, self._rank) for t in (self._y, self._uniforms))
        flip = (uniform > torch.sigmoid(-logits)).to(y.dtype)
        self._values.index_copy_(1, visit, (y + flip - 2 * y * flip).unsqueeze(-1).to(self._values.dtype))
        self._rank += 1

    def _captured(self, act: Callable[[], None]) -> Callable[[], None]:
        """What does the same as a CUDA graph; afterwards no step has been taken."""
        device = self._y.device
        if not devices.captures(device):
            return act
        # a stream of its own, on which libraries get their memory before the capture: what they get in one dies with it
        stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            act()
            self._begin()
        with capturing(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            act()
        torch.cuda.current_stream(device).wait_stream(stream)
        return graph.replay

    def _begin(self) -> None:
        for tensor in (self._values, self._rank, self._step):
            tensor.zero_()
