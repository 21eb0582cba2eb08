"""The loop itself: epochs, pauses, the end; for one run, or for several that make every step together."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xorflow.training.engine import Engine, choose_engine
from xorflow.training.ensemble import Apart, Ensemble

if TYPE_CHECKING:
    from xorflow.training.loop import Trainer


class Interrupted(Exception):
    """The user asked to stop: the step was finished and, if the run has a folder, saved."""


def train_together(trainers: Sequence[Trainer]) -> list[Exception | None]:
    """Train runs that differ in their seed alone, each step of all of them in one launch.

    Each run validates, saves and ends as it would alone, and reaches the same weights to rounding. An interrupted group
    continues bit for bit only as the same group: other runs beside it, or none, round differently.

    Args:
        trainers: on the same data, with the same options but for the seed, at the same step.

    Returns:
        For each run None, or why it did not reach its end; what stops one run stops no other.

    Raises:
        Apart: these runs cannot be trained as one. Nothing has happened, and each of them can still be trained alone.
    """
    if len(trainers) < 2:
        raise Apart("one run is not several")
    for trainer in trainers:
        trainer.restore()
    steps = {trainer.progress.step for trainer in trainers}
    if len(steps) > 1:
        raise Apart(f"they stand at different steps: {', '.join(map(str, sorted(steps)))}")
    if 0 in steps:  # starts were made one after the other
        spent = sum(trainer.progress.seconds for trainer in trainers)
        for trainer in trainers:
            trainer.progress.seconds = spent
    for trainer in trainers:
        trainer.start_clock()
    ensemble = Ensemble([trainer.machinery for trainer in trainers])
    engine, reason = choose_engine(ensemble, steps.pop())
    for trainer in trainers:
        trainer.together = len(trainers)
        trainer.note_engine(reason)
    return Lockstep(trainers, engine).run()


class Lockstep:
    """Runs that one engine makes the steps of, from where they stand to their end.

    Args:
        trainers: restored, at the same step of runs of the same length.
        engine: of the one run, or of all of them as an `Ensemble`.
    """

    def __init__(self, trainers: Sequence[Trainer], engine: Engine) -> None:
        self._trainers = list(trainers)
        self._engine = engine
        self._errors: dict[Trainer, Exception] = {}
        self._signalled = False
        self._saved = 0.0  # a moment of the monotonic clock
        self._ahead: tuple[int, Tensor] | None = None

    def run(self) -> list[Exception | None]:
        """For each run None, or why it did not reach its end; `Interrupted` is one such reason."""
        self._saved = time.monotonic()
        try:
            with self._interruptible():
                self._each(lambda trainer: trainer.start())
                while self._running() and self._epoch < self._trainers[0].options.epochs:
                    self.train_epoch()
                    self._each(lambda trainer: trainer.end_epoch())
                    self._pause()
        finally:
            for trainer in self._trainers:
                trainer.metrics.close()
        self._each(lambda trainer: trainer.finish())
        return [self._errors.get(trainer) for trainer in self._trainers]

    @property
    def _epoch(self) -> int:
        return self._running()[0].progress.epoch

    def _running(self) -> list[Trainer]:
        return [trainer for trainer in self._trainers if trainer not in self._errors]

    def _each(self, act: Callable[[Trainer], None]) -> None:
        """Do something for every run that is still on its way; one that fails is left behind."""
        for trainer in self._running():
            try:
                act(trainer)
            except Exception as error:
                self._errors[trainer] = error

    def train_epoch(self) -> None:
        """The steps of an epoch, from where it stands."""
        epoch, steps = self._epoch, self._trainers[0].steps_per_epoch
        self._engine.begin_epoch(self._orders(epoch), self._running()[0].progress.batch)
        while self._running() and (batch := self._running()[0].progress.batch) < steps:
            made = self._engine.advance(batch, self._running()[0].progress.step, steps - batch)
            self._each(lambda trainer, made=made: trainer.advance(made))
            self._pause()
        if self._running() and epoch + 1 < self._trainers[0].options.epochs:
            # a device still has many of this epoch's steps to make
            self._ahead = epoch + 1, self._orders(epoch + 1)

    def _orders(self, epoch: int) -> Tensor:
        """The order of rows, (N,), or (K, N) for several runs."""
        if self._ahead is not None and self._ahead[0] == epoch:
            return self._ahead[1]
        orders = [trainer.row_order(epoch) for trainer in self._trainers]
        found = orders[0] if len(orders) == 1 else torch.stack(orders)
        return found.pin_memory() if self._trainers[0].device.type == "cuda" else found

    # ---- stopping ----

    def _pause(self) -> None:
        """Between two steps: save if it is time to, stop if asked to."""
        due = time.monotonic() - self._saved >= self._trainers[0].options.checkpoint_seconds
        stopping = self._signalled or any(trainer.told_to_stop for trainer in self._trainers)
        if due or stopping:
            self._each(lambda trainer: trainer.save())
            self._saved = time.monotonic()
        if stopping:
            self._errors |= {trainer: Interrupted() for trainer in self._running()}

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM ask the loop to stop after the step; a second Ctrl-C stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def request(signum: int, frame: Any) -> None:
            del frame
            if self._signalled and signum == signal.SIGINT:
                raise KeyboardInterrupt
            self._signalled = True

        old = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
