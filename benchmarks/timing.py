"""Timing in ratios: the thing measured and its reference alternate in one run, so that a busy machine slows both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

_PER_SECOND = {"s": 1.0, "ms": 1e3}


@dataclass(frozen=True)
class Figure:
    """One number of a results file: a time beside that of a reference, measured in the same run.

    Attributes:
        id: names the figure.
        value: our time.
        unit: of `value` and of `reference_value`.
        reference: what else was timed.
        reference_value: its time.
        ratio: reference_value / value: larger is better.
        target: what to reach, in words: of the ratio, or of the value.
        met: whether it was; None without a target.
        ratio_needed: the ratio at which the target is met.
        note: what a reader must know to judge it.
    """

    id: str
    value: float
    unit: str
    reference: str
    reference_value: float
    ratio: float
    target: str | None = None
    met: bool | None = None
    ratio_needed: float | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        goal = "" if self.target is None else f"; target {self.target}: {'met' if self.met else 'NOT MET'}"
        return f"{self.id}: {self.value:.4g} {self.unit}, ratio {self.ratio:.3g} to {self.reference}{goal}"


def faster_than(
    id: str,
    ours: float,
    reference: str,
    theirs: float,
    *,
    at_least: float | None = None,
    unit: str = "ms",
    note: str = "",
) -> Figure:
    """A figure whose target, if it has one, bounds the ratio; `ours` and `theirs` are in seconds."""
    scale, ratio = _PER_SECOND[unit], theirs / ours
    figure = Figure(id, scale * ours, unit, reference, scale * theirs, ratio, note=note)
    if at_least is None:
        return figure
    return _with_target(figure, f"ratio >= {at_least:.3g}", ratio >= at_least, at_least)


def within(
    id: str,
    ours: float,
    reference: str,
    theirs: float,
    *,
    at_most: float,
    unit: str = "s",
    note: str = "",
    gigabytes: tuple[float, float] | None = None,
) -> Figure:
    """A figure whose target bounds the time itself; `ours` and `theirs` are in seconds, `at_most` in `unit`.

    `gigabytes` are those used, and the most that the target allows.
    """
    scale = _PER_SECOND[unit]
    figure = Figure(id, scale * ours, unit, reference, scale * theirs, theirs / ours, note=note)
    target, met = f"<= {at_most:g} {unit}", figure.value <= at_most
    if gigabytes is not None:
        used, allowed = gigabytes
        target, met = f"{target}, <= {allowed:g} GB", met and used <= allowed
    return _with_target(figure, target, met, figure.reference_value / at_most)


def _with_target(figure: Figure, target: str, met: bool, ratio_needed: float) -> Figure:
    return Figure(**figure.to_json() | {"target": target, "met": met, "ratio_needed": ratio_needed})


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(action: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock seconds of one call, the device's work included."""
    synchronise(device)
    began = time.perf_counter()
    action()
    synchronise(device)
    return time.perf_counter() - began


def alternate(
    actions: Mapping[str, Callable[[], Any]], device: torch.device, *, rounds: int, warm_up: int = 2
) -> dict[str, float]:
    """The median time of each action, in seconds, over rounds in which all take turns."""
    for action in actions.values():
        for _ in range(warm_up):
            action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            times[name].append(seconds(action, device))
    return {name: statistics.median(values) for name, values in times.items()}
