"""How a training step is executed: operation by operation, or as one captured launch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from xorflow import _kernels
from xorflow.data import Split
from xorflow.estimators import Estimator
from xorflow.flows import LatentFlow
from xorflow.training.devices import default_generator
from xorflow.training.options import Options
from xorflow.training.products import quick_products
from xorflow.training.step import Step, learning_rate


@dataclass(frozen=True)
class Feed:
    """What a step is fed: encoded rows, their context, noise, chances. It does not depend on the weights."""

    x: Tensor
    context: Tensor | None
    draws: Tensor | None
    chances: Tensor | None = None  # with which x was drawn, for estimators that look at them


@dataclass(frozen=True)
class StepNumber:
    """Which step noise is drawn for: one whose number is on the device, where a captured launch finds it, or one after it."""

    counter: Tensor  # (1,) int64
    ahead: int


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

    def prepare(self, rows: Tensor, step: StepNumber) -> Feed:
        if draws_rows_at_once(self):
            x, context = draw_rows(self.train, rows, self.seeds, step)
        else:
            batch = self.train.gather(rows, generator=self.generator)
            x, context = self.flow.encode(batch.x), batch.context
        draws = self.estimator.draw(self.flow, len(rows), self.generator)
        chances = self.train.chances(rows) if self.estimator.looks_at_grey else None
        return Feed(x, context if self.flow.context_features else None, draws, chances)

    def run(self, feed: Feed, average_weight: float | Tensor) -> None:
        with quick_products(products_are_quick(self)):
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
            found = self.forward(part.x, part.context, part.draws, part.chances, share)
            self.backward(found["loss"])
            for name, value in found.items():
                total[name] = total[name] + value.detach() if name in total else value.detach()
        return total

    def _update_average(self, weight: float | Tensor) -> None:
        assert self.average is not None
        current = self.flow.state_dict()
        for name, tensor in self.average.items():
            move_average(tensor, current[name], weight)

    def mutable_tensors(self) -> list[Tensor]:
        modules = [*self.step.parameters(), *self.step.buffers()]
        return [*modules, *state_tensors(self.optimiser), *(self.average or {}).values(), self.bound_sum]


def parts_of(feed: Feed, count: int) -> Iterator[tuple[Feed, float]]:
    """A batch in about equal parts, each with its share of the rows."""
    rows = len(feed.x)
    if count == 1:
        yield feed, 1.0
        return
    for part in torch.arange(rows).tensor_split(min(count, rows)):
        rows_of_part = slice(int(part[0]), int(part[-1]) + 1)
        context = None if feed.context is None else feed.context[rows_of_part]
        draws = None if feed.draws is None else feed.draws[:, rows_of_part]
        chances = None if feed.chances is None else feed.chances[rows_of_part]
        yield Feed(feed.x[rows_of_part], context, draws, chances), len(part) / rows


def draws_rows_at_once(work: Machinery) -> bool:
    """Whether one launch gathers, binarises and encodes a batch: grey images on CUDA, and float32 networks."""
    binary = work.flow.states.binary and work.flow.dtype == torch.float32
    return work.train.stochastic and binary and _kernels.usable(work.train.values)


def draw_rows(train: Split, rows: Tensor, seeds: Tensor, step: StepNumber) -> tuple[Tensor, Tensor | None]:
    """The encoded rows, and their context."""
    x = _kernels.draw_rows(train.values, rows, seeds, step.counter, step.ahead)
    return x, None if train.context is None else train.context.index_select(0, rows)


def has_dropout(module: nn.Module) -> bool:
    """Whether a pass in training draws numbers by itself, from the process's generator."""
    return any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())


def products_are_quick(work: Machinery) -> bool:
    """Whether a run's float32 products may round their operands."""
    return work.device.type == "cuda" and work.options.precision in ("auto", "tf32")


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


def _drawn_from(work: Machinery) -> list[torch.Generator]:
    """All generators that a step draws from."""
    return [work.generator, *([default_generator(work.device)] if has_dropout(work.flow) else ())]


def _out_of_capture(generator: torch.Generator) -> None:
    """Free a generator from a capture that failed, which would never let go of it; it goes on where it stands."""
    fresh = torch.Generator(generator.device)
    fresh.set_state(generator.get_state())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


@contextmanager
def undone(work: Machinery) -> Iterator[None]:
    """Whatever steps happen inside leave no trace: tensors are restored in place, and the generators too."""
    generators = _drawn_from(work)
    noise = [generator.get_state() for generator in generators]
    known = {id(t) for t in work.mutable_tensors()}
    saved = [(t, t.detach().clone()) for t in work.mutable_tensors()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)
            for tensor in work.mutable_tensors():
                if id(tensor) not in known:  # the optimiser's state, which began at zero
                    tensor.zero_()
        for generator, state in zip(generators, noise, strict=True):
            generator.set_state(state)


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
        rate = learning_rate(work.options, step, work.total_steps)
        for group in work.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        first = batch * work.batch_size
        rows = self._order[first : first + work.batch_size]
        work.run(work.prepare(rows, StepNumber(self._start, step)), average_weight(work.options, step))
        return 1


class Engine(Protocol):
    """What makes steps: `begin_epoch` hands over the order of rows, `advance` makes one step or more."""

    def begin_epoch(self, order: Tensor, batch: int) -> None: ...
    def advance(self, batch: int, step: int, most: int) -> int: ...


def choose_engine(work: Machinery, step: int) -> tuple[Engine, str | None]:
    """The captured engine where that is possible; otherwise the eager one, and why."""
    if work.device.type != "cuda":
        return EagerEngine(work), None
    if work.options.precision == "16-mixed":
        return EagerEngine(work), "the scaling of 16-mixed gradients decides on the host"
    reason = work.estimator.not_capturable(work.flow)
    if reason is not None:
        return EagerEngine(work), reason
    from xorflow.training.captured import CapturedEngine

    try:
        return CapturedEngine(work, step), None
    except torch.OutOfMemoryError:
        raise
    except (
        RuntimeError
    ) as error:  # whatever is wrong with the step itself is found again, and said, by the plain path
        torch.cuda.current_stream(work.device).synchronize()
        for generator in _drawn_from(work):
            _out_of_capture(generator)
        said = str(error.__context__ or error).strip().splitlines()[0]
        return EagerEngine(work), f"capturing one failed ({said})"


@functools.cache
def say_not_captured(reason: str) -> None:
    """Say once in a process why steps are made operation by operation."""
    logging.getLogger("xorflow").warning("training steps are not captured as one launch: %s", reason)
