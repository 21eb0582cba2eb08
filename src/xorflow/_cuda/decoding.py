"""A walk along an ordering whose steps are captured once and launched for every feature.

Taken operation by operation, a step of a transformer is a few hundred small launches, and a device waits for the host most of
the time. What distinguishes one step from another is its number, which is kept on the device: the same launch serves all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from xorflow._cuda import devices
from xorflow._cuda.capture import capturing
from xorflow._math import mean_log_odds


@dataclass(frozen=True)
class Launchable:
    """A walk on binary states whose steps can be captured: its network, its values (B, D, 1), what steps begin with, and its
    memory."""

    net: Any
    core: Any
    values: Tensor
    fixed: Tensor
    memory: Any


class Walk(Protocol):
    """What may have such steps."""

    def launchable(self) -> Launchable | None: ...


def decode(walks: Sequence[Walk], y: Tensor, uniforms: Tensor) -> Tensor | None:
    """x (B, D) for xor, in the arrangement of the ordering, by the mean of the probabilities that walks give.

    None where such steps are not captured, or could not be.

    Args:
        walks: along one ordering, at their beginning.
        y: base states, in the arrangement of the ordering.
        uniforms: noise (B, D), in the same arrangement.
    """
    parts = [part for part in (walk.launchable() for walk in walks) if part is not None]
    alike = len(parts) == len(walks) and len({part.net.quiet for part in parts}) == 1
    if not alike or y.dim() != 2 or not devices.decodes_in_launches(y.device):
        return None
    try:
        return LaunchedWalk(parts, y, uniforms).run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None


class LaunchedWalk:
    """One walk of conditioners on binary states, for xor; u is drawn by the mean of their probabilities.

    Args:
        parts: the conditioners, with the same ordering and the same quiet features, at the beginning of their walks.
        y: base states (B, D), in the arrangement of the ordering.
        uniforms: noise (B, D), in the same arrangement.
    """

    def __init__(self, parts: Sequence[Launchable], y: Tensor, uniforms: Tensor) -> None:
        self._parts, self._net = parts, parts[0].net
        self._y, self._uniforms = y.contiguous(), uniforms.contiguous()
        self._values = parts[0].values  # one for all
        self._rank = torch.zeros(1, dtype=torch.int64, device=y.device)
        self._step = torch.zeros_like(self._rank)

    def run(self) -> Tensor:
        """x (B, D) in the arrangement of the ordering."""
        steps = self._net.steps_before
        loud, quiet = self._recorded(self._take_step), None
        if self._net.quiet:
            quiet = self._recorded(self._pass_by)
        for rank in range(self._net.features):
            launch = loud if quiet is None or steps[rank + 1] > steps[rank] else quiet
            launch()
        if devices.captures(self._y.device):  # the launches use memory that goes with them
            torch.cuda.current_stream(self._y.device).synchronize()
        return self._values.squeeze(-1).index_select(1, self._net.visits)

    def _take_step(self) -> None:
        self._settle([self._outputs(part) for part in self._parts])
        self._step += 1

    def _outputs(self, part: Launchable) -> Tensor:
        """Of the next step, (B, 1, 1)."""
        net = part.net
        hidden = net.embedded([self._values], part.fixed, self._rank)
        where = net.where.index_select(0, self._step)
        return net.net.outputs(part.core.extend_by_one(hidden, where, part.memory, self._step))

    def _pass_by(self) -> None:
        """A quiet feature."""
        self._settle([part.net.aside([self._values], self._rank) for part in self._parts])

    def _settle(self, outputs: list[Tensor]) -> None:
        """The value of the feature whose outputs (B, 1, 1) these are."""
        visit = self._net.visits.index_select(0, self._rank)
        each = [
            out.squeeze(-1) + part.net.net.bias.index_select(0, visit).T
            for out, part in zip(outputs, self._parts, strict=True)
        ]
        logits = mean_log_odds(torch.stack(each)) if len(each) > 1 else each[0]  # (B, 1)
        y, uniform = (t.index_select(1, self._rank) for t in (self._y, self._uniforms))
        flip = (uniform > torch.sigmoid(-logits)).to(y.dtype)
        self._values.index_copy_(1, visit, (y + flip - 2 * y * flip).unsqueeze(-1).to(self._values.dtype))
        self._rank += 1

    def _recorded(self, act: Callable[[], None]) -> Callable[[], None]:
        """What does the same in one launch; afterwards no step has been taken."""
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
