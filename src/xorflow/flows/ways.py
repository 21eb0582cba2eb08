"""Which way a layer is inverted: all give the same integers, and the quickest is found while sampling.

How long a way takes depends on the network, its weights, the batch and the device. So for each layer, size of batch and
reading the first calls try the ways in turn, and later ones take the quickest. A way that takes longer than another did is
given up on the spot: one that loses costs, once, what the call would have taken. No way draws anything, so that seeds mean the
same under each.
"""

from __future__ import annotations

import math
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
    """A way that a layer does not have, or that takes longer than another did."""


_TRIALS = 2
"""The first may be cold."""

_PATIENCE = 2
"""The chosen way may take so many times what the next best took; weights that changed since make it be chosen anew."""

_Times = dict[Way, list[float]]

_TIMES: WeakKeyDictionary[Layer, dict[Hashable, _Times]] = WeakKeyDictionary()
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
    known = _TIMES.get(layer, {})
    return {kind: _quickest(times) for kind, times in known.items() if _in_turn(times) is None}


def by_the_quickest(layer: Layer, y: Tensor, reading: str, invert: Callable[[Way, float], Tensor]) -> Tensor:
    """What `invert` returns, whichever way is its turn.

    Args:
        layer: what is inverted.
        y: a batch of states.
        reading: whether choices are drawn or greedy.
        invert: goes one way until a time of `clock`, and then raises `GivenUp`.
    """
    forced = _FORCED.get()
    if forced is not None:
        try:
            return invert(forced, math.inf)
        except GivenUp:
            return invert(Way.PASSES, math.inf)
    kinds = _TIMES.setdefault(layer, {})
    kind = (len(y).bit_length(), y.device, y.dtype, reading)
    times = kinds.setdefault(kind, {way: [] for way in Way})
    while (way := _in_turn(times)) is not None:
        try:
            found, spent = _timed(lambda deadline, way=way: invert(way, deadline), y, _least(times))
        except GivenUp:
            times[way] = [math.inf] * _TRIALS
            continue
        times[way].append(spent)
        return found
    way = _quickest(times)
    others = _least({other: spent for other, spent in times.items() if other != way})
    try:
        return invert(way, clock() + _PATIENCE * others)
    except GivenUp:
        kinds.pop(kind, None)
        return by_the_quickest(layer, y, reading, invert)


def clock() -> float:
    """Seconds."""
    return time.perf_counter()


def check(deadline: float) -> None:
    """Raise `GivenUp` after that time of `clock`."""
    if clock() > deadline:
        raise GivenUp


def _in_turn(times: _Times) -> Way | None:
    """The way that is to be tried next, if any is."""
    return next((way for way, spent in times.items() if len(spent) < _TRIALS), None)


def _least(times: _Times) -> float:
    return min((seconds for spent in times.values() for seconds in spent), default=math.inf)


def _quickest(times: _Times) -> Way:
    return min(times, key=lambda way: min(times[way]))


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
