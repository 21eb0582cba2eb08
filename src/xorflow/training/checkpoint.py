"""Tensors of a run on disk, and the state of one that is unfinished: all that is needed to go on, bit for bit.

Tensors are a safetensors file, cut into parts below 16 MiB if it is larger; nothing here executes what it reads.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from xorflow._files import inside, read_bytes, read_json, write_bytes, write_json
from xorflow.errors import CheckpointError
from xorflow.training.registry import accepted_record

PART_BYTES = 15 * 2**20
"""The most bytes of a file of tensors."""

# ---- tensors ----


def save_tensors(folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
    """Write `stem.safetensors`, or its parts `stem.safetensors.00001` and so on, and last `stem.index.json` with their digests.

    A tensor that has several names, as those of a part used twice do, is written once, and the index says under which.
    """
    again = _other_names(tensors)
    # cloned, because safetensors refuses tensors that share memory, as views of one do
    distinct = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
        if name not in again
    }
    content = memoryview(tensors_to_bytes(distinct))
    digests: dict[str, str] = {}
    for number, first in enumerate(range(0, len(content), PART_BYTES), 1):
        part = content[first : first + PART_BYTES]
        name = f"{stem}.safetensors" + (f".{number:05d}" if len(part) < len(content) else "")
        write_bytes(folder / name, part)
        digests[name] = hashlib.sha256(part).hexdigest()
    write_json(_index(folder, stem), {"sha256": digests, "same": again})


def has_tensors(folder: Path, stem: str) -> bool:
    """Whether `save_tensors` has written all of these."""
    return os.path.lexists(_index(folder, stem))


def load_tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote, if it is that bit for bit, under all names.

    Raises:
        CheckpointError: if anything is missing or was changed.
    """
    index = _index(folder, stem)
    if not has_tensors(folder, stem):
        raise _missing(index)
    content = read_json(inside(folder, index.name), "the index of the weights")
    digests, again = content.get("sha256"), content.get("same")
    if not isinstance(digests, dict) or not isinstance(again, dict):
        raise _damaged(index, "is no index of weights")
    parts: dict[tuple[int, int], bytes] = {}
    for name, digest in digests.items():
        path = inside(folder, name)
        if not name.startswith(f"{stem}.safetensors"):
            raise _damaged(index, f"names a file of other tensors, {name!r}")
        part, state = _read_part(path, digest), os.stat(path)
        if (state.st_dev, state.st_ino) in parts:  # links to one file would take the memory of many
            raise _damaged(index, f"names one file twice, as {name}")
        parts[state.st_dev, state.st_ino] = part
    try:
        tensors = load_tensors_from_bytes(b"".join(parts.values()))
    except (SafetensorError, ValueError) as error:
        raise _damaged(index, f"names files that are no whole safetensors file ({error})") from None
    for first in again.values():
        if not isinstance(first, str) or first not in tensors:
            raise _damaged(index, f"names tensors that are not there ({first!r})")
    return tensors | {name: tensors[first] for name, first in again.items()}


