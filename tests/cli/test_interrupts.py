"""Ctrl-C, SIGTERM and kill -9, at real processes; then --resume, to the weights of a run that was left in peace."""

import random
import signal
import time
from pathlib import Path
from subprocess import Popen

import pytest

from command_line import Command, finish, start
from tiny_runs import DEEP, assert_same_run, rows_file, tiny_options, train_run

KILLS = 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two layers with noise, averaging and a checkpoint after every step, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    options = tiny_options(rows_file(folder / "rows.npy"), epochs=120, checkpoint_seconds=1000, **DEEP)
    train_run(options, folder / "run")
    return folder / "run"


def begin(whole: Path, run: Path) -> Popen[str]:
    return start("train", "--config", whole / "config.json", "--out", run, "--set", "checkpoint_seconds=0")


def wait_for_checkpoint(process: Popen[str], run: Path) -> None:
    """Until a checkpoint is written by this process, or it has ended."""
    latest, limit = run / "checkpoints/latest.json", time.monotonic() + 60
    before = latest.stat().st_mtime_ns if latest.exists() else None
    while process.poll() is None and time.monotonic() < limit:
        try:
            if latest.stat().st_mtime_ns != before:
                return
        except FileNotFoundError:
            pass
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_saves_and_says_how_to_go_on(
    whole: Path, tmp_path: Path, xorflow: Command, number: signal.Signals
) -> None:
    run = tmp_path / "a run"  # the command to type must quote this
    process = begin(whole, run)
    wait_for_checkpoint(process, run)
    process.send_signal(number)
    said = finish(process)
    assert said.code == 130
    assert said.out == ""
    assert said.err == f"stopped and saved; continue with: xorflow train --out '{run}' --resume\n"
    assert not (run / "result.json").exists()
    assert xorflow("train", "--out", run, "--resume", "--set", "checkpoint_seconds=1000").code == 0
    assert_same_run(run, whole)


def test_killed_at_random_moments(whole: Path, tmp_path: Path, xorflow: Command) -> None:
    chance, run = random.Random(0), tmp_path / "run"
    process, killed = begin(whole, run), 0
    for _ in range(KILLS):
        wait_for_checkpoint(process, run)
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        killed += finish(process).code == -signal.SIGKILL
        process = start("train", "--out", run, "--resume", "--set", "checkpoint_seconds=0")
    last = finish(process)
    assert (last.code, last.err) == (0, "")
    assert killed >= 2
    assert_same_run(run, whole)
    assert {path.name for path in run.iterdir()} == {
        "config.json", "weights.index.json", "weights.safetensors", "metrics.jsonl", "result.json", "samples.npy"
    }  # fmt: skip
    assert xorflow("evaluate", run).code == 0
