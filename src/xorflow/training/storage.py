"""Files: atomic writes, JSON, and tensors as safetensors in shards below 16 MiB. Nothing here executes what it reads."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from xorflow.errors import CheckpointError

SHARD_BYTES = 15 * 2**20
"""The most bytes of tensors in one file; with its header a file stays below 16 MiB."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it is there wholly or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
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
        raise CheckpointError(
            f"could not write {path}: {error.strerror}; what was saved before is untouched: "
            "make room or choose another --out, and continue with --resume"
        ) from error


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object; `what` names the file's role in error messages."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{what} is missing: no file {path}; is the folder a run of xorflow train?") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{what} is damaged: {path} is no readable JSON ({error}); restore it or train again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is damaged: {path} holds no JSON object; restore it or train again")
    return value


def save_tensors(folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
    """Write `stem.safetensors`, or shards of it with an index `stem.safetensors.index.json`."""
    shards = _pack(tensors)
    if len(shards) == 1:
        write_bytes(folder / f"{stem}.safetensors", tensors_to_bytes(shards[0]))
        return
    names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_bytes(folder / name, tensors_to_bytes(shard))
    index = {"shards": names, "pieces": {name: list(shard) for name, shard in zip(names, shards, strict=True)}}
    write_json(folder / f"{stem}.safetensors.index.json", index)


def load_tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote; tensors that were cut are joined again."""
    index = folder / f"{stem}.safetensors.index.json"
    names = read_json(index, "the index of the weights")["shards"] if index.exists() else [f"{stem}.safetensors"]
    pieces: dict[str, Tensor] = {}
    for name in names:
        pieces |= _read_shard(folder / str(name))
    return _join(pieces)


def _read_shard(path: Path) -> dict[str, Tensor]:
    try:
        return load_tensors_from_bytes(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"weights are missing: no file {path}; is the run complete? continue it with --resume") from None
    except OSError as error:
        raise CheckpointError(f"weights cannot be read: {path}: {error.strerror}") from None
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"weights are damaged: {path} is no whole safetensors file ({error}); restore it or train again"
        ) from None


def _pack(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Group tensors, the large ones cut along the first dimension, into shards below `SHARD_BYTES`."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        for piece_name, piece in _pieces(name, tensor.detach().cpu().contiguous()):
            size = piece.numel() * piece.element_size()
            if shards[-1] and used + size > SHARD_BYTES:
                shards.append({})
                used = 0
            shards[-1][piece_name] = piece
            used += size
    return shards


def _pieces(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    size = tensor.numel() * tensor.element_size()
    if size <= SHARD_BYTES or tensor.dim() == 0:
        return [(name, tensor)]
    rows = max(1, SHARD_BYTES * len(tensor) // size)
    return [(f"{name}#{i:04d}", part.contiguous()) for i, part in enumerate(tensor.split(rows))]


def _join(pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
    grouped: dict[str, list[tuple[str, Tensor]]] = {}
    for name, piece in pieces.items():
        stem, _, number = name.partition("#")
        grouped.setdefault(stem, []).append((number, piece))
    joined = {}
    for stem, parts in grouped.items():
        ordered = [piece for _, piece in sorted(parts, key=lambda part: part[0])]
        joined[stem] = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
    return joined
