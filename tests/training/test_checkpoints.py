"""Snapshots: one whole checkpoint at every moment, whatever happens while the next one is written."""

import errno
import os
from pathlib import Path

import pytest
import torch

from tiny_runs import DEEP, StopAt, assert_same_run, continue_run, rows_file, tiny_options, train_run
from xorflow.errors import CheckpointError
from xorflow.training import Interrupted, Progress, checkpoint
from xorflow.training.checkpoint import (
    Snapshot,
    load_snapshot,
    optimiser_tensors,
    restore_optimiser,
    save_snapshot,
)


def snapshot(step: int, value: float) -> Snapshot:
    return Snapshot(
        Progress(step=step, best_nll=1.5), {"flow.w": torch.full((3,), value), "best.w": torch.zeros(2)}
    )


def value_of(run: Path) -> float:
    found = load_snapshot(run)
    assert found is not None
    return float(found.tensors["flow.w"][0])


def test_round_trip(tmp_path: Path) -> None:
    assert load_snapshot(tmp_path) is None
    save_snapshot(tmp_path, snapshot(3, 1.0))
    found = load_snapshot(tmp_path)
    assert found is not None
    assert found.progress == Progress(step=3, best_nll=1.5)
    assert torch.equal(found.take("flow")["w"], torch.ones(3))
    assert list(found.take("best")) == ["w"]
    assert found.tensors == {}


def test_only_the_latest_is_kept(tmp_path: Path) -> None:
    for step in range(4):
        save_snapshot(tmp_path, snapshot(step, step))
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 1
    assert value_of(tmp_path) == 3.0


@pytest.mark.parametrize("steps", [(4, 5), (4, 4), (4, 4, 4)], ids=str)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_the_one_before_survives_a_failure_at_any_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...], call: str
) -> None:
    """Also where both are of the same step: the last of an epoch is saved before and after validation."""
    original = getattr(os, call)
    for index, step in enumerate(steps[:-1]):
        save_snapshot(tmp_path, snapshot(step, index))
    for allowed in range(2):  # a snapshot is two files: the tensors, and the pointer to them
        calls = iter(range(100))

        def full(*arguments: object, allowed: int = allowed, calls: object = calls) -> object:
            if next(calls) >= allowed:  # pyright: ignore[reportArgumentType, reportCallIssue]
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*arguments)

        monkeypatch.setattr(os, call, full)
        with pytest.raises(CheckpointError, match="No space left"):
            save_snapshot(tmp_path, snapshot(steps[-1], 99.0))
        assert value_of(tmp_path) == len(steps) - 2
    monkeypatch.setattr(os, call, original)
    save_snapshot(tmp_path, snapshot(steps[-1], 99.0))
    assert value_of(tmp_path) == 99.0


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_the_state_of_an_optimiser_comes_back(kind: type[torch.optim.Optimizer]) -> None:
    def make() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        weight = torch.nn.Parameter(torch.ones(4))
        return weight, kind([weight], lr=0.1)  # pyright: ignore[reportCallIssue]

    def step(weight: torch.nn.Parameter, optimiser: torch.optim.Optimizer) -> None:
        weight.grad = weight.detach() ** 2
        optimiser.step()

    weight, optimiser = make()
    step(weight, optimiser)
    other, restored = make()
    other.data.copy_(weight.data)
    restore_optimiser(restored, {name: t.clone() for name, t in optimiser_tensors(optimiser).items()})
    step(weight, optimiser)
    step(other, restored)
    assert torch.equal(weight, other)


def test_a_disk_that_fills_while_training_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to do; once there is room, the run goes on to the same weights."""
    options = tiny_options(rows_file(tmp_path / "rows.npy"), checkpoint_seconds=0, **DEEP)
    train_run(options, tmp_path / "whole")
    original, calls = os.fsync, iter(range(1000))

    def full(descriptor: int) -> None:
        if next(calls) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"No space left on device; .*untouched.* continue with --resume"
    ):
        train_run(options, tmp_path / "run")
    monkeypatch.setattr(os, "fsync", original)
    kept = load_snapshot(tmp_path / "run")
    assert kept is not None
    assert 0 < kept.progress.step < 10
    continue_run(tmp_path / "run", {})
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_large_run_is_checkpointed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PART_BYTES", 600)
    options = tiny_options(rows_file(tmp_path / "rows.npy"), **DEEP)
    train_run(options, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_run(options, tmp_path / "run", StopAt({6}))
    assert len(list((tmp_path / "run/checkpoints").rglob("state.safetensors.*"))) > 5
    continue_run(tmp_path / "run", {})
    parts = sorted(path.name for path in (tmp_path / "whole").glob("weights.safetensors.*"))
    assert parts
    for name in parts:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
