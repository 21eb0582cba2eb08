"""Which way a layer is inverted: all give the same integers, and the quickest is found while sampling.

How long a way takes depends on the network, its weights, the batch and the device. So for each layer, size of batch and
reading the first calls try each way, and later ones take the quickest. A way that takes longer than another did is
given up on the spot: a trial that loses costs what the call would have taken. On a busy machine a good way may lose, and
weights change, so after 8, 16, 32, ... calls all are tried once more. No way draws anything, so that seeds mean the same under
each.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from xorflow.flows.layer import Layer


class Way(StrEnum):
    """In the order in which they are tried."""

    LAUNCH = "launch"  # all features in one launch of a kernel, on CUDA
    BLOCKS = "blocks"  # block by block of the ordering
    PASSES = "passes"  # whole passes of the network until nothing changes; the only one that every layer has


class GivenUp(Exception):
    """A way that takes longer than another did."""


class Absent(Exception):
    """A way that a layer does not have."""


_TRIALS = 2
"""The first may be cold."""

_PATIENCE = 4
"""The chosen way may take so many times what the next best took: a busy machine is no reason to begin anew."""

_AGAIN_AFTER = 8
"""Calls; and then after twice as many, and so on."""


class _Race:
    """What each way took; those that the layer does not have drop out. Several threads may run in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[Way, list[float]] = {way: [] for way in Way}
        self._calls = 0

    def begin(self) -> None:
        """One more call; now and then all ways are timed anew, the quickest so far first."""
        with self._lock:
            self._calls += 1
            due = self._calls >= _AGAIN_AFTER and self._calls.bit_count() == 1
            if due and self._next_trial() is None:
                self._times = {way: [] for way in sorted(self._times, key=self._time)}

    def turn(self) -> tuple[Way, float, bool]:
        """Which way to go, how many seconds it may take, and whether that is a trial."""
        with self._lock:
            way = self._next_trial()
            if way is not None:
                return way, self._least(), True
            way = min(self._times, key=self._time)
            return way, _PATIENCE * self._least(but=way), False

    def quickest(self) -> Way | None:
        """None while ways are still to be tried."""
        with self._lock:
            return None if self._next_trial() is not None else min(self._times, key=self._time)

    def took(self, way: Way, seconds: float) -> None:
        with self._lock:
            self._times.setdefault(way, []).append(seconds)

    def lost(self, way: Way, seconds: float) -> None:
        """It was given up after so many seconds, and would have taken longer."""
        with self._lock:
            self._times[way] = [seconds] * _TRIALS

    def drop(self, way: Way) -> None:
        """The layer does not have it."""
        with self._lock:
            self._times.pop(way, None)

    def restart(self, slow: Way) -> None:
        """Time all ways anew, one that has become slow last."""
        with self._lock:
            self._times = {way: [] for way in sorted(self._times, key=lambda way: way is slow)}

    def _next_trial(self) -> Way | None:
        return next((way for way, spent in self._times.items() if len(spent) < _TRIALS), None)

    def _time(self, way: Way) -> float:
        return min(self._times[way], default=math.inf)

    def _least(self, but: Way | None = None) -> float:
        return min((self._time(way) for way in self._times if way != but), default=math.inf)


_RACES: WeakKeyDictionary[Layer, dict[Hashable, _Race]] = WeakKeyDictionary()
_REGISTERING = threading.Lock()
_FORCED: ContextVar[Way | None] = ContextVar("forced", default=None)


@contextmanager
def only(way: Way | str) -> Iterator[None]:
    """Within this block layers are inverted this way, or by passes where they do not have it: for tests and benchmarks."""
    token = _FORCED.set(Way(way))
    try:
        yield
    finally:
        _FORCED.reset(token)


def chosen(layer: Layer) -> dict[Hashable, Way]:
    """For each size of batch, device, type and reading that has been tried through: the way."""
    quickest = {kind: race.quickest() for kind, race in _RACES.get(layer, {}).items()}
    return {kind: way for kind, way in quickest.items() if way is not None}


def by_the_quickest(layer: Layer, y: Tensor, reading: str, invert: Callable[[Way, float], Tensor]) -> Tensor:
    """What `invert` returns, whichever way is its turn.

    Args:
        layer: what is inverted.
        y: a batch of states.
        reading: whether choices are drawn or greedy.
        invert: goes one way until a time of `clock`, and then raises `GivenUp`; or `Absent` at once.
    """
    forced = _FORCED.get()
    if forced is not None:
        try:
            return invert(forced, math.inf)
        except Absent:
            return invert(Way.PASSES, math.inf)
    kind = (len(y).bit_length(), y.device, y.dtype, reading)
    with _REGISTERING:
        race = _RACES.setdefault(layer, {}).setdefault(kind, _Race())
    race.begin()
    while True:
        way, most, trial = race.turn()
        if trial:
            _wait(y.device)
        began = clock()
        try:
            x = invert(way, began + most)
        except Absent:
            race.drop(way)
        except GivenUp:
            if trial:
                race.lost(way, clock() - began)
            else:
                race.restart(way)
        else:
            if trial:
                _wait(y.device)
                race.took(way, clock() - began)
            return x


def clock() -> float:
    """Seconds."""
    return time.perf_counter()


def check(deadline: float) -> None:
    """Raise `GivenUp` after that time of `clock`."""
    if clock() > deadline:
        raise GivenUp


def _wait(device: torch.device) -> None:
    """For this thread's own work: waiting for all of a device would break what another thread captures."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
