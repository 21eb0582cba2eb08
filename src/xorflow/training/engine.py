"""How a training step is executed: operation by operation, or as one captured launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from xorflow.data import Split
from xorflow.estimators import Estimator
from xorflow.flows import LatentFlow
from xorflow.training.options import Options
from xorflow.training.step import Step, learning_rate


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
        with quick_products(self.device.type == "cuda" and self.options.precision in ("auto", "tf32")):
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


class EagerEngine:
    """The plain path, on any device: the reference for the captured one."""

    def __init__(self, machinery: Machinery) -> None:
        self._machinery = machinery
        self._order = torch.empty(0)

    def begin_epoch(self, order: Tensor, batch: int) -> None:
        """Take the order of rows of a new epoch, to be entered at its `batch`-th batch."""
        del batch
        self._order = order

    def advance(self, batch: int, step: int, most: int) -> int:
        """Step number `step`, on the `batch`-th batch of the epoch; how many of at most `most` steps were made."""
        del most
        parts = self._machinery
        rate = learning_rate(parts.options, step, parts.total_steps)
        for group in parts.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        first = batch * parts.batch_size
        parts.run(self._order[first : first + parts.batch_size], parts.average_weight(step))
        return 1


@contextmanager
def quick_products(wanted: bool) -> Iterator[None]:
    """Within this block float32 products on CUDA round their operands to TF32; evaluation never does."""
    before = torch.get_float32_matmul_precision()
    if wanted:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Engine(Protocol):
    """What makes steps: `begin_epoch` hands over the order of rows, `advance` makes one step or more."""

    def begin_epoch(self, order: Tensor, batch: int) -> None: ...
    def advance(self, batch: int, step: int, most: int) -> int: ...


def choose_engine(machinery: Machinery, step: int) -> tuple[Engine, str | None]:
    """The captured engine where that is possible; otherwise the eager one, and why."""
    if machinery.device.type != "cuda":
        return EagerEngine(machinery), None
    if machinery.options.precision == "16-mixed":
        return EagerEngine(machinery), "the scaling of 16-mixed gradients decides on the host"
    if any(layer.autoregressive_in_u for layer in machinery.flow.layers):
        return EagerEngine(machinery), "layers that see their own u are drawn until nothing changes"
    from xorflow.training.captured import CapturedEngine

    return CapturedEngine(machinery, step), None
