"""One run on several processes, as a person types it: equal to that of one, resumed with another number, killed, hanging."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from command_line import ROOT, SMALL, Command, Outcome, finish, start
from tiny_runs import DEEP, rows_file, tiny_options, train_run, weights_of

LONG = {"epochs": 150, "precision": "64-true", "batch_size": 33}
"""Of batches that two processes do not share evenly."""

PATIENCE = 10
"""Seconds."""

IMPATIENT = f"""
import datetime, sys
from xorflow import _distributed
from xorflow.cli import main
_distributed.PATIENCE = datetime.timedelta(seconds={PATIENCE})
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, which nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    options = tiny_options(rows_file(folder / "rows.npy"), checkpoint_seconds=1000, **DEEP | LONG)
    train_run(options, folder / "run")
    return folder / "run"


def begin(whole: Path, run: Path, **more: tuple[str, ...]) -> subprocess.Popen[str]:
    config = whole / "config.json"
    return start(
        *("train", "--config", config, "--out", run, "--set", "checkpoint_seconds=0", "--processes", "2"),
        **more,
    )


def wait_for_checkpoint(process: subprocess.Popen[str], run: Path) -> None:
    limit = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < limit:
        if (run / "checkpoints/latest.json").exists():
            return
        time.sleep(0.01)
    raise AssertionError(finish(process))


def other_process(process: subprocess.Popen[str]) -> int:
    """The one that makes the run with it."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    working = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(working[0])


def assert_close(run: Path, expected: Path) -> None:
    for name, tensor in weights_of(expected).items():
        torch.testing.assert_close(weights_of(run)[name], tensor, rtol=0, atol=1e-9)


def test_a_run_of_two_is_interrupted_and_goes_on_with_one(
    whole: Path, tmp_path: Path, xorflow: Command
) -> None:
    run = tmp_path / "run"
    process = begin(whole, run)
    wait_for_checkpoint(process, run)
    process.send_signal(signal.SIGINT)
    said = finish(process)
    assert (said.code, said.out) == (130, "")
    assert said.err == f"stopped and saved; continue with: xorflow train --out {run} --resume\n"
    assert xorflow("train", "--out", run, "--resume", "--set", "checkpoint_seconds=1000").code == 0
    assert_close(run, whole)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_killed_process_ends_the_run_and_two_others_go_on(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = begin(whole, run)
    wait_for_checkpoint(process, run)
    os.kill(other_process(process), signal.SIGKILL)
    killed = time.monotonic()
    said = finish(process)
    assert time.monotonic() - killed < 60
    assert "process 1 was ended by signal 9" in said.refused()
    process = start("train", "--out", run, "--resume", "--set", "checkpoint_seconds=1000", "--processes", "2")
    said = finish(process)
    assert (said.code, said.err) == (0, "")
    assert_close(run, whole)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_hanging_process_ends_the_run_after_a_time(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = begin(whole, run, program=(sys.executable, "-c", IMPATIENT))
    wait_for_checkpoint(process, run)
    other = other_process(process)
    os.kill(other, signal.SIGSTOP)
    said = finish(process)
    assert f"has not answered for {PATIENCE} seconds" in said.refused()
    assert not Path(f"/proc/{other}").exists()


# ---- torchrun ----


def ranks(*commands: tuple[str | Path, ...], port: int | None = None) -> list[Outcome]:
    """What processes say whose environment is that of torchrun."""
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(commands))}
    place |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "xorflow", "train", *map(str, command)],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for rank, command in enumerate(commands)
    ]  # fmt: skip
    return [finish(process) for process in processes]


def test_torchrun_makes_one_run_and_one_process_says_so(rows: Path, tmp_path: Path, xorflow: Command) -> None:
    given = ("--data", rows, *SMALL, "--set", "precision=64-true", "--batch-size", "33")
    first, second = ranks(*[(*given, "--out", tmp_path / "run")] * 2)
    assert (first.code, first.err) == (0, "")
    assert "Negative log-likelihood" in first.out
    assert second == Outcome(0, "", "")
    assert xorflow("train", *given, "--out", tmp_path / "alone").code == 0
    assert_close(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda folder: ("--seed", "1"), "process 1 and process 0 have different options"),
        (lambda folder: ("--data", folder / "nowhere.npy"), "process 1: "),
    ],
)
def test_processes_that_differ_are_refused(
    rows: Path, tmp_path: Path, change: Callable[[Path], tuple[str | Path, ...]], why: str
) -> None:
    given = ("--data", rows, *SMALL, "--out", tmp_path / "run")
    first, second = ranks(given, (*given, *change(tmp_path)))
    assert why in first.refused()
    assert second == Outcome(2, "", "")
    assert not (tmp_path / "run").exists()


def test_a_port_that_is_taken(rows: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        environment = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(taken.getsockname()[1]),
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            said = finish(start("train", "--data", rows, *SMALL))
    assert "is that port taken? choose another" in said.refused()


@pytest.mark.parametrize(
    ("given", "environment", "why"),
    [
        (("--processes", "0"), {}, "--processes is at least 1; got 0"),
        (("--processes", "2", "--seeds", "0-1"), {}, "set --jobs for several"),
        (
            ("--processes", "2"),
            {"RANK": "0", "WORLD_SIZE": "2"},
            "torchrun has begun the processes of this run",
        ),
        (("--seeds", "0-1"), {"RANK": "0", "WORLD_SIZE": "2"}, "set --jobs for several"),
        (
            ("--processes", "2", "--batch-size", "1"),
            {},
            "2 processes came for 1; begin fewer, or raise batch_size",
        ),
        (("--processes", "2", "--device", "cuda:0"), {}, "each has a GPU of its own"),
    ],
)
def test_what_is_refused(
    xorflow: Command,
    monkeypatch: pytest.MonkeyPatch,
    rows: Path,
    tmp_path: Path,
    given: tuple[str, ...],
    environment: dict[str, str],
    why: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "run"
    said = xorflow("train", "--data", rows, "--out", out, *SMALL, *given).refused()
    assert why in said
    assert not out.exists()
