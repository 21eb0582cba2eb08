"""How a training step is executed: operation by operation, or as one captured launch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from xorflow.data import Split
from xorflow.estimators import Estimator
from xorflow.flows import LatentFlow
from xorflow.training.options import Options
from xorflow.training.step import Step, learning_rate

_WARM_UP_STEPS = 3
"""Steps before a capture, until libraries and optimiser have allocated all they will; they are undone."""


@dataclass
class Machinery:
    """The parts that a step works on; everything that a step changes is in here, and is changed in place."""

    step: Step
    forward: Callable[..., dict[str, Tensor]]
    backward: Callable[[Tensor], None]
    optimiser: torch.optim.Optimizer
    clip: Callable[[], object]
    check: (
        Callable[[Tensor], None] | None
    )  # looks at the loss before the weights change; None where that would wait
    train: Split
    options: Options
    generator: torch.Generator
    average: dict[str, Tensor] | None
    bound_sum: Tensor
    batch_size: int
    total_steps: int

    @property
    def flow(self) -> LatentFlow:
        return self.step.flow

    @property
    def estimator(self) -> Estimator:
        return self.step.estimator

    @property
    def device(self) -> torch.device:
        return self.bound_sum.device

    def run(self, rows: Tensor, average_weight: float | Tensor) -> None:
        """One optimiser step on the given rows, without a decision by the host: the same for both engines."""
        with _quick_products(self.device.type == "cuda" and self.options.precision in ("auto", "tf32")):
            self._run(rows, average_weight)

    def _run(self, rows: Tensor, average_weight: float | Tensor) -> None:
        batch = self.train.gather(rows, generator=self.generator)
        draws = self.estimator.draw(self.flow, len(rows), self.generator)
        found = self.forward(batch.x, batch.context if self.flow.context_features else None, draws)
        self.backward(found["loss"])
        if self.check is not None:
            self.check(found["loss"])
        if self.options.clip:
            self.clip()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.estimator.update(
            {k.removeprefix("stats."): v for k, v in found.items() if k.startswith("stats.")}
        )
        self.bound_sum += found["bound"]
        if self.average is not None:
            self._update_average(average_weight)

    @torch.no_grad()
    def _update_average(self, weight: float | Tensor) -> None:
        assert self.average is not None
        current = self.flow.state_dict()
        for name, tensor in self.average.items():
            tensor.lerp_(current[name], weight)

    def average_weight(self, step: int) -> float:
        # early on, average over what there is: the first weights would otherwise linger
        return max(1 - self.options.average, 1 / (step + 2))

    def mutable_tensors(self) -> list[Tensor]:
        """Every tensor that a step changes in place."""
        states = [
            v for entry in self.optimiser.state.values() for v in entry.values() if isinstance(v, Tensor)
        ]
        modules = [*self.step.parameters(), *self.step.buffers()]
        return [*modules, *states, *(self.average or {}).values(), self.bound_sum]


_CAPTURING = threading.Lock()
"""One capture at a time: runs may be threads of one process."""


class EagerEngine:
    """The plain path, on any device: the reference for the captured one."""

    def __init__(self, machinery: Machinery) -> None:
        self._machinery = machinery
        self._order = torch.empty(0)

    def begin_epoch(self, order: Tensor, batch: int) -> None:
        """Take the order of rows of a new epoch, to be entered at its `batch`-th batch."""
        del batch
        self._order = order

    def step(self, batch: int, step: int) -> None:
        """Step number `step`, on the `batch`-th batch of the epoch."""
        parts = self._machinery
        rate = learning_rate(parts.options, step, parts.total_steps)
        for group in parts.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        first = batch * parts.batch_size
        parts.run(self._order[first : first + parts.batch_size], parts.average_weight(step))


class CapturedEngine:
    """On a CUDA device: the whole step, data and learning rate included, is one graph, launched each time.

    The host copies nothing between steps: the order of rows, the table of learning rates and two counters
    live on the device.
    """

    def __init__(self, machinery: Machinery, step: int) -> None:
        self._machinery = machinery
        device, options = machinery.device, machinery.options
        total = machinery.total_steps
        rates = [learning_rate(options, s, total) for s in range(total + 1)]
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        weights = [machinery.average_weight(s) for s in range(total + 1)]
        self._weights = torch.tensor(weights, dtype=torch.float32, device=device)
        self._order = torch.zeros(len(machinery.train), dtype=torch.int64, device=device)
        self._offsets = torch.arange(machinery.batch_size, device=device)
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        self._step = torch.full((1,), step, dtype=torch.int64, device=device)
        self._graph = torch.cuda.CUDAGraph()
        with _CAPTURING:
            self._capture(step)

    def _body(self) -> None:
        parts = self._machinery
        rate = self._rates.index_select(0, self._step)[0]
        for group in parts.optimiser.param_groups:
            group["lr"].copy_(rate)
        rows = self._order.index_select(0, self._offsets + self._first)
        parts.run(rows, self._weights.index_select(0, self._step)[0])
        self._first += parts.batch_size
        self._step += 1

    def _capture(self, step: int) -> None:
        parts = self._machinery
        with _undone(parts):
            stream = torch.cuda.Stream(parts.device)
            stream.wait_stream(torch.cuda.current_stream(parts.device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_STEPS):
                    self._first.zero_()
                    self._step.fill_(min(step, parts.total_steps))
                    self._body()
            torch.cuda.current_stream(parts.device).wait_stream(stream)
            self._graph.register_generator_state(parts.generator)
            # other threads may go on with their own runs meanwhile
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._body()
        self._step.fill_(step)

    def begin_epoch(self, order: Tensor, batch: int) -> None:
        """Take the order of rows of a new epoch, to be entered at its `batch`-th batch."""
        self._order.copy_(order)
        self._first.fill_(batch * self._machinery.batch_size)

    def step(self, batch: int, step: int) -> None:
        """Launch the next step; the loss is not looked at."""
        del batch, step
        self._graph.replay()


@contextmanager
def _quick_products(wanted: bool) -> Iterator[None]:
    """Within this block float32 products on CUDA round their operands to TF32; evaluation never does."""
    before = torch.get_float32_matmul_precision()
    if wanted:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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


def choose_engine(machinery: Machinery, step: int) -> tuple[EagerEngine | CapturedEngine, str | None]:
    """The captured engine where that is possible; otherwise the eager one, and why."""
    if machinery.device.type != "cuda":
        return EagerEngine(machinery), None
    if machinery.options.precision == "16-mixed":
        return EagerEngine(machinery), "the scaling of 16-mixed gradients decides on the host"
    if any(layer.autoregressive_in_u for layer in machinery.flow.layers):
        return EagerEngine(machinery), "layers that see their own u are drawn until nothing changes"
    return CapturedEngine(machinery, step), None
