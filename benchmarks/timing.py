"""Timing in ratios: the thing measured and its reference alternate in one run, so that a busy machine slows both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Figure:
    """One number of a results file: `ratio` is reference / value for times, so that larger is better.

    `target` is a bound on the ratio if `of` is "ratio" and on the value otherwise.
    """

    id: str
    value: float
    unit: str
    reference: str
    reference_value: float | None
    ratio: float | None
    target: str | None
    met: bool | None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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


def at_least(ratio: float, bound: float) -> tuple[str, bool]:
    return f"ratio >= {bound:g}", ratio >= bound


def at_most(value: float, bound: float, unit: str) -> tuple[str, bool]:
    return f"<= {bound:g} {unit}", value <= bound
