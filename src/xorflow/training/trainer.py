"""The training loop: deterministic given its options, interruptible, resumable at any step."""

from __future__ import annotations

import hashlib
import math
import signal
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from xorflow import _devices as devices
from xorflow._cuda.proof import proved_steps
from xorflow._cuda.steps import CapturedSteps, RowsOnDevice, StepNumber
from xorflow._devices import (
    bf16_autocast,
    dropout_generator,
    resolve_device,
    seeded_dropout,
    tf32_matmul,
)
from xorflow._distributed import add_up, process_count, rank, require_same
from xorflow.conditioners.transformer import attention_stacks
from xorflow.data import Batch, Dataset, Split
from xorflow.data.stream import parts_of_batch
from xorflow.errors import CheckpointError, ConfigError
from xorflow.estimators import Estimator, Loss
from xorflow.estimators.base import Minibatch
from xorflow.training.checkpoint import (
    Progress,
    Snapshot,
    load_snapshot,
    named,
    optimiser_tensors,
    require_fit,
    restore_optimiser,
    save_snapshot,
)
from xorflow.training.config import Options
from xorflow.training.failure import not_finite
from xorflow.training.folder import MetricsLog
from xorflow.training.optimiser import learning_rate, make_optimiser
from xorflow.training.registry import Trainable
from xorflow.training.results import validation_nll


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
        self.flow = estimator.admit(flow)
        self.estimator, self.options, self.run_folder, self.observer = estimator, options, run, observer
        self.device = resolve_device(options.device)
        self.dataset = dataset.to(self.device)
        self.rows = self.dataset.training_rows
        self.batch_size = min(options.batch_size, self.rows)
        stream, self.processes = self.dataset.stream, process_count()
        # a last short batch waits for other epochs
        self.steps_per_epoch = (
            self.rows // self.batch_size if stream is None else stream.steps(self.batch_size, self.processes)
        )
        self.total_steps = self.steps_per_epoch * options.epochs
        self.progress = Progress()
        self.generator = torch.Generator(self.device).manual_seed(options.seed)
        self.metrics = MetricsLog(None if rank() else run, tensorboard=options.tensorboard)
        self.best: dict[str, Tensor] | None = None
        self.bound_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.not_captured: str | None = None
        self._asked_to_stop = self._stopping = False
        self._next_order: Tensor | None = None
        self._began = self._saved = time.monotonic()
        self._prepare_model()

    def _prepare_model(self) -> None:
        """Put the model on its device, in its precision, and make all that depends on its weights."""
        flow, options, device = self.flow, self.options, self.device
        with torch.random.fork_rng(devices=[]):  # for networks that the estimator makes for itself
            torch.manual_seed(options.seed)
            self.estimator.prepare(flow, self.total_steps)
        if options.compile and devices.compiles(device):
            for stack in attention_stacks(flow):
                stack.compile_blocks()
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # on which kernels of our own are launched
        self.module: nn.Module = nn.ModuleDict({"flow": flow, "estimator": self.estimator}).to(device)
        if options.precision == "64-true":
            self.module.double()
        self.in_bf16 = options.precision == "bf16-mixed"
        self.rounds_products = devices.rounds_products(device, options.precision)
        self.optimiser = make_optimiser(self.module, options, device)
        self.average = self._copy_weights() if options.average else None
        # a device that works ahead of the host is asked for the loss at the end of an epoch
        self.checks_each_step = device.type == "cpu" and not devices.captures(device)
        train = self.dataset.train
        binarises = train.stochastic and flow.states.binary and flow.dtype == torch.float32
        on_device = binarises and devices.has_kernels(train.values.device)
        self._rows_on_device = RowsOnDevice(train.values, train.context, options.seed) if on_device else None
        self._dropout = dropout_generator(flow, device)
        self._dropout_state: Tensor | None = None  # of a checkpoint

    # ---- the loop ----

    def train(self) -> None:
        """Go on from where the run stands to its end; the flow then holds the best weights.

        Raises:
            Interrupted: after Ctrl-C or SIGTERM, once the step is made and saved; a second Ctrl-C stops at once.
        """
        self.restore()
        if self.processes > 1:
            require_same({"weights": self._learned() | {"noise": self.generator.get_state()}})
        self._began = time.monotonic() - self.progress.seconds  # captures and compilation count as training
        with seeded_dropout(self._dropout, self.options.seed, self._dropout_state):
            captured = self.captured_steps()
            self._saved = time.monotonic()
            with handled_signals(dict.fromkeys((signal.SIGINT, signal.SIGTERM), self._request_stop)):
                self.metrics.begin(self.progress.epoch)
                if self.observer:
                    self.observer.on_start(self.total_steps, self.progress)
                while not self.is_finished():
                    self.train_epoch(captured)
                    self.end_epoch()
                    self._pause()
        self._install(self.best or self.average)
        self._require_finite_weights()

    def is_finished(self) -> bool:
        """Whether all epochs are made, or the last `patience` validations found no better weights."""
        options, epoch, best = self.options, self.progress.epoch, self.progress.best_epoch
        if epoch >= options.epochs or options.patience is None or best is None:
            return epoch >= options.epochs
        return epoch // options.validate_every - best // options.validate_every >= options.patience

    def train_epoch(self, captured: CapturedSteps | None = None) -> None:
        """The steps of an epoch, from where it stands; on CUDA as graphs, if they are `captured`."""
        progress = self.progress
        if captured is not None:
            captured.begin_epoch(self._order(), progress.batch)
        with tf32_matmul(self.rounds_products), closing(self._batches()) as batches:
            while progress.batch < self.steps_per_epoch:
                if captured is None:
                    self.make_step(next(batches), progress.step)
                    made = 1
                else:
                    made = captured.advance(self.steps_per_epoch - progress.batch)
                progress.batch += made
                progress.step += made
                if self.observer:
                    self.observer.on_step(progress.step)
                self._pause()
        # a device still has many of this epoch's steps to make
        following = progress.epoch + 1
        if self.dataset.stream is None and following < self.options.epochs:
            self._next_order = self.row_order(following)

    def _batches(self) -> Generator[Tensor]:
        """What `gather` takes, for the rest of the epoch: numbers of rows or, of a stream, the rows themselves."""
        progress, stream, size = self.progress, self.dataset.stream, self.batch_size
        if stream is not None:
            several = {"rank": rank(), "world": self.processes}
            yield from stream.batches(size, self.options.seed, progress.epoch, progress.batch, **several)
        else:
            yield from self._order()[progress.batch * size :].split(size)

    def _order(self) -> Tensor:
        """That of the epoch, on the device."""
        order, self._next_order = self._next_order, None
        order = self.row_order(self.progress.epoch) if order is None else order
        return order.to(self.device, non_blocking=True)

    def end_epoch(self) -> None:
        """All steps of an epoch are made: record it, and validate if it is time to."""
        progress, options, bound_sum = self.progress, self.options, float(self.bound_sum)
        progress.seconds = time.monotonic() - self._began
        self._require_finite("the loss", bound_sum)
        progress.epoch += 1
        progress.batch = 0
        self.bound_sum.zero_()
        record: dict[str, Any] = {
            "epoch": progress.epoch,
            "step": progress.step,
            "train_nll": -bound_sum / self.steps_per_epoch,
            "lr": learning_rate(options, progress.step - 1, self.total_steps),
            "seconds": round(progress.seconds, 3),
        }
        due = progress.epoch % options.validate_every == 0 or progress.epoch == options.epochs
        if self.dataset.validation is not None and due:
            record["validation_nll"] = self._validate(self.dataset.validation)
        self.metrics.write(record)
        if self.observer:
            self.observer.on_epoch(record)

    def row_order(self, epoch: int) -> Tensor:
        """The rows of an epoch in the order in which they are used, (N,), on the CPU."""
        # seeded by the epoch alone, and drawn on the CPU: a resumed run, on any device, sees the same batches
        generator = torch.Generator().manual_seed((self.options.seed << 20) + epoch)
        order = torch.randperm(self.rows, generator=generator)
        return order.pin_memory() if self.device.type == "cuda" else order

    # ---- a step: gather, draw, loss, backward, clip, optimise, update, average ----

    def make_step(self, rows: Tensor, number: int) -> None:
        """Step `number` of the run, on these rows (B,)."""
        rate, average_weight = self.schedule(number)
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        batch = self.gather(rows, number)
        if self.processes > 1:
            batch = self._of_this_process(batch, number)
        self.learn(batch, average_weight)

    def gather(self, rows: Tensor, number: int | StepNumber) -> Minibatch:
        """Rows (B,) and the noise of a step: all of it that does not depend on the weights."""
        flow, train = self.flow, self.dataset.train
        if self._rows_on_device is not None:
            x, context = self._rows_on_device(rows, number)
        else:
            in_memory = self.dataset.stream is None
            batch = train.gather(rows, generator=self.generator) if in_memory else Batch(rows.to(self.device))
            x, context = flow.states.integers(batch.x), batch.context
        count = len(rows) if self.dataset.stream is None else self.batch_size  # of all processes
        draws = self.estimator.draw(flow, count, self.generator)
        soft = train.probabilities(rows).to(flow.dtype) if self.estimator.takes_soft_targets else None
        return Minibatch(x, flow.seen(context), draws, soft)

    def learn(self, batch: Minibatch, average_weight: float | Tensor) -> None:
        """The rest of a step; weights are changed in place, as all that a step changes."""
        loss, bound, stats = self._backward(batch)
        if self.processes > 1:
            self._add_up([loss, bound, *stats.values()])
        if self.checks_each_step:
            self._require_finite("the loss", float(loss), self.progress.step + 1)
        if self.options.clip:
            parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.options.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.estimator.update(stats)
        self.bound_sum += bound
        if self.average is not None:
            self._update_average(self.average, average_weight)

    def _backward(self, batch: Minibatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Leave the gradient of a batch in the parameters; the loss, bound and statistics, over the pieces it passes in."""
        sums: list[Tensor] = []
        names: list[str] = []
        for piece in self._split(batch, self.options.accumulate):
            loss = self._loss(piece)
            names = list(loss.stats)
            values = [loss.surrogate, loss.bound, *loss.stats.values()]
            if piece.share < 1:
                values = [value * piece.share for value in values]
            values[0].backward()
            values = [value.detach() for value in values]
            sums = [a + b for a, b in zip(sums, values, strict=True)] if sums else values
        return sums[0], sums[1], dict(zip(names, sums[2:], strict=True))

    def _loss(self, batch: Minibatch) -> Loss:
        """Its surrogate with the second loss in it, if the estimator has one."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.in_bf16):
            start = self.flow.start(batch.x, batch.context)
            if batch.probabilities is None:
                loss = self.estimator.loss(self.flow, start, batch.draws)
            else:
                loss = self.estimator.soft_target_loss(self.flow, start, batch.probabilities)
        if loss.control is None:
            return loss
        if next(self.estimator.parameters(), None) is None:
            raise ConfigError(
                f"the second loss of {type(self.estimator).__name__} trains a control variate that has no parameters; make "
                "them in prepare(), or return a Loss without control"
            )
        return Loss(loss.surrogate + loss.control, loss.bound, stats=loss.stats)

    @torch.no_grad()
    def _update_average(self, average: dict[str, Tensor], weight: float | Tensor) -> None:
        current = self.flow.state_dict()
        for name, tensor in average.items():
            tensor.lerp_(current[name], weight.to(tensor.dtype) if isinstance(weight, Tensor) else weight)

    def schedule(self, step: int) -> tuple[float, float]:
        """The learning rate of step `step` (from 0), and how much of the weights that it leaves goes into their average."""
        # early on, average over what there is: the first weights would otherwise linger
        average_weight = max(1 - self.options.average, 1 / (step + 2))
        return learning_rate(self.options, step, self.total_steps), average_weight

    def _split(self, batch: Minibatch, count: int) -> list[Minibatch]:
        return batch.split(count, self.estimator.parts_of_batch(self.flow))

    # ---- several processes ----

    def _of_this_process(self, batch: Minibatch, number: int) -> Minibatch:
        """The rows of a step that are this one's, with their noise; what it drops has a stream of its own."""
        if self._dropout is not None:
            name = f"{self.options.seed} {number} {rank()} of {self.processes}"
            self._dropout.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]))
        if self.dataset.stream is None:
            return self._split(batch, self.processes)[rank()]
        first, last = parts_of_batch(self.batch_size, self.processes)[rank()]  # only these were read
        draws = None if batch.draws is None else batch.draws[:, first:last]
        return replace(batch, draws=draws, share=len(batch.x) / self.batch_size)

    def _add_up(self, values: list[Tensor]) -> None:
        """Make gradients and values those of the whole step; who is asked to stop stops all."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        stop = torch.tensor(float(self._asked_to_stop))
        add_up([*gradients, *values, stop])
        self._stopping = bool(stop)

    # ---- CUDA graphs ----

    def captured_steps(self) -> CapturedSteps | None:
        """The steps from here on as CUDA graphs, where a device has them and they prove to be those of `make_step`."""
        if not devices.captures(self.device) or self.dataset.stream is not None:
            return None
        if self.processes > 1:
            self.not_captured = "a captured step is of one process"
            return None
        reason = self.estimator.not_capturable(self.flow)
        with tf32_matmul(self.rounds_products):
            captured, self.not_captured = proved_steps(self, self.progress.step, reason)
        return captured

    @property
    def generators(self) -> list[torch.Generator]:
        """All that a step draws from."""
        return [self.generator, *([] if self._dropout is None else [self._dropout])]

    # ---- validation and weights ----

    def _validate(self, split: Split) -> float:
        """The likelihood (or a cheap bound) on validation data; remembers the best weights so far."""
        current = self._copy_weights() if self.average else None
        self._install(self.average)
        self.flow.eval()
        with bf16_autocast(self.device, self.options.precision):
            nll = validation_nll(self.flow, split, greedy=self.options.select == "greedy")
        self.flow.train()
        self._require_finite("the validation likelihood", nll)
        self._require_finite_weights()  # those of a layer that is only drawn from may not enter that likelihood
        if self.progress.best_nll is None or nll < self.progress.best_nll:
            self.progress.best_nll, self.progress.best_epoch = nll, self.progress.epoch
            self.best = self._copy_weights()
        self._install(current)
        return nll

    def _copy_weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.flow.state_dict().items()}

    def _install(self, weights: dict[str, Tensor] | None) -> None:
        """Put these into the flow, in place; None changes nothing."""
        if weights:
            self.flow.load_state_dict(weights)

    # ---- stopping ----

    def _pause(self) -> None:
        """Between two steps: save if it is time to, stop if asked to."""
        due = time.monotonic() - self._saved >= self.options.checkpoint_seconds
        if self.processes == 1:
            self._stopping = self._asked_to_stop
        if due or self._stopping:
            self.save()
            self._saved = time.monotonic()
        if self._stopping:
            raise Interrupted

    def _request_stop(self, signum: int, frame: Any) -> None:
        """Ctrl-C and SIGTERM ask the loop to stop after the step; a second Ctrl-C stops at once."""
        del frame
        if self._asked_to_stop and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked_to_stop = True

    # ---- safety ----

    def _require_finite(self, what: str, value: float, step: int | None = None) -> None:
        if not math.isfinite(value):
            raise not_finite(self, what, self.progress.step if step is None else step)

    def _require_finite_weights(self) -> None:
        finite = torch.stack([w.isfinite().all() for w in self.module.parameters()]).all()
        self._require_finite("a weight", 0.0 if bool(finite) else math.nan)

    # ---- checkpoints ----

    def save(self) -> None:
        """Write a checkpoint, if the run has a folder and every number in it is one."""
        if self.run_folder is None or rank():
            return
        self.progress.seconds = time.monotonic() - self._began
        self.progress.bound_sum = float(self.bound_sum)
        self._require_finite("the loss", self.progress.bound_sum)
        self._require_finite_weights()
        state = self._learned() | named("best", self.best) | self._random_states()
        state |= named("optimiser", optimiser_tensors(self.optimiser))
        save_snapshot(self.run_folder, Snapshot(self.progress, state))

    def restore(self) -> None:
        """Take up the last checkpoint, if there is one."""
        snapshot = None if self.run_folder is None else load_snapshot(self.run_folder)
        if snapshot is None:
            return
        best, optimiser, kept = snapshot.take("best"), snapshot.take("optimiser"), snapshot.tensors
        require_fit(kept, self._learned() | self._random_states(), "the tensors of the checkpoint")
        if best:
            require_fit(best, self.flow.state_dict(), "the best weights of the checkpoint")
        self._require_possible(snapshot.progress)
        restore_optimiser(self.optimiser, optimiser)
        for name, tensor in (self.average or {}).items():
            tensor.copy_(kept[f"average.{name}"])
        self.module.load_state_dict({name: kept[name] for name in self.module.state_dict()})
        self._dropout_state = kept.get("random.dropout")
        for name in self._random_states():  # the last one is its own
            try:
                self.generator.set_state(kept[name])
            except RuntimeError as error:
                raise CheckpointError(
                    f"the checkpoint in {self.run_folder} is damaged: {error}; train again"
                ) from None
        self.best = {name: tensor.to(self.device) for name, tensor in best.items()} or None
        self.progress = snapshot.progress
        self.bound_sum.fill_(self.progress.bound_sum)

    def _require_possible(self, progress: Progress) -> None:
        """Refuse a progress that no run of these options passes through."""
        epoch, batch, step = progress.epoch, progress.batch, progress.step
        counted = step == epoch * self.steps_per_epoch + batch and batch <= self.steps_per_epoch
        if not counted or step > self.total_steps:
            raise CheckpointError(
                f"the checkpoint in {self.run_folder} is not of this run, which has {self.total_steps:,} steps: it was made at "
                f"step {step:,}, batch {batch:,} of epoch {epoch + 1:,}; begin anew with another --out"
                + (", or go on with as many processes as before" * (self.dataset.stream is not None))
            )

    def _learned(self) -> dict[str, Tensor]:
        """What is learned, by the names that a checkpoint has for it."""
        return self.module.state_dict() | named("average", self.average)

    def _random_states(self) -> dict[str, Tensor]:
        generators = {"dropout": self._dropout, "generator": self.generator}
        return {f"random.{name}": one.get_state() for name, one in generators.items() if one is not None}


@contextmanager
def handled_signals(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Within this block signals have these handlers; only the main thread can arrange that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
