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
    """Where a run stands. `step` counts optimiser steps; `bound_sum` adds up the current epoch's objective."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    bound_sum: float = 0.0
    best_nll: float | None = None
    best_epoch: int | None = None
    seconds: float = 0.0
    finished: bool = False


@dataclass
class Snapshot:
    """Progress with the tensors that belong to it, by name."""

    progress: Progress
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def group(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix.`, without it."""
        return {n.removeprefix(f"{prefix}."): t for n, t in self.tensors.items() if n.startswith(f"{prefix}.")}


def save_snapshot(run: Path, snapshot: Snapshot) -> None:
    """Write into a new folder, then point to it, then drop the one before: a whole checkpoint exists at every moment."""
    root = run / "checkpoints"
    folder = root / f"step-{snapshot.progress.step:09d}"
    if folder.exists():  # left by a run that was killed before it pointed here
        shutil.rmtree(folder)
    save_tensors(folder, "state", snapshot.tensors)
    pointer = {"version": CHECKPOINT_VERSION, "folder": folder.name, "progress": asdict(snapshot.progress)}
    write_json(root / "latest.json", pointer)
    for other in root.glob("step-*"):
        if other.name != folder.name:
            shutil.rmtree(other, ignore_errors=True)


def load_snapshot(run: Path) -> Snapshot | None:
    """The last whole checkpoint of a run, or None if it has none yet."""
    latest = run / "checkpoints" / "latest.json"
    if not latest.exists():
        return None
    pointer = read_json(latest, "the checkpoint")
    if pointer.get("version") != CHECKPOINT_VERSION:
        raise CheckpointError(
            f"the checkpoint in {run} has version {pointer.get('version')!r}, and this xorflow reads {CHECKPOINT_VERSION}; "
            "continue it with the version that wrote it, or train again into another folder"
        )
    try:
        progress = Progress(**pointer["progress"])
        folder = latest.parent / str(pointer["folder"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint in {run} is damaged: {latest} lacks {error}; train again") from None
    return Snapshot(progress, load_tensors(folder, "state"))


def drop_snapshots(run: Path) -> None:
    """A finished run needs no checkpoint: its weights are saved beside it."""
    shutil.rmtree(run / "checkpoints", ignore_errors=True)


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state, flat: `INDEX.KEY`."""
    state: Mapping[int, Mapping[str, Any]] = optimiser.state_dict()["state"]
    return {f"{i}.{key}": value for i, entry in state.items() for key, value in entry.items() if isinstance(value, Tensor)}


def restore_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimiser_tensors`."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
