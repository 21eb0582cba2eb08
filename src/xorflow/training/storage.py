"""Files: atomic writes, JSON, and tensors in shards below 16 MiB; nothing here executes what it reads."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from xorflow.errors import CheckpointError

SHARD_BYTES = 15 * 2**20
"""The most bytes of tensors in one file; with its header a file stays below 16 MiB."""


_SAME = "same"
"""Under which name a file keeps the names that tensors have beside their first one."""

TEMPORARY = ".tmp"
"""How the names of files end that are not wholly written."""

_KEEP = "what was saved before is untouched: make room or choose another --out, and continue with --resume"


def write_bytes(path: Path, content: bytes, advice: str = _KEEP) -> None:
    """Write a file so that it is there wholly or not at all; `advice` ends the message if it cannot be."""
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error.strerror}; {advice}") from error


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object; `what` names the file's role in error messages."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{what} is missing: no file {path}; is the folder a run of xorflow train?"
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no text, no JSON, numbers too long
        raise CheckpointError(
            f"{what} is damaged: {path} is no readable JSON ({error}); restore it or train again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is damaged: {path} holds no JSON object; restore it or train again")
    return value


def save_tensors(folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
    """Write `stem.safetensors`, or shards of it with an index `stem.safetensors.index.json`.

    A tensor that has several names, as those of a part used twice do, is written once, and the file says under which.
    """
    again = _other_names(tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in again}
    shards = _pack(tensors)
    if len(shards) == 1:
        note = {_SAME: json.dumps(again)} if again else None
        write_bytes(folder / f"{stem}.safetensors", tensors_to_bytes(shards[0], metadata=note))
        return
    names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_bytes(folder / name, tensors_to_bytes(shard))
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    index = {
        "shards": names,
        "pieces": {name: list(shard) for name, shard in zip(names, shards, strict=True)},
        "shapes": shapes,
        _SAME: again,
    }
    write_json(folder / f"{stem}.safetensors.index.json", index)


def load_tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote; tensors that were cut are joined again, and all names are there."""
    index = folder / f"{stem}.safetensors.index.json"
    if not index.exists():
        path = folder / f"{stem}.safetensors"
        tensors = _read_shard(path)
        try:
            return _with_other_names(tensors, json.loads(_note(path).get(_SAME, "{}")))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"weights are damaged: {path} names tensors that are not there ({error}); restore it or train again"
            ) from None
    listed = read_json(index, "the index of the weights")
    pieces: dict[str, Tensor] = {}
    try:
        for name in listed["shards"]:
            pieces |= _read_shard(folder / str(name))
        return _with_other_names(_join(pieces, listed["shapes"]), listed.get(_SAME, {}))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"weights are damaged: {index} does not fit its shards ({error}); restore it or train again"
        ) from None


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


def _with_other_names(tensors: dict[str, Tensor], same: Mapping[str, str]) -> dict[str, Tensor]:
    return tensors | {name: tensors[first] for name, first in same.items()}


def _note(path: Path) -> dict[str, str]:
    """What a file says beside its tensors."""
    with safe_open(path, framework="pt") as stream:
        return stream.metadata() or {}


def _read_shard(path: Path) -> dict[str, Tensor]:
    try:
        return load_tensors_from_bytes(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"weights are missing: no file {path}; is the run complete? continue it with --resume"
        ) from None
    except OSError as error:
        raise CheckpointError(f"weights cannot be read: {path}: {error.strerror}") from None
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"weights are damaged: {path} is no whole safetensors file ({error}); restore it or train again"
        ) from None


def _pack(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Group tensors, the large ones cut, into shards below `SHARD_BYTES`."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        for piece_name, piece in _pieces(name, tensor.detach().cpu()):
            size = piece.numel() * piece.element_size()
            if shards[-1] and used + size > SHARD_BYTES:
                shards.append({})
                used = 0
            shards[-1][piece_name] = piece
            used += size
    return shards


def _pieces(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    # cloned, because safetensors refuses tensors that share memory, as views of one do
    if tensor.numel() * tensor.element_size() <= SHARD_BYTES:
        return [(name, tensor.clone(memory_format=torch.contiguous_format))]
    # cut flat: a single row may be larger than a shard
    cut = tensor.flatten().split(SHARD_BYTES // tensor.element_size())
    return [(f"{name}#{i:04d}", piece.clone()) for i, piece in enumerate(cut)]


def _join(pieces: Mapping[str, Tensor], shapes: Mapping[str, list[int]]) -> dict[str, Tensor]:
    of_tensor: dict[str, list[Tensor]] = {name: [] for name in shapes}
    for name in sorted(pieces):  # the numbers of a tensor's pieces have the same width
        of_tensor[name.partition("#")[0]].append(pieces[name])
    return {
        name: torch.cat([t.flatten() for t in cut]).reshape(shapes[name]) for name, cut in of_tensor.items()
    }
