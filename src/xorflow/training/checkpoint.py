"""The state of an unfinished run on disk: all that is needed to go on to the same weights, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from xorflow._files import inside, read_json, write_json
from xorflow.errors import CheckpointError
from xorflow.training.storage import load_tensors, save_tensors

CHECKPOINT_VERSION = 2


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


def require_fits(
    snapshot: Snapshot, trained: Mapping[str, Mapping[str, Tensor]], optimiser: torch.optim.Optimizer
) -> None:
    """Refuse the tensors of a checkpoint of another model; `trained` has those that are to be replaced, by group."""
    for group, expected in trained.items():
        found = snapshot.group(group)
        if group == "best" and not found:
            continue
        wrong = found.keys() ^ expected.keys() or {
            name
            for name, tensor in expected.items()
            if (found[name].shape, found[name].dtype) != (tensor.shape, tensor.dtype)
        }
        if wrong:
            raise CheckpointError(
                f"the checkpoint is not of this model: its {group} has another {min(wrong)!r}; begin anew with another --out"
            )
    parameters = {
        str(i): p for i, p in enumerate(p for group in optimiser.param_groups for p in group["params"])
    }
    for name, tensor in snapshot.group("optimiser").items():
        parameter = parameters.get(name.partition(".")[0])
        if parameter is None or tensor.shape not in (parameter.shape, torch.Size([])):
            raise CheckpointError(
                f"the checkpoint is not of this model: its optimiser has another {name!r}; begin anew with another --out"
            )


def save_snapshot(run: Path, snapshot: Snapshot) -> None:
    """Write into a new folder, point to it, then drop the one before: at every moment one is whole."""
    root = run / "checkpoints"
    folder = root / f"step-{snapshot.progress.step:09d}"
    latest = _latest(run)
    if latest is not None and latest[1].name == folder.name:
        folder = (
            root / f"{folder.name}-again"
        )  # the last step of an epoch is saved once more when the epoch has ended
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed before it pointed here
    save_tensors(folder, "state", snapshot.tensors)
    pointer = {"version": CHECKPOINT_VERSION, "folder": folder.name, "progress": asdict(snapshot.progress)}
    write_json(root / "latest.json", pointer)
    for other in root.glob("step-*"):
        if other.name != folder.name:
            shutil.rmtree(other, ignore_errors=True)


def has_snapshot(run: Path) -> bool:
    """Whether a run has a checkpoint."""
    return (run / "checkpoints" / "latest.json").exists()


def load_snapshot(run: Path) -> Snapshot | None:
    """The last whole checkpoint of a run, or None if it has none yet."""
    latest = _latest(run)
    return None if latest is None else Snapshot(latest[0], load_tensors(latest[1], "state"))


def _latest(run: Path) -> tuple[Progress, Path] | None:
    """Where the last checkpoint stands, and its folder."""
    if not has_snapshot(run):
        return None
    root = inside(run, "checkpoints")
    pointer = read_json(inside(root, "latest.json"), "the checkpoint")
    if pointer.get("version") != CHECKPOINT_VERSION:
        raise CheckpointError(
            f"the checkpoint in {run} has version {pointer.get('version')!r}, and this xorflow reads "
            f"{CHECKPOINT_VERSION}; continue it with the version that wrote it, or train again elsewhere"
        )
    kept = pointer.get("progress")
    if not isinstance(kept, dict) or kept.keys() != _KINDS.keys() or not _fit(kept):
        raise CheckpointError(
            f"the checkpoint in {run} is damaged: the progress in {root / 'latest.json'} is {kept!r}; train again"
        )
    return Progress(**kept), inside(root, pointer.get("folder"))


_KINDS = {one.name: get_type_hints(Progress)[one.name] for one in fields(Progress)}


def _fit(kept: Mapping[str, Any]) -> bool:
    """Whether the values of a progress are of their types, and none is negative that counts."""
    counts = [value for value in kept.values() if type(value) is int]
    of_type = all(
        type(value) is not bool
        and isinstance(value, _KINDS[name] | int if _KINDS[name] is float else _KINDS[name])
        for name, value in kept.items()
    )
    return of_type and all(0 <= count < 2**48 for count in counts)


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
