"""The training loop: deterministic given its options, interruptible, resumable at any step."""

from __future__ import annotations

import functools
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor

from xorflow import evaluate
from xorflow._cuda import devices
from xorflow.conditioners.transformer import attention_stacks
from xorflow.data import Dataset, Split
from xorflow.errors import ConfigError, TrainingError
from xorflow.estimators import Estimator
from xorflow.training.checkpoint import (
    Progress,
    Snapshot,
    load_snapshot,
    optimiser_tensors,
    restore_optimiser,
    save_snapshot,
)
from xorflow.training.config import Options
from xorflow.training.devices import default_generator, resolve_device
from xorflow.training.engine import Engine, Machinery, choose_engine, has_dropout, say_not_captured
from xorflow.training.failure import where_not_finite
from xorflow.training.metrics import MetricsLog
from xorflow.training.optimiser import make_optimiser
from xorflow.training.precision import bf16_autocast, tf32_matmul
from xorflow.training.step import Step, Trainable, learning_rate

if TYPE_CHECKING:
    from lightning_fabric import Fabric


_DROPOUT_SEEDS = 2**42
"""Added to a run's seed for dropout, beyond all seeds: the numbers that binarise rows must not be those that drop units."""


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
        flow: Trainable,
        estimator: Estimator,
        dataset: Dataset,
        options: Options,
        run: Path | None = None,
        observer: Observer | None = None,
    ) -> None:
        admitted = estimator.admit(flow)
        if estimator.takes_soft_targets and not dataset.train.stochastic:
            raise ConfigError(
                "soft_targets is for images whose grey values are binarised afresh, as MNIST's are, and these data are fixed; "
                "leave soft_targets out of the estimator"
            )
        self.options = options
        self.run_folder = run
        self.observer = observer
        self.device = resolve_device(options.device)
        self.dataset = dataset.to(self.device)
        self.flow = admitted
        self.estimator = estimator
        self.batch_size = min(options.batch_size, len(self.dataset.train))
        # a last short batch waits for other epochs
        self.steps_per_epoch = len(self.dataset.train) // self.batch_size
        self.total_steps = self.steps_per_epoch * options.epochs
        estimator.prepare(admitted, self.total_steps)
        self.step_module = Step(admitted, estimator)
        if options.compile and devices.compiles(self.device):
            for part in attention_stacks(flow):
                part.compile_blocks()
        with tf32_matmul(self.device.type == "cuda"):  # otherwise Fabric logs advice to switch them on
            self.fabric = _fabric_for(self.device, options.precision)
            self.fabric.to_device(self.step_module)
            optimiser = make_optimiser(self.step_module, options, self.device)
            wrapped, self.optimiser = self.fabric.setup(self.step_module, optimiser)
        self.progress = Progress()
        self.generator = torch.Generator(self.device).manual_seed(options.seed)
        self._dropout = default_generator(self.device) if has_dropout(flow) else None
        self._dropout_state: Tensor | None = None  # of a checkpoint
        self.average = self._copy_weights() if options.average else None
        self.best: dict[str, Tensor] | None = None
        self.metrics = MetricsLog(run, tensorboard=options.tensorboard)
        self._stopping = False
        self._saved = 0.0  # a moment of the monotonic clock
        self._next_order: tuple[int, Tensor] | None = None
        self._restored = False
        self._began = 0.0  # a moment of the monotonic clock
        self._bound_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.not_captured: str | None = None
        self.machinery = Machinery(
            step=self.step_module,
            forward=wrapped,
            backward=self.fabric.backward,
            # Fabric's own optimiser skips the steps whose scaled gradients overflow
            optimiser=self.optimiser if options.precision == "16-mixed" else optimiser,
            clip=lambda: self.fabric.clip_gradients(
                wrapped, self.optimiser, max_norm=options.clip, error_if_nonfinite=False
            ),
            check=None if devices.captures(self.device) or self.device.type != "cpu" else self._check_loss,
            train=self.dataset.train,
            options=options,
            generator=self.generator,
            seeds=torch.tensor([options.seed], device=self.device),
            average=self.average,
            bound_sum=self._bound_sum,
            batch_size=self.batch_size,
            total_steps=self.total_steps,
        )

    # ---- the run ----

    def train(self) -> None:
        """Go on from where the run stands to its end; the flow then holds the best weights.

        Raises:
            Interrupted: after Ctrl-C or SIGTERM, once the step is made and saved; a second Ctrl-C stops at once.
        """
        self.restore()
        self.start_clock()
        with self._own_dropout():
            engine, reason = choose_engine(self.machinery, self.progress.step)
            self.note_engine(reason)
            self._train_with(engine)
        self._install(self.best if self.best is not None else self._evaluation_weights())
        self._require_finite_weights()

    def _train_with(self, engine: Engine) -> None:
        self._saved = time.monotonic()
        try:
            with self._interruptible():
                self.metrics.begin(self.progress.epoch)
                if self.observer:
                    self.observer.on_start(self.total_steps, self.progress)
                while self.progress.epoch < self.options.epochs:
                    self.train_epoch(engine)
                    self.end_epoch()
                    self._pause()
        finally:
            self.metrics.close()

    def train_epoch(self, engine: Engine) -> None:
        """The steps of an epoch, from where it stands."""
        epoch = self.progress.epoch
        engine.begin_epoch(self._order(epoch), self.progress.batch)
        while self.progress.batch < self.steps_per_epoch:
            batch = self.progress.batch
            made = engine.advance(batch, self.progress.step, self.steps_per_epoch - batch)
            self.progress.batch += made
            self.progress.step += made
            if self.observer:
                self.observer.on_step(self.progress.step)
            self._pause()
        if epoch + 1 < self.options.epochs:  # a device still has many of this epoch's steps to make
            self._next_order = epoch + 1, self._order(epoch + 1)

    def _order(self, epoch: int) -> Tensor:
        if self._next_order is not None and self._next_order[0] == epoch:
            return self._next_order[1]
        order = self.row_order(epoch)
        return order.pin_memory() if self.device.type == "cuda" else order

    # ---- stopping ----

    def _pause(self) -> None:
        """Between two steps: save if it is time to, stop if asked to."""
        due = time.monotonic() - self._saved >= self.options.checkpoint_seconds
        if due or self._stopping:
            self.save()
            self._saved = time.monotonic()
        if self._stopping:
            raise Interrupted

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM ask the loop to stop after the step; a second Ctrl-C stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def request(signum: int, frame: Any) -> None:
            del frame
            if self._stopping and signum == signal.SIGINT:
                raise KeyboardInterrupt
            self._stopping = True

        old = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def note_engine(self, reason: str | None) -> None:
        """Remember why its steps are not captured, if they could have been, and say so."""
        self.not_captured = reason
        if reason is not None:
            say_not_captured(reason)

    @contextmanager
    def _own_dropout(self) -> Iterator[None]:
        """Within this block the process's generator, which dropout draws from, is this run's; it is given back as it was."""
        if self._dropout is None:
            yield
            return
        before = self._dropout.get_state()
        if self._dropout_state is None:
            self._dropout.manual_seed(_DROPOUT_SEEDS + self.options.seed)
        else:
            self._dropout.set_state(self._dropout_state)
        try:
            yield
        finally:
            self._dropout.set_state(before)

    def start_clock(self) -> None:
        """From here on time counts as training: capture and compilation, too."""
        self._began = time.monotonic() - self.progress.seconds

    def row_order(self, epoch: int) -> Tensor:
        """The rows of an epoch in the order in which they are used, on the CPU."""
        # seeded by the epoch alone, and drawn on the CPU: a resumed run, on any device, sees the same batches
        generator = torch.Generator().manual_seed((self.options.seed << 20) + epoch)
        return torch.randperm(len(self.dataset.train), generator=generator)

    # ---- the end of an epoch ----

    def end_epoch(self) -> None:
        """All steps of an epoch are made: record it, and validate if it is time to."""
        bound_sum = float(self._bound_sum)
        self.progress.seconds = time.monotonic() - self._began
        self._require_finite("the loss", bound_sum, self.progress.step)
        record: dict[str, Any] = {
            "epoch": self.progress.epoch + 1,
            "step": self.progress.step,
            "train_nll": -bound_sum / self.steps_per_epoch,
            "lr": learning_rate(self.options, self.progress.step - 1, self.total_steps),
            "seconds": round(self.progress.seconds, 3),
        }
        self.progress.epoch += 1
        self.progress.batch = 0
        self._bound_sum.zero_()
        due = (
            self.progress.epoch % self.options.validate_every == 0
            or self.progress.epoch == self.options.epochs
        )
        if self.dataset.validation is not None and due:
            record["validation_nll"] = self._validate(self.dataset.validation)
        self.metrics.write(record)
        if self.observer:
            self.observer.on_epoch(record)

    def _validate(self, split: Split) -> float:
        """The likelihood (or a cheap bound) on validation data; remembers the best weights so far."""
        current = None if self.average is None else self._copy_weights()
        if self.average is not None:
            self._install(self.average)
        self.flow.eval()
        with bf16_autocast(self.device, self.options.precision):
            if self.options.select == "greedy":
                nll = evaluate.greedy(self.flow, split).nll
            elif self.flow.has_closed_form:
                nll = evaluate.exact(self.flow, split).nll
            else:
                proposal = "q" if self.flow.has_posterior else "p"
                nll = evaluate.importance(self.flow, split, samples=4, proposal=proposal).nll
        self.flow.train()
        self._require_finite("the validation likelihood", nll, self.progress.step)
        self._require_finite_weights()  # those of a layer that is only drawn from may not enter that likelihood
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

    # ---- safety ----

    def _check_loss(self, loss: Tensor) -> None:
        self._require_finite("the loss", float(loss.detach()), self.progress.step + 1)

    def _require_finite(self, what: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            self._fail(what, step)

    def _require_finite_weights(self) -> None:
        if not bool(torch.stack([w.isfinite().all() for w in self._named_weights().values()]).all()):
            self._fail("a weight", self.progress.step)

    def _named_weights(self) -> dict[str, Tensor]:
        """Those of the flow by their own names, and those of the estimator as its own."""
        return {name.removeprefix("flow."): p for name, p in self.step_module.named_parameters()}

    def _fail(self, what: str, step: int) -> NoReturn:
        where = where_not_finite(self._named_weights(), self.flow, self.dataset.train)
        if self.machinery.check is None:  # many steps may lie between what went wrong and this
            where += f" (on {self.device.type} steps are not looked at one by one, and others may have been before it)"
        saved = self.run_folder is not None and (self.run_folder / "checkpoints" / "latest.json").exists()
        kept = f"; the last good checkpoint is kept in {self.run_folder}" if saved else ""
        raise TrainingError(
            f"{what} is not finite at step {step} (epoch {-(-step // self.steps_per_epoch)}){where}{kept}: "
            "train again into another folder with a smaller lr, or with clip=1"
        )

    # ---- saving and restoring ----

    def save(self) -> None:
        """Write a checkpoint, if the run has a folder and every number in it is one."""
        if self.run_folder is None:
            return
        self.progress.seconds = time.monotonic() - self._began
        self.progress.bound_sum = float(self._bound_sum)
        self._require_finite("the loss", self.progress.bound_sum, self.progress.step)
        self._require_finite_weights()
        groups = {
            "flow": self.flow.state_dict(),
            "estimator": self.estimator.state_dict(),
            "optimiser": optimiser_tensors(self.optimiser),
            "average": self.average or {},
            "best": self.best or {},
            "random": {"generator": self.generator.get_state()},
        }
        if self._dropout is not None:
            groups["random"]["dropout"] = self._dropout.get_state()
        tensors = {f"{group}.{name}": t for group, named in groups.items() for name, t in named.items()}
        save_snapshot(self.run_folder, Snapshot(self.progress, tensors))

    def restore(self) -> None:
        """Take up the last checkpoint, if there is one; a second call changes nothing."""
        snapshot = None if self.run_folder is None or self._restored else load_snapshot(self.run_folder)
        if snapshot is None:
            return
        self.progress = snapshot.progress
        self.flow.load_state_dict(snapshot.group("flow"))
        self.estimator.load_state_dict(snapshot.group("estimator"))
        restore_optimiser(self.optimiser, snapshot.group("optimiser"))
        to_device = lambda named: {name: t.to(self.device) for name, t in named.items()}  # noqa: E731
        for name, tensor in to_device(snapshot.group("average")).items():
            assert self.average is not None
            self.average[name].copy_(tensor)
        self.best = to_device(snapshot.group("best")) or None
        self.generator.set_state(snapshot.tensors["random.generator"])
        self._dropout_state = snapshot.tensors.get("random.dropout")
        self._bound_sum.fill_(self.progress.bound_sum)
        self._restored = True


def _fabric_for(device: torch.device, precision: str) -> Fabric:
    """One for all runs of a kind: each looks through all installed packages. A scale of gradients is a run's own."""
    return _make_fabric(device, precision) if precision == "16-mixed" else _shared_fabric(device, precision)


def _make_fabric(device: torch.device, precision: str) -> Fabric:
    from lightning_fabric import Fabric  # half of the package's import time, and only training needs it

    return Fabric(
        accelerator=device.type,
        devices=[device.index or 0] if device.type == "cuda" else 1,
        precision="32-true" if precision in ("auto", "tf32") else precision,  # pyright: ignore[reportArgumentType]
    )


_shared_fabric = functools.cache(_make_fabric)
