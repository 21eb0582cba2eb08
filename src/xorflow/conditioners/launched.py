"""A walk along an ordering whose steps are captured once and launched for every feature.

Taken operation by operation, a step of a transformer is a few hundred small launches, and a device waits for the host most of
the time. What distinguishes one step from another is its number, which is kept on the device: the same launch serves all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xorflow._capture import capturing

if TYPE_CHECKING:
    from xorflow.conditioners.sequence import LaunchableCore, SequenceConditioner

LAUNCHED_ON = ("cuda",)
"""Where captured steps are worth their capture; tests walk the same way elsewhere."""


class LaunchedWalk:
    """One walk of a conditioner on binary states, for xor.

    Args:
        net: the conditioner.
        core: its core.
        begun: the values (B, D, 1), what steps begin with, and the memory of a walk that stands at its beginning.
        y: base states (B, D), in the arrangement of the ordering.
        uniforms: noise (B, D), in the same arrangement.
    """

    def __init__(
        self,
        net: SequenceConditioner,
        core: LaunchableCore,
        begun: tuple[Tensor, Tensor, Any],
        y: Tensor,
        uniforms: Tensor,
    ) -> None:
        self._net, self._core = net, core
        self._y, self._uniforms = y.contiguous(), uniforms.contiguous()
        self._values, self._fixed, self._memory = begun
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
        if self._y.device.type == "cuda":  # the launches use memory that goes with them
            torch.cuda.current_stream(self._y.device).synchronize()
        return self._values.squeeze(-1).index_select(1, self._net.visits)

    def _take_step(self) -> None:
        net = self._net
        hidden = net.embedded([self._values], self._fixed, self._rank)
        where = net.where.index_select(0, self._step)
        hidden = self._core.extend_by_one(hidden, where, self._memory, self._step)
        self._settle(net.net.outputs(hidden))
        self._step += 1

    def _pass_by(self) -> None:
        """A quiet feature."""
        self._settle(self._net.aside([self._values], self._rank))

    def _settle(self, out: Tensor) -> None:
        """The value of the feature whose outputs (B, 1, 1) these are."""
        net = self._net
        visit = net.visits.index_select(0, self._rank)
        logits = out.squeeze(-1) + net.net.bias.index_select(0, visit).T  # (B, 1)
        y, uniform = (t.index_select(1, self._rank) for t in (self._y, self._uniforms))
        flip = (uniform > torch.sigmoid(-logits)).to(y.dtype)
        self._values.index_copy_(1, visit, (y + flip - 2 * y * flip).unsqueeze(-1).to(self._values.dtype))
        self._rank += 1

    def _recorded(self, act: Callable[[], None]) -> Callable[[], None]:
        """What does the same in one launch; afterwards no step has been taken."""
        device = self._y.device
        if device.type != "cuda":
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
