"""Commands as processes: killed at any moment they go on to the same bits; full disks, rivals on a folder, strange streams."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attack.rule import contents, require
from attack.world import COUPLING, FINISHED, MIXTURE, TRANSFORMER, World
from command_line import XORFLOW, finish, start
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


_PATIENT_OF_STREAMS = 120

OUT = (
    "",
    "> /dev/full",
    ">&-",
    "| true",
    "| head -c 10",
    "> out.txt",
    "2> /dev/full",
    "2>&-",
    ">&- 2>&-",
    "< /dev/null",
    "<&-",
)
ENVIRONMENTS = (
    {},
    {"LC_ALL": "C"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONUNBUFFERED": "1"},
    {"COLUMNS": "1"},
    {"TERM": "dumb"},
)


def try_stream(world: World, chance: random.Random, folder: Path) -> str:
    """One command with a strange stream; returns what it was."""
    kind = chance.choice(FINISHED)
    run = shlex.quote(str(world.copy(kind, folder / "run")))
    rows = {"images": world.images}.get(
        kind, world.people if kind in ("table", "mixture", "combined") else world.rows
    )
    os.mkfifo(folder / "waits.csv")
    command = chance.choice(
        (
            f"evaluate {run} --samples 2",
            f"evaluate {run} --json --samples 2",
            f"sample {run} --json --count 3",
            f"sample {run} --out é🙂.csv",
            f"score {run} --data {rows} --samples 2",
            f"score {run} --data waits.csv",
            f"score {run} --data <(cat {rows})",
            f"train --data {rows} --epochs 1 --conditioner made:hidden=8 --out new",
            "train --config waits.csv",
            "recipes",
            "--help",
            "danse",
        )
    )
    stream, environment = chance.choice(OUT), chance.choice(ENVIRONMENTS)
    what = f"{kind}: xorflow {command} {stream} with {environment}"
    before = contents(folder)
    line = f'set -o pipefail; "$XORFLOW" {command} {stream}'
    process = subprocess.Popen(
        ("bash", "-c", line), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder,
        env=os.environ | {"XORFLOW": XORFLOW[0], "OMP_NUM_THREADS": "1"} | environment, start_new_session=True,
    )  # fmt: skip
    try:
        _, err = process.communicate(timeout=_PATIENT_OF_STREAMS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        require(False, "hang", what)
        raise
    said = err.decode(errors="replace")
    require(process.returncode in (0, 2), "code", f"{process.returncode} of {what}: {said[-300:]}")
    require("Traceback" not in said and "Error in" not in said, "traceback", f"{what}: {said[-500:]}")
    if process.returncode == 2 and "2>" not in stream and ">&- 2" not in stream:
        require(said.startswith("error: ") and said.count("\n") == 1, "message", f"{what}: {said[:500]}")
    after = contents(folder)
    require(all(after.get(name) == digest for name, digest in before.items()), "changed", what)
    left = [name for name in after if name.endswith((".tmp", "/.lock"))]
    require(not left, "made", f"{left} of {what}")
    return what


def try_streams(world: World, chance: random.Random, number: int) -> str:
    folder = world.scratch / f"stream-{number}"
    folder.mkdir()
    try:
        return try_stream(world, chance, folder)
    finally:
        shutil.rmtree(folder)
