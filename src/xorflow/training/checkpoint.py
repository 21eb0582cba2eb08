"""The state of an unfinished run on disk: all that is needed to go on to the same weights, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xorflow.errors import CheckpointError
from xorflow.training.storage import load_tensors, read_json, save_tensors, write_json

CHECKPOINT_VERSION = 1


@dataclass
class Progress:
    """Where a run stands: `step` counts optimiser steps, `bound_sum` adds up the objective in an epoch, `seconds` train."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    bound_sum: float = 0.0
    best_nll: float | None = None
    best_epoch: int | None = None
    seconds: float = 0.0


@dataclass
class Snapshot:
    """Progress with the tensors that belong to it, by name."""

    progress: Progress
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def group(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix.`, without it."""
        return {
            n.removeprefix(f"{prefix}."): t for n, t in self.tensors.items() if n.startswith(f"{prefix}.")
        }


def save_snapshot(run: Path, snapshot: Snapshot) -> None:
    """Write into a new folder, point to it, then drop the one before: at every moment one is whole."""
    root = run / "checkpoints"
    folder = root / f"step-{snapshot.progress.step:09d}"
    if _pointed_to(root) == folder.name:  # the last step of an epoch is saved again when the epoch has ended
        folder = root / f"{folder.name}-again"
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed before it pointed here
    save_tensors(folder, "state", snapshot.tensors)
    pointer = {"version": CHECKPOINT_VERSION, "folder": folder.name, "progress": asdict(snapshot.progress)}
    write_json(root / "latest.json", pointer)
    for other in root.glob("step-*"):
        if other.name != folder.name:
            shutil.rmtree(other, ignore_errors=True)


def _pointed_to(root: Path) -> str | None:
    latest = root / "latest.json"
    return str(read_json(latest, "the checkpoint").get("folder")) if latest.exists() else None


def has_snapshot(run: Path) -> bool:
    """Whether a run has a checkpoint."""
    return (run / "checkpoints" / "latest.json").exists()


def load_snapshot(run: Path) -> Snapshot | None:
    """The last whole checkpoint of a run, or None if it has none yet."""
    latest = _latest(run)
    return None if latest is None else Snapshot(latest[0], load_tensors(latest[1], "state"))


def _latest(run: Path) -> tuple[Progress, Path] | None:
    """Where the last checkpoint stands, and its folder."""
    latest = run / "checkpoints" / "latest.json"
    if not has_snapshot(run):
        return None
    pointer = read_json(latest, "the checkpoint")
    if pointer.get("version") != CHECKPOINT_VERSION:
        raise CheckpointError(
            f"the checkpoint in {run} has version {pointer.get('version')!r}, and this xorflow reads "
            f"{CHECKPOINT_VERSION}; continue it with the version that wrote it, or train again elsewhere"
        )
    try:
        return Progress(**pointer["progress"]), latest.parent / str(pointer["folder"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint in {run} is damaged: {latest} lacks {error}; train again"
        ) from None


def drop_snapshots(run: Path) -> None:
    """A finished run needs no checkpoint: its weights are saved beside it."""
    shutil.rmtree(run / "checkpoints", ignore_errors=True)


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state, flat: `INDEX.KEY`."""
    state: Mapping[int, Mapping[str, Any]] = optimiser.state_dict()["state"]
    return {
        f"{i}.{key}": value
        for i, entry in state.items()
        for key, value in entry.items()
        if isinstance(value, Tensor)
    }


def restore_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimiser_tensors`."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
