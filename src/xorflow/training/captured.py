"""Training steps as captured launches, on a CUDA device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from xorflow.training.engine import Machinery
from xorflow.training.step import learning_rate

_WARM_UP_STEPS = 3
"""Steps made before a capture, so that libraries and the optimiser have allocated all they will; undone."""

_STEPS_A_LAUNCH = 8
"""Steps in one launch: what the host does for a launch, and between launches, counts a fraction for each."""

_CAPTURING = threading.Lock()
"""One capture at a time: runs may be threads of one process."""


class CapturedEngine:
    """The whole step, data and learning rate included, as a graph; and several steps as one, for most of an epoch.

    The host copies nothing between steps: the order of rows, the tables of learning rates and two counters live on the device.
    """

    def __init__(self, machinery: Machinery, step: int) -> None:
        self._machinery = machinery
        device, options, total = machinery.device, machinery.options, machinery.total_steps
        steps = range(total + _WARM_UP_STEPS + 1)
        rates = [learning_rate(options, s, total) for s in steps]
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        weights = [machinery.average_weight(s) for s in steps]
        self._weights = torch.tensor(weights, dtype=torch.float32, device=device)
        self._order = torch.zeros(len(machinery.train), dtype=torch.int64, device=device)
        self._offsets = torch.arange(machinery.batch_size, device=device)
        # the number of the step, and the place of its first row in the order
        self._counters = torch.tensor([step, 0], device=device)
        self._increments = torch.tensor([1, machinery.batch_size], device=device)
        with _CAPTURING:
            self._one, self._several = self._capture()

    def _body(self) -> None:
        parts = self._machinery
        step, first = self._counters[:1], self._counters[1]
        for rate in {id(group["lr"]): group["lr"] for group in parts.optimiser.param_groups}.values():
            torch.index_select(self._rates, 0, step, out=rate.view(1))
        rows = self._order.index_select(0, self._offsets + first)
        weight = self._weights.index_select(0, step)[0] if parts.average is not None else 0.0
        parts.run(rows, weight)
        self._counters += self._increments

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        parts = self._machinery
        start = self._counters.clone()
        with _undone(parts):
            current = torch.cuda.current_stream(parts.device)
            aside = torch.cuda.Stream(parts.device)
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UP_STEPS):
                    self._body()
                    self._counters.copy_(start)
            current.wait_stream(aside)
            graphs = self._record(1), self._record(_STEPS_A_LAUNCH)
        self._counters.copy_(start)
        return graphs

    def _record(self, steps: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._machinery.generator)
        with torch.cuda.graph(
            graph, capture_error_mode="thread_local"
        ):  # other threads' runs go on meanwhile
            for _ in range(steps):
                self._body()
        return graph

    def begin_epoch(self, order: Tensor, batch: int) -> None:
        """Take the order of rows of a new epoch, to be entered at its `batch`-th batch."""
        self._order.copy_(order)
        self._counters[1].fill_(batch * self._machinery.batch_size)

    def advance(self, batch: int, step: int, most: int) -> int:
        """Launch one step, or several if as many are left; the loss is not looked at."""
        del batch, step
        if most >= _STEPS_A_LAUNCH:
            self._several.replay()
            return _STEPS_A_LAUNCH
        self._one.replay()
        return 1


@contextmanager
def _undone(parts: Machinery) -> Iterator[None]:
    """Whatever steps happen inside leave no trace: tensors are restored in place, and the generator too."""
    noise = parts.generator.get_state()
    known = {id(t) for t in parts.mutable_tensors()}
    saved = [(t, t.detach().clone()) for t in parts.mutable_tensors()]
    yield
    with torch.no_grad():
        for tensor, value in saved:
            tensor.copy_(value)
        for tensor in parts.mutable_tensors():
            if id(tensor) not in known:  # the optimiser's state, which began at zero
                tensor.zero_()
    parts.generator.set_state(noise)
