"""The training loop: deterministic given its options, interruptible, resumable at any step."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from xorflow import evaluate
from xorflow.data import Dataset, Split
from xorflow.errors import TrainingError
from xorflow.estimators import Estimator
from xorflow.flows import LatentFlow
from xorflow.training.checkpoint import (
    Progress,
    Snapshot,
    load_snapshot,
    optimiser_tensors,
    restore_optimiser,
    save_snapshot,
)
from xorflow.training.devices import resolve_device
from xorflow.training.metrics import MetricsLog
from xorflow.training.options import Options
from xorflow.training.step import Step, learning_rate, make_optimiser

_GPU_CHECK_STEPS = 200
"""How often the loss is looked at on an accelerator, where looking costs a synchronisation."""


class Interrupted(Exception):
    """The user asked to stop: the step was finished and, if the run has a folder, saved."""


class Observer(Protocol):
    """What watches a run; the command line draws it."""

    def on_start(self, total_steps: int, progress: Progress) -> None: ...
    def on_step(self, step: int) -> None: ...
    def on_epoch(self, record: dict[str, Any]) -> None: ...


class Trainer:
    """Trains a flow with an estimator on a data set.

    Args:
        flow: the model, trained in place.
        estimator: the objective.
        dataset: train and, if there is one, validation.
        options: of the run.
        run: the run's folder, or None to keep nothing on disk.
        observer: is told about progress.
    """

    def __init__(
        self,
        flow: LatentFlow,
        estimator: Estimator,
        dataset: Dataset,
        options: Options,
        run: Path | None = None,
        observer: Observer | None = None,
    ) -> None:
        estimator.check(flow)
        self.options = options
        self.run_folder = run
        self.observer = observer
        self.device = resolve_device(options.device)
        from lightning_fabric import Fabric  # half of the package's import time, and only training needs it

        self.fabric = Fabric(
            accelerator=self.device.type,
            devices=[self.device.index or 0] if self.device.type == "cuda" else 1,
            precision=options.precision,  # pyright: ignore[reportArgumentType]
        )
        self.dataset = dataset.to(self.device)
        self.flow = flow
        self.estimator = estimator
        self.step_module = Step(flow, estimator)
        optimiser = make_optimiser(self.step_module, options)
        self._wrapped, self.optimiser = self.fabric.setup(self.step_module, optimiser)
        self.batch_size = min(options.batch_size, len(self.dataset.train))
        self.steps_per_epoch = len(self.dataset.train) // self.batch_size  # a last short batch waits for other epochs
        self.total_steps = self.steps_per_epoch * options.epochs
        self.progress = Progress()
        self.generator = torch.Generator(self.device).manual_seed(options.seed)
        self.average = self._copy_weights() if options.average else None
        self.best: dict[str, Tensor] | None = None
        self.metrics = MetricsLog(run, tensorboard=options.tensorboard)
        self._stop_requested = False
        self._bound_sum = torch.zeros((), dtype=torch.float64, device=self.device)

    # ---- the run ----

    def train(self) -> None:
        """Go on from where the run stands to its end; the flow then holds the best weights."""
        self._restore()
        if self.observer:
            self.observer.on_start(self.total_steps, self.progress)
        started, before = time.monotonic(), self.progress.seconds
        last_save = started
        with self._interruptible():
            while self.progress.epoch < self.options.epochs:
                self._train_epoch(lambda: self._clock(started, before))
                self._clock(started, before)
                self._end_epoch()
                if time.monotonic() - last_save >= self.options.checkpoint_seconds:
                    self._save()
                    last_save = time.monotonic()
                self._stop_if_requested()
        self._install(self.best if self.best is not None else self._evaluation_weights())
        self.progress.finished = True
        self.metrics.close()

    def _clock(self, started: float, before: float) -> None:
        self.progress.seconds = before + time.monotonic() - started

    def _train_epoch(self, clock) -> None:
        order = self._row_order(self.progress.epoch)
        while self.progress.batch < self.steps_per_epoch:
            first = self.progress.batch * self.batch_size
            self._train_step(order[first : first + self.batch_size])
            self.progress.batch += 1
            self.progress.step += 1
            if self.observer:
                self.observer.on_step(self.progress.step)
            if self._stop_requested:
                clock()
                self._stop_if_requested()

    def _row_order(self, epoch: int) -> Tensor:
        # seeded by the epoch alone, and drawn on the CPU: a resumed run, on any device, sees the same batches
        generator = torch.Generator().manual_seed((self.options.seed << 20) + epoch)
        return torch.randperm(len(self.dataset.train), generator=generator).to(self.device)

    def _train_step(self, rows: Tensor) -> None:
        rate = learning_rate(self.options, self.progress.step, self.total_steps)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        batch = self.dataset.train.gather(rows, generator=self.generator)
        draws = self.estimator.draw(self.flow, len(rows), self.generator)
        context = batch.context if self.flow.context_features else None
        found = self._wrapped(batch.x, context, draws)
        self.fabric.backward(found["loss"])
        self._check_finite(found["loss"])
        if self.options.clip:
            torch.nn.utils.clip_grad_norm_(self.step_module.parameters(), self.options.clip, foreach=True)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.estimator.update({k.removeprefix("stats."): v for k, v in found.items() if k.startswith("stats.")})
        self._bound_sum += found["bound"]
        if self.average is not None:
            self._update_average()

    # ---- the end of an epoch ----

    def _end_epoch(self) -> None:
        self._check_finite(self._bound_sum, always=True)
        record: dict[str, Any] = {
            "epoch": self.progress.epoch + 1,
            "step": self.progress.step,
            "train_nll": -float(self._bound_sum) / self.steps_per_epoch,
            "lr": self.optimiser.param_groups[0]["lr"],
            "seconds": round(self.progress.seconds, 3),
        }
        self.progress.epoch += 1
        self.progress.batch = 0
        self._bound_sum.zero_()
        due = self.progress.epoch % self.options.validate_every == 0 or self.progress.epoch == self.options.epochs
        if self.dataset.validation is not None and due:
            record["validation_nll"] = self._validate(self.dataset.validation)
        self.metrics.write(record)
        if self.observer:
            self.observer.on_epoch(record)

    def _validate(self, split: Split) -> float:
        """The likelihood (or a cheap bound) on validation data; remembers the weights if they are the best so far."""
        current = None if self.average is None else self._copy_weights()
        if self.average is not None:
            self._install(self.average)
        self.flow.eval()
        if self.flow.has_closed_form:
            nll = evaluate.exact(self.flow, split).nll
        else:
            nll = evaluate.importance(self.flow, split, samples=4).nll
        self.flow.train()
        if self.progress.best_nll is None or nll < self.progress.best_nll:
            self.progress.best_nll, self.progress.best_epoch = nll, self.progress.epoch
            self.best = self._copy_weights()
        if current is not None:
            self._install(current)
        return nll

    # ---- weights ----

    def _copy_weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.flow.state_dict().items()}

    def _evaluation_weights(self) -> dict[str, Tensor]:
        return self._copy_weights() if self.average is None else self.average

    @torch.no_grad()
    def _install(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in self.flow.state_dict().items():
            tensor.copy_(weights[name])

    @torch.no_grad()
    def _update_average(self) -> None:
        assert self.average is not None
        # early on, average over what there is: the first weights would otherwise linger
        weight = max(1 - self.options.average, 1 / (self.progress.step + 1))
        current = self.flow.state_dict()
        torch._foreach_lerp_(list(self.average.values()), [current[name] for name in self.average], weight)

    # ---- safety ----

    def _check_finite(self, value: Tensor, *, always: bool = False) -> None:
        if not always and self.device.type != "cpu" and self.progress.step % _GPU_CHECK_STEPS:
            return
        if math.isfinite(float(value.detach())):
            return
        culprit = next(
            (n for n, p in self.flow.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())),
            None,
        )
        where = f"; the first gradient that is not finite is that of {culprit}" if culprit else ""
        kept = "" if self.run_folder is None else f"; the last good checkpoint is kept in {self.run_folder}"
        raise TrainingError(
            f"the loss is not finite at step {self.progress.step + 1} (epoch {self.progress.epoch + 1}){where}{kept}: "
            "train again into another folder with a smaller --lr, or with --clip 1"
        )

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Within this block Ctrl-C and SIGTERM ask the loop to stop after the step; a second Ctrl-C stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def request(signum: int, frame: Any) -> None:
            del frame
            if self._stop_requested and signum == signal.SIGINT:
                raise KeyboardInterrupt
            self._stop_requested = True

        old = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _stop_if_requested(self) -> None:
        if self._stop_requested:
            self._check_finite(self._bound_sum, always=True)
            self._save()
            self.metrics.close()
            raise Interrupted

    # ---- saving and restoring ----

    def _save(self) -> None:
        if self.run_folder is None:
            return
        self.progress.bound_sum = float(self._bound_sum)
        groups = {
            "flow": self.flow.state_dict(),
            "estimator": self.estimator.state_dict(),
            "optimiser": optimiser_tensors(self.optimiser),
            "average": self.average or {},
            "best": self.best or {},
            "random": {"generator": self.generator.get_state()},
        }
        tensors = {f"{group}.{name}": t for group, named in groups.items() for name, t in named.items()}
        save_snapshot(self.run_folder, Snapshot(self.progress, tensors))

    def _restore(self) -> None:
        snapshot = None if self.run_folder is None else load_snapshot(self.run_folder)
        if snapshot is None:
            self.metrics.begin(0)
            return
        self.progress = snapshot.progress
        self.flow.load_state_dict(snapshot.group("flow"))
        self.estimator.load_state_dict(snapshot.group("estimator"))
        restore_optimiser(self.optimiser, snapshot.group("optimiser"))
        to_device = lambda named: {name: t.to(self.device) for name, t in named.items()}  # noqa: E731
        self.average = to_device(snapshot.group("average")) or None
        self.best = to_device(snapshot.group("best")) or None
        self.generator.set_state(snapshot.tensors["random.generator"])
        self._bound_sum.fill_(self.progress.bound_sum)
        self.metrics.begin(self.progress.step)
