"""Training steps as captured launches, on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from xorflow._cuda import kernels
from xorflow._devices import capturing, stream_of_thread

_WARM_UP_STEPS = 3
"""Steps made before a capture, so that libraries and the optimiser have allocated all they will; undone."""

STEPS_A_LAUNCH = 8
"""Steps in one launch: what the host does for a launch, and between launches, counts a fraction for each."""

_ALIGNED = 4
"""Learning rates lie 16 bytes apart: Triton compiles a kernel anew for pointers that are aligned in another way."""


@dataclass(frozen=True)
class StepNumber:
    """Which step noise is drawn for: one whose number is on the device, where a captured launch finds it, or one after it."""

    counter: Tensor  # (1,) int64
    ahead: int


class Training(Protocol):
    """What makes steps one by one, as `training.Trainer` does; everything that a step changes is changed in place."""

    module: nn.Module
    optimiser: torch.optim.Optimizer
    average: dict[str, Tensor] | None
    bound_sum: Tensor
    generator: torch.Generator
    device: torch.device
    rows: int
    batch_size: int
    total_steps: int

    @property
    def generators(self) -> list[torch.Generator]: ...
    def schedule(self, step: int) -> tuple[float, float]: ...
    def gather(self, rows: Tensor, number: StepNumber, /) -> Any: ...
    def learn(self, batch: Any, average_weight: float | Tensor, /) -> None: ...
    def make_step(self, rows: Tensor, number: int, /) -> None: ...


class RowsOnDevice:
    """Gathers and binarises a batch of grey images in one launch; its noise depends on the seed and the step alone.

    Args:
        intensities: (N, D) uint8, on a device with kernels.
        context: (N, C) or None.
        seed: of the run.
    """

    def __init__(self, intensities: Tensor, context: Tensor | None, seed: int) -> None:
        self._intensities, self._context = intensities, context
        self._seed = torch.tensor([seed], device=intensities.device)
        self._start = torch.zeros_like(self._seed)

    def __call__(self, rows: Tensor, number: int | StepNumber) -> tuple[Tensor, Tensor | None]:
        """The rows, uint8, and their context."""
        step = StepNumber(self._start, number) if isinstance(number, int) else number
        x = kernels.draw_rows(self._intensities, rows, self._seed, step.counter, step.ahead)
        return x.to(torch.uint8), None if self._context is None else self._context.index_select(0, rows)


class CapturedSteps:
    """The whole step, data and learning rate included, as a graph; and several steps as one, for most of an epoch.

    The host copies nothing between steps: the order of rows, the schedule and two counters live on the device. Within a launch
    the rows and the noise of the next step are made on a branch of its own, beside the step before.

    Args:
        work: what makes them one by one.
        step: the number of the first one.
    """

    def __init__(self, work: Training, step: int) -> None:
        self._work = work
        device = work.device
        schedule = [work.schedule(s) for s in range(work.total_steps + STEPS_A_LAUNCH)]
        table = torch.tensor(schedule, dtype=torch.float32, device=device).T
        self._schedule = table.unsqueeze(-1).repeat(1, 1, _ALIGNED)  # (2, steps, 4)
        self._order = torch.zeros(work.rows, dtype=torch.int64, device=device)
        self._ahead = torch.arange(STEPS_A_LAUNCH, device=device)
        self._places = torch.arange(STEPS_A_LAUNCH * work.batch_size, device=device)
        # the number of the step, and the place of its first row in the order
        self._counters = torch.tensor([step, 0], device=device)
        self._increments = torch.tensor([1, work.batch_size], device=device)
        self._first = step
        self._branch = stream_of_thread(device, "branch")
        with capturing():
            self._one, self._several = self._capture()

    # ---- what is captured ----

    def _steps(self, count: int) -> None:
        """The next `count` steps."""
        work, size = self._work, self._work.batch_size
        schedule = self._schedule.index_select(1, self._ahead[:count] + self._counters[0])
        order = self._order.index_select(-1, self._places[: count * size] + self._counters[1])
        rows = order.split(size, -1)
        batch = work.gather(rows[0], StepNumber(self._counters[:1], 0))
        for step in range(count):
            following = self._gather_beside(rows[step + 1], step + 1) if step + 1 < count else None
            for group in work.optimiser.param_groups:
                group["lr"] = schedule[0, step, 0]
            work.learn(batch, schedule[1, step, 0])
            if following is not None:
                torch.cuda.current_stream(work.device).wait_stream(self._branch)
                batch = following
        self._counters.add_(self._increments, alpha=count)

    def _gather_beside(self, rows: Tensor, ahead: int) -> Any:
        """The batch of the next step, made while this one runs.

        Its memory belongs to the branch, which takes it back only after it has waited for the step that used it.
        """
        self._branch.wait_stream(torch.cuda.current_stream(self._work.device))
        with torch.cuda.stream(self._branch):
            return self._work.gather(rows, StepNumber(self._counters[:1], ahead))

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        work = self._work
        start = self._counters.clone()
        with undone(work):
            current = torch.cuda.current_stream(work.device)
            aside = self._branch  # single steps, which these are, do not use it themselves
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UP_STEPS):
                    self._steps(1)
                    self._counters.copy_(start)
            current.wait_stream(aside)
            graphs = self._record(1), self._record(STEPS_A_LAUNCH)
        self._counters.copy_(start)
        return graphs

    def _record(self, steps: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._work.generator)
        # A stream of this thread. PyTorch's own for captures is one for all, and with it the workspace of the products in all
        # backward passes, which one thread makes: graphs of several runs would write to it at once, and the first one to be
        # destroyed takes it away from the others (pytorch/pytorch#193402).
        stream = stream_of_thread(self._work.device, "main")
        # other threads' runs go on meanwhile
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._steps(steps)
        return graph

    # ---- what happens at each step ----

    def rewind(self) -> None:
        """The next step is the first one again."""
        self._counters[0].fill_(self._first)

    def begin_epoch(self, order: Tensor, batch: int) -> None:
        """Take the order of rows, (N,), of a new epoch, to be entered at its `batch`-th batch."""
        self._order.copy_(order, non_blocking=True)
        self._counters[1].fill_(batch * self._work.batch_size)

    def advance(self, most: int) -> int:
        """Launch one step, or several if as many are left; how many. The loss is not looked at."""
        if most >= STEPS_A_LAUNCH:
            self._several.replay()
            return STEPS_A_LAUNCH
        self._one.replay()
        return 1


class FusedAdam(torch.optim.Optimizer):
    """Adam and AdamW with one launch for each parameter, which fills the device; its state is that of torch's own.

    PyTorch's fused Adam cuts all parameters into pieces of 65,536 numbers, one for each multiprocessor: a network of a million
    weights then leaves most of a large GPU idle, and the optimiser takes longer than the passes.

    Args:
        params: parameters or groups, float32 on a CUDA device.
        lr: the learning rate, a tensor on the device.
        decoupled: AdamW's decay of the weights.
        seen: by masked parameter, how many columns of each row are not masked; the others cost nothing.
    """

    def __init__(
        self, params: Any, *, lr: Tensor, decoupled: bool, seen: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled": decoupled}
        defaults["capturable"] = True  # by which torch knows that the count of steps is kept on the device
        super().__init__(params, defaults)
        self._seen = dict(seen or {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del closure
        due = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, group in due:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), device=p.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            averages = (state["exp_avg"], state["exp_avg_sq"])
            settings = {name: group[name] for name in ("betas", "eps", "weight_decay", "decoupled")}
            kernels.adam(p, p.grad, averages, group["lr"], state["step"], seen=self._seen.get(p), **settings)
        torch._foreach_add_([self.state[p]["step"] for p, _ in due], 1)


@contextmanager
def undone(work: Training) -> Iterator[None]:
    """Whatever steps happen inside leave no trace: tensors are restored in place, generators and learning rates too."""
    rates = [group["lr"] for group in work.optimiser.param_groups]
    noise = [generator.get_state() for generator in work.generators]
    known = {id(t) for t in _mutable_tensors(work)}
    saved = [(t, t.detach().clone()) for t in _mutable_tensors(work)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)
            for tensor in _mutable_tensors(work):
                if id(tensor) not in known:  # the optimiser's state, which began at zero
                    tensor.zero_()
        for generator, state in zip(work.generators, noise, strict=True):
            generator.set_state(state)
        for group, rate in zip(work.optimiser.param_groups, rates, strict=True):
            group["lr"] = rate


def trained_tensors(work: Training) -> list[Tensor]:
    """The weights, and their average."""
    return [*work.module.parameters(), *(work.average or {}).values()]


def _mutable_tensors(work: Training) -> list[Tensor]:
    """Every tensor that a step changes in place."""
    entries = work.optimiser.state.values()
    state = [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]
    return [*trained_tensors(work), *work.module.buffers(), *state, work.bound_sum]
