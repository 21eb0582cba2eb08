"""Which way a layer is inverted: all give the same integers, and the quickest is found while sampling.

How long a way takes depends on the network, its weights, the batch and the device. So for each layer, size of batch and
reading the first calls try the ways in turn, and later ones take the quickest. A way that takes longer than another did is
given up on the spot: a trial that loses costs what the call would have taken. On a busy machine a good way may lose, so after
8, 16, 32, ... calls the losers are tried once more. No way draws anything, so that seeds mean the same under each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
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

_PATIENCE = 2
"""The chosen way may take so many times what the next best took; weights that changed since make it be chosen anew."""

_AGAIN_AFTER = 8
"""Calls; and then after twice as many, and so on."""

_Times = dict[Way, list[float]]


@dataclass
class _Race:
    """The seconds that each way took; a way that the layer does not have drops out."""

    times: _Times = field(default_factory=lambda: {way: [] for way in Way})
    calls: int = 0

    def next_trial(self) -> Way | None:
        return next((way for way, spent in self.times.items() if len(spent) < _TRIALS), None)

    def least(self, but: Way | None = None) -> float:
        others = (spent for way, spent in self.times.items() if way != but)
        return min((seconds for spent in others for seconds in spent), default=math.inf)

    def quickest(self) -> Way:
        return min(self.times, key=lambda way: min(self.times[way]))

    def count(self) -> None:
        """One more call; now and then the losers get another chance."""
        self.calls += 1
        due = self.calls >= _AGAIN_AFTER and self.calls.bit_count() == 1
        if due and self.next_trial() is None:
            best = self.quickest()
            self.times = {way: spent if way is best else [] for way, spent in self.times.items()}


_RACES: WeakKeyDictionary[Layer, dict[Hashable, _Race]] = WeakKeyDictionary()
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
    known = _RACES.get(layer, {})
    return {kind: race.quickest() for kind, race in known.items() if race.next_trial() is None}


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
    races = _RACES.setdefault(layer, {})
    kind = (len(y).bit_length(), y.device, y.dtype, reading)
    race = races.setdefault(kind, _Race())
    race.count()
    while (way := race.next_trial()) is not None:
        try:
            found, spent = _timed(lambda deadline, way=way: invert(way, deadline), y, race.least())
        except Absent:
            del race.times[way]
        except GivenUp:
            race.times[way] = [math.inf] * _TRIALS
        else:
            race.times[way].append(spent)
            return found
    way = race.quickest()
    try:
        return invert(way, clock() + _PATIENCE * race.least(but=way))
    except GivenUp:
        races.pop(kind, None)
        return by_the_quickest(layer, y, reading, invert)


def clock() -> float:
    """Seconds."""
    return time.perf_counter()


def check(deadline: float) -> None:
    """Raise `GivenUp` after that time of `clock`."""
    if clock() > deadline:
        raise GivenUp


def _timed(act: Callable[[float], Tensor], y: Tensor, most: float) -> tuple[Tensor, float]:
    """What `act` returns within `most` seconds, and the seconds, the device's work included."""
    _synchronise(y.device)
    began = clock()
    found = act(began + most)
    _synchronise(y.device)
    return found, clock() - began


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
