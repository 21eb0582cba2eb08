"""Ctrl-C, SIGTERM and kill -9, at real processes; then --resume, to the weights of a run that was left in peace."""

import random
import signal
import time
from pathlib import Path
from subprocess import Popen

import pytest

from command_line import Command, finish, start
from tiny_runs import DEEP, assert_same_run, read, rows_file, tiny_options, train_run

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


def test_a_second_process_on_the_folder_of_a_run_harms_nothing(
    whole: Path, tmp_path: Path, xorflow: Command
) -> None:
    """It is told who is there; readers need no lock; the first saves and goes on to the same weights."""
    run = tmp_path / "run"
    process = begin(whole, run)
    wait_for_checkpoint(process, run)
    said = xorflow("train", "--out", run, "--resume").refused()
    assert f"one process at a time writes into a run's folder, and process {process.pid} has {run}" in said
    assert "is not finished" in xorflow("evaluate", run).refused()
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 130
    assert xorflow("train", "--out", run, "--resume", "--set", "checkpoint_seconds=1000").code == 0
    assert_same_run(run, whole)


def test_a_second_process_on_the_folder_of_several_runs_harms_nothing(
    whole: Path, tmp_path: Path, xorflow: Command
) -> None:
    out, config = tmp_path / "out", tmp_path / "table.toml"
    config.write_text('[[runs]]\nname = "only"\n', encoding="utf-8")
    data = read(whole / "config.json")
    given = {name: data[name] for name in ("data", "layers", "order", "average", "estimator", "conditioner")}
    settings = [part for name, value in given.items() for part in ("--set", f"{name}={value}")]
    command = (
        "train", "--config", config, *settings, "--epochs", "4000", "--device", "cpu", "--set",
        "checkpoint_seconds=0", "--seeds", "0,1", "--jobs", "2", "--out", out,
    )  # fmt: skip
    process = start(*command)
    wait_for_checkpoint(process, out / "only/seed-0")
    said = xorflow(*command, "--resume").refused()
    assert f"process {process.pid} has {out}" in said
    one = xorflow("train", "--out", out / "only/seed-0", "--resume").refused()
    assert "one process at a time" in one
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 130
    assert [row["error"] for row in read(out / "summary.json")["runs"]] == ["interrupted"] * 2
