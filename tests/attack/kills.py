"""Kill and resume: whatever ends a run, and whenever, it goes on to the same bits. Full disks; two processes on one folder."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attack.rule import require
from attack.world import COUPLING, MIXTURE, TRANSFORMER, World
from command_line import finish, start
from tiny_runs import DEEP, assert_same_run, rows_file, tiny_options, train_run

MODELS: dict[str, Mapping[str, Any]] = {
    "table": {"average": 0.9},
    "deep": DEEP,
    "transformer": TRANSFORMER | {"optimiser": "muon"},
    "mixture": MIXTURE,
    "coupling": COUPLING,
}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_PATIENT = 600
"""Seconds, of a machine that is busy."""

_EPOCHS = 40
"""So that a run takes a second or two once it has begun, and most kills find it in training."""


class Kills:
    """Runs that are killed over and over, beside the same ones that were left in peace."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world, self.chance = world, chance
        self.tried = self.identical = self.runs = self.full = 0
        self.landed: dict[str, int] = dict.fromkeys((number.name for number in SIGNALS), 0)

    def whole(self, name: str) -> Path:
        """The run of a model that nobody killed."""
        folder = self.world.root / "whole" / name
        if not folder.exists():
            data = rows_file(self.world.root / f"rows-of-{name}.npy", rows=200)
            options = tiny_options(data, epochs=_EPOCHS, checkpoint_seconds=1000, **MODELS[name])
            train_run(options, folder)
        return folder

    def try_one(self, name: str, kills: int) -> None:
        """A run that is killed so often, at random moments, and then left to end: the same bits."""
        whole, run = self.whole(name), self.world.scratch / f"{name}-{self.chance.randrange(2**32)}"
        begin = ("train", "--config", whole / "config.json", "--out", run, "--set", "checkpoint_seconds=0")
        resume = ("train", "--out", run, "--resume", "--set", "checkpoint_seconds=0")
        process = start(*begin)
        for _ in range(kills):
            number = self.chance.choice(SIGNALS)
            _wait_until_begun(process, run)
            time.sleep(self.chance.uniform(0, 0.6))
            process.send_signal(number)
            ended = finish(process, _PATIENT)
            self.landed[number.name] += ended.code != 0
            polite = ended.code in (
                130,
                0,
                -number,
            )  # a signal before Python has its handlers ends it as any program
            require(polite and "Traceback" not in ended.err, "kill", f"{number.name}: {ended}")
            self.tried += 1
            process = start(*(resume if (run / "config.json").exists() else begin))
        last = finish(process, _PATIENT)
        require(last.code == 0 and last.err == "", "kill", f"the last one: {last}")
        assert_same_run(run, whole)
        self.identical += kills
        self.runs += 1
        shutil.rmtree(run)

    def try_two(self, name: str) -> None:
        """A second process on the folder of a run that is going on: refused, and the first one ends with the same bits."""
        whole, run = self.whole(name), self.world.scratch / f"two-{name}"
        begin = ("train", "--config", whole / "config.json", "--out", run, "--set", "checkpoint_seconds=0")
        first = start(*begin)
        _wait_until_begun(first, run)
        second = start("train", "--out", run, "--resume", "--set", "checkpoint_seconds=0")
        both = [finish(first, _PATIENT), finish(second, _PATIENT)]
        require(both[0].code == 0, "two", f"the first: {both[0]}")
        # the second begins when the first has just ended, at times, and then it shows the result
        require(
            both[1].code == 0 or "one process at a time" in both[1].refused(), "two", f"the second: {both[1]}"
        )
        assert_same_run(run, whole)
        shutil.rmtree(run)

    def try_full_disk(self, name: str, disk: Path) -> None:
        """A disk that is full at a random moment: one line, and with room again the run goes on to the same bits."""
        whole, run = self.whole(name), disk / "run"
        begin = ("train", "--config", whole / "config.json", "--out", run, "--set", "checkpoint_seconds=0")
        ballast = disk / "ballast"
        process = start(*begin)
        _wait_until_begun(process, run)
        time.sleep(self.chance.uniform(0, 0.5))
        with suppress(OSError), ballast.open("wb", buffering=0) as stream:
            while stream.write(bytes(512)):
                pass
        ended = finish(process, _PATIENT)
        ballast.unlink()
        if ended.code != 0:
            self.full += 1
            said = ended.refused()
            require("No space left on device" in said, "full disk", said)
        again = ("train", "--out", run, "--resume") if (run / "config.json").exists() else begin
        ended = finish(start(*again), _PATIENT)
        require(ended.code == 0, "full disk", f"with room again: {ended}")
        assert_same_run(run, whole)
        left = [path.name for path in run.rglob("*.tmp")]
        require(not left, "full disk", f"left over: {left}")
        shutil.rmtree(run)


def _wait_until_begun(process: subprocess.Popen[str], run: Path) -> None:
    """Until this process has written something into the folder of its run, or has ended: the start of Python takes longest."""
    before = _stamp(run)
    limit = time.monotonic() + 120
    while process.poll() is None and _stamp(run) == before and time.monotonic() < limit:
        time.sleep(0.005)


def _stamp(run: Path) -> object:
    stamps = []
    for path in (run / ".lock", run / "config.json", run / "checkpoints/latest.json"):
        with suppress(OSError):
            stamps.append(path.stat().st_mtime_ns)
    return stamps


@contextmanager
def small_disk(folder: Path, size: int = 2**20) -> Iterator[Path | None]:
    """A file system of its own, of so many bytes; None where that is not allowed."""
    folder.mkdir(parents=True)
    try:
        mount = ("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
        made = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        made = False
    try:
        yield folder if made else None
    finally:
        if made:
            subprocess.run(("umount", folder), check=True)
