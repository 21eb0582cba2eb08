"""How a training step is executed: operation by operation, or as one captured launch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from xorflow._cuda import devices, kernels
from xorflow._cuda.proof import proved_engine
from xorflow._cuda.steps import Engine, StepNumber
from xorflow.data import Split
from xorflow.estimators import Estimator
from xorflow.flows import LatentFlow
from xorflow.training.config import Options
from xorflow.training.devices import default_generator
from xorflow.training.precision import tf32_matmul
from xorflow.training.step import Step, learning_rate


@dataclass(frozen=True)
class Feed:
    """What a step is fed: encoded rows, their context, noise, probabilities. It does not depend on the weights."""

    x: Tensor
    context: Tensor | None
    draws: Tensor | None
    probabilities: Tensor | None = None  # with which x was drawn, for estimators that look at them


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
    seeds: Tensor  # (1,) int64, on the device
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

    @property
    def rows(self) -> int:
        return len(self.train)

    def prepare(self, rows: Tensor, step: StepNumber) -> Feed:
        if draws_rows_at_once(self):
            x, context = draw_rows(self.train, rows, self.seeds, step)
        else:
            batch = self.train.gather(rows, generator=self.generator)
            x, context = self.flow.encode(batch.x), batch.context
        draws = self.estimator.draw(self.flow, len(rows), self.generator)
        probabilities = self.train.probabilities(rows) if self.estimator.takes_soft_targets else None
        return Feed(x, context if self.flow.context_features else None, draws, probabilities)

    def run(self, feed: Feed, average_weight: float | Tensor) -> None:
        with tf32_matmul(devices.rounds_products(self.device, self.options.precision)):
            self._run(feed, average_weight)

    def _run(self, feed: Feed, average_weight: float | Tensor) -> None:
        found = self._gradient(feed)
        if self.check is not None:
            self.check(found["loss"])
        if self.options.clip:
            self.clip()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.estimator.update(stats_of(found))
        self.bound_sum += found["bound"]
        if self.average is not None:
            self._update_average(average_weight)

    def _gradient(self, feed: Feed) -> dict[str, Tensor]:
        """Leave the gradient of a batch in the parameters; what the step returned, of all parts that the batch came in."""
        total: dict[str, Tensor] = {}
        for part, share in parts_of(feed, self.options.accumulate):
            found = self.forward(part.x, part.context, part.draws, part.probabilities, share)
            self.backward(found["loss"])
            for name, value in found.items():
                total[name] = total[name] + value.detach() if name in total else value.detach()
        return total

    def _update_average(self, weight: float | Tensor) -> None:
        assert self.average is not None
        current = self.flow.state_dict()
        for name, tensor in self.average.items():
            move_average(tensor, current[name], weight)

    def schedule(self, step: int) -> tuple[float, float]:
        """The learning rate of step `step` (from 0), and how much of the weights it leaves then goes into their average."""
        return learning_rate(self.options, step, self.total_steps), average_weight(self.options, step)

    def generators(self) -> list[torch.Generator]:
        """All that a step draws from."""
        return [self.generator, *([default_generator(self.device)] if has_dropout(self.flow) else ())]

    def trained_tensors(self) -> list[Tensor]:
        """The weights, and their average."""
        return [*self.step.parameters(), *(self.average or {}).values()]

    def mutable_tensors(self) -> list[Tensor]:
        """Every tensor that a step changes in place."""
        modules = [*self.step.parameters(), *self.step.buffers()]
        return [*modules, *state_tensors(self.optimiser), *(self.average or {}).values(), self.bound_sum]


def parts_of(feed: Feed, count: int) -> Iterator[tuple[Feed, float]]:
    """A batch in about equal parts, each with its share of the rows."""
    rows = len(feed.x)
    if count == 1:
        yield feed, 1.0
        return
    for part in np.array_split(
        np.arange(rows), min(count, rows)
    ):  # on the host: a capture asks no device for them
        rows_of_part = slice(int(part[0]), int(part[-1]) + 1)
        context = None if feed.context is None else feed.context[rows_of_part]
        draws = None if feed.draws is None else feed.draws[:, rows_of_part]
        probabilities = None if feed.probabilities is None else feed.probabilities[rows_of_part]
        yield Feed(feed.x[rows_of_part], context, draws, probabilities), len(part) / rows


def draws_rows_at_once(work: Machinery) -> bool:
    """Whether one launch gathers, binarises and encodes a batch: grey images on CUDA, and float32 networks."""
    binary = work.flow.states.binary and work.flow.dtype == torch.float32
    return work.train.stochastic and binary and devices.usable(work.train.values)


def draw_rows(train: Split, rows: Tensor, seeds: Tensor, step: StepNumber) -> tuple[Tensor, Tensor | None]:
    """The encoded rows, and their context."""
    x = kernels.draw_rows(train.values, rows, seeds, step.counter, step.ahead)
    return x, None if train.context is None else train.context.index_select(0, rows)


def has_dropout(module: nn.Module) -> bool:
    """Whether a pass in training draws numbers by itself, from the process's generator."""
    return any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())


def stats_of(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The statistics of the estimator among what a step returns."""
    return {k.removeprefix("stats."): v for k, v in found.items() if k.startswith("stats.")}


def state_tensors(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [v for entry in optimiser.state.values() for v in entry.values() if isinstance(v, Tensor)]


@torch.no_grad()
def move_average(average: Tensor, current: Tensor, weight: float | Tensor) -> None:
    average.lerp_(current, weight.to(average.dtype) if isinstance(weight, Tensor) else weight)


def average_weight(options: Options, step: int) -> float:
    """How much of the weights goes into their average after step `step` (from 0)."""
    # early on, average over what there is: the first weights would otherwise linger
    return max(1 - options.average, 1 / (step + 2))


class EagerEngine:
    """The plain path, on any device: the reference for the captured one."""

    def __init__(self, work: Machinery) -> None:
        self._work = work
        self._order = torch.empty(0)
        self._start = torch.zeros(1, dtype=torch.int64, device=work.device)

    def begin_epoch(self, order: Tensor, batch: int) -> None:
        """Take the order of rows, (N,), of a new epoch, to be entered at its `batch`-th batch."""
        del batch
        self._order = order.to(self._work.device)

    def advance(self, batch: int, step: int, most: int) -> int:
        """Step number `step`, on the `batch`-th batch of the epoch; how many of at most `most` steps were made."""
        del most
        work = self._work
        rate, weight = work.schedule(step)
        for group in work.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        first = batch * work.batch_size
        rows = self._order[first : first + work.batch_size]
        work.run(work.prepare(rows, StepNumber(self._start, step)), weight)
        return 1


def choose_engine(work: Machinery, step: int) -> tuple[Engine, str | None]:
    """The captured engine where that is possible and makes the steps of the eager one; otherwise that, and why."""
    eager = EagerEngine(work)
    if not devices.captures(work.device):
        return eager, None
    if work.options.precision == "16-mixed":
        return eager, "the scaling of 16-mixed gradients decides on the host"
    reason = work.estimator.not_capturable(work.flow)
    if reason is not None:
        return eager, reason
    captured, reason = proved_engine(work, step, eager)
    return captured or eager, reason


@functools.cache
def say_not_captured(reason: str) -> None:
    """Say once in a process why steps are made operation by operation."""
    logging.getLogger("xorflow").warning("training steps are not captured as one launch: %s", reason)