def require_fit(read: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Refuse tensors of other names, shapes or types than those that they are to replace."""
    for name in sorted(read.keys() | expected.keys()):
        came, wanted = _kind(read.get(name)), _kind(expected.get(name))
        if came != wanted:
            raise CheckpointError(
                f"{what} are not those of its configuration: {name} is {came}, and the model has {wanted}; restore the folder, "
                "or begin anew with another --out"
            )


def read_weights(run: Path, stem: str = "weights") -> dict[str, Tensor]:
    """The weights in the folder of a run, as they were written there."""
    weights = load_tensors(run, stem)
    for name, tensor in weights.items():
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"weights are finite numbers, and {name} in {run} has others; restore the folder, or train again"
            )
    return weights


def install(flow: nn.Module, weights: Mapping[str, Tensor], where: Path) -> None:
    """Put weights into a flow, which takes over their type."""
    if any(tensor.dtype == torch.float64 for tensor in weights.values()):
        flow.double()
    require_fit(weights, flow.state_dict(), f"the weights in {where}")
    flow.load_state_dict(dict(weights))


def _index(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.index.json"


def _other_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name but the first of a tensor that has several, its first one."""
    first: dict[tuple[Any, ...], str] = {}
    others: dict[str, str] = {}
    for name, t in tensors.items():
        # an empty tensor lies nowhere
        place = (name,) if t.numel() == 0 else (t.device, t.data_ptr(), t.dtype, t.shape, t.stride())
        if first.setdefault(place, name) != name:
            others[name] = first[place]
    return others


def _read_part(path: Path, digest: object) -> bytes:
    try:
        content = read_bytes(path, PART_BYTES)
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        raise CheckpointError(f"weights cannot be read: {path}: {error.strerror}; restore it") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise _damaged(path, "is not the file that was written: its SHA-256 is another")
    return content


def _kind(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _missing(path: Path) -> CheckpointError:
    return CheckpointError(
        f"weights are missing: no file {path}; is the run complete? continue it with --resume"
    )


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"weights are damaged: {path} {why}; restore it or train again")


# ---- checkpoints ----

CHECKPOINT_VERSION = 3


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

    def take(self, prefix: str) -> dict[str, Tensor]:
        """Take out the tensors whose names begin with `prefix.`; without it."""
        names = [name for name in self.tensors if name.startswith(f"{prefix}.")]
        return {name.removeprefix(f"{prefix}."): self.tensors.pop(name) for name in names}


def named(prefix: str, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Tensors with `prefix.` before their names; None has none."""
    return {f"{prefix}.{name}": tensor for name, tensor in (tensors or {}).items()}


def save_snapshot(run: Path, snapshot: Snapshot) -> None:
    """Write into a new folder, point to it, then drop the one before: at every moment one is whole."""
    root = run / "checkpoints"
    name = f"step-{snapshot.progress.step:09d}"
    latest = _latest(run)
    if latest is not None and latest[1].name == name:
        name += "-again"  # the last step of an epoch is saved once more when the epoch has ended
    shutil.rmtree(root / name, ignore_errors=True)  # left by a run that was killed before it pointed here
    save_tensors(root / name, "state", snapshot.tensors)
    pointer = {"version": CHECKPOINT_VERSION, "folder": name, "progress": asdict(snapshot.progress)}
    write_json(root / "latest.json", pointer)
    for other in root.glob("step-*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)


def has_snapshot(run: Path) -> bool:
    """Whether a run has a checkpoint."""
    return os.path.exists(run / "checkpoints" / "latest.json")


def load_snapshot(run: Path) -> Snapshot | None:
    """The last whole checkpoint of a run, or None if it has none yet."""
    latest = _latest(run)
    return None if latest is None else Snapshot(latest[0], load_tensors(latest[1], "state"))


def drop_snapshots(run: Path) -> None:
    """A finished run needs no checkpoint: its weights are saved beside it."""
    shutil.rmtree(run / "checkpoints", ignore_errors=True)


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
    return _progress(pointer.get("progress"), run), inside(root, pointer.get("folder"))


def _progress(kept: Any, run: Path) -> Progress:
    """A progress that is whole: every value of its type, and no count negative."""
    with suppress(ValueError):
        values = accepted_record(kept, get_type_hints(Progress))
        if all(0 <= value < 2**48 for value in values.values() if isinstance(value, int)):
            return Progress(**values)
    raise CheckpointError(f"the checkpoint in {run} is damaged: its progress is {kept!r}; train again")


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
    """The inverse of `optimiser_tensors`; what it trains is to be restored after it, for weights may decay in it."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    numbers = {name.partition(".")[0] for name in tensors}
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.zeros_like(parameter) if str(number) in numbers else None
    optimiser.step()  # makes the state of all that has one, to be filled
    optimiser.zero_grad(set_to_none=True)
    state = optimiser_tensors(optimiser)
    require_fit(tensors, state, "the optimiser's tensors in the checkpoint")
    for name, tensor in state.items():
        tensor.copy_(tensors[name])
