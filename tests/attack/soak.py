"""A soak: train, resume, evaluate, sample and score in one process for long; memory, file descriptors and threads stay."""

from __future__ import annotations

import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import xorflow as xf
from attack.processes import MODELS
from attack.rule import require
from attack.world import World
from tiny_runs import StopAt, continue_run, tiny_options, train_run
from xorflow import evaluate
from xorflow.training import Interrupted, open_run


@dataclass(frozen=True)
class Reading:
    """What a process has at a time."""

    seconds: float
    megabytes: float
    descriptors: int
    threads: int


def soak(world: World, minutes: float, rounds: int = 0) -> list[Reading]:
    """Go round for so many minutes, and so often at least; what was read after each round."""
    began, readings = time.monotonic(), []
    names = [*MODELS]
    while time.monotonic() < began + 60 * minutes or len(readings) < rounds:
        _go_round(world, names[len(readings) % len(names)])
        readings.append(_read(time.monotonic() - began))
    return readings


def _go_round(world: World, name: str) -> None:
    run = world.scratch / "soak"
    options = tiny_options(world.rows, epochs=4, checkpoint_seconds=0, **MODELS[name])
    try:
        train_run(options, run, StopAt({3}))
    except Interrupted:
        continue_run(run, {})
    opened = open_run(run)
    evaluate.greedy(opened.flow, opened.data().train)
    x = opened.flow().sample((50,))
    xf.data.write_rows(run / "rows.npy", x, opened.schema)
    rows = xf.data.load_rows(run / "rows.npy", categories=opened.flow.states.sizes, schema=opened.schema)
    if opened.flow.has_closed_form:
        evaluate.exact(opened.flow, rows)
    else:
        evaluate.importance(opened.latent, rows, samples=8)
    shutil.rmtree(run)


def _read(seconds: float) -> Reading:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    # of its own: pages of files that are mapped come and go as other processes need memory
    megabytes = int(status.partition("RssAnon:")[2].split()[0]) / 1024
    native = len(os.listdir("/proc/self/task"))
    return Reading(
        seconds, megabytes, len(os.listdir("/proc/self/fd")), max(native, threading.active_count())
    )


def slope(readings: list[Reading]) -> float:
    """Megabytes a minute, by least squares."""
    minutes = np.array([reading.seconds / 60 for reading in readings])
    return float(np.polyfit(minutes, [reading.megabytes for reading in readings], 1)[0])


def require_flat(readings: list[Reading], warm_up: float = 60.0, most: float = 1.0) -> str:
    """After so many seconds: less than `most` megabytes a minute, and descriptors and threads as they were."""
    later = [reading for reading in readings if reading.seconds >= warm_up]
    require(len(later) >= 10, "soak", f"only {len(later)} rounds after the warm-up")
    rise = slope(later)
    descriptors, threads = ({getattr(r, name) for r in later} for name in ("descriptors", "threads"))
    said = (
        f"{len(readings):,} rounds in {readings[-1].seconds / 60:.1f} minutes: {later[0].megabytes:.0f} MB after "
        f"{later[0].seconds:.0f} s, {later[-1].megabytes:.0f} MB at the end, {rise:+.3f} MB a minute; "
        f"descriptors {sorted(descriptors)}, threads {sorted(threads)}"
    )
    require(rise < most, "soak", said)
    require(len(descriptors) == len(threads) == 1, "soak", said)
    return said
