"""Tensors in files below 16 MiB, with an index that has the digest of each; nothing here executes what it reads."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from xorflow._files import inside, read_bytes, read_json, write_bytes, write_json
from xorflow.errors import CheckpointError

SHARD_BYTES = 15 * 2**20
"""The most bytes of tensors in one file; with its header a file stays below 16 MiB."""

_MOST_BYTES = 64 * 2**20
"""No file of tensors that we wrote is larger, however many names its header has."""


def save_tensors(folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
    """Write `stem.safetensors`, or shards of it, and last `stem.index.json`, which says what makes them whole.

    A tensor that has several names, as those of a part used twice do, is written once, and the index says under which.
    """
    again = _other_names(tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in again}
    shards = _pack(tensors)
    digests: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        part = "" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"
        content = tensors_to_bytes(shard)
        write_bytes(folder / f"{stem}{part}.safetensors", content)
        digests[f"{stem}{part}.safetensors"] = hashlib.sha256(content).hexdigest()
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    write_json(_index(folder, stem), {"sha256": digests, "shapes": shapes, "same": again})


def has_tensors(folder: Path, stem: str) -> bool:
    """Whether `save_tensors` has written all of these."""
    return os.path.lexists(_index(folder, stem))


def load_tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote, if it is that bit for bit; tensors that were cut are joined again, all names are there.

    Raises:
        CheckpointError: if anything is missing or was changed.
    """
    index = _index(folder, stem)
    if not has_tensors(folder, stem):
        raise CheckpointError(
            f"weights are missing: no file {index}; is the run complete? continue it with --resume"
        )
    digests, shapes, again = _checked_index(index)
    pieces: dict[str, Tensor] = {}
    for name, digest in digests.items():
        pieces |= _read_shard(inside(folder, name), digest)
    tensors = _join(pieces, shapes, index)
    missing = [first for first in again.values() if first not in tensors]
    if missing:
        raise CheckpointError(
            f"weights are damaged: {index} names tensors that are not there ({missing[0]!r}); restore it or train again"
        )
    return tensors | {name: tensors[first] for name, first in again.items()}


def _index(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.index.json"


def _checked_index(path: Path) -> tuple[dict[str, str], dict[str, list[int]], dict[str, str]]:
    """The digests of files, the shapes of tensors, and under which name those with several are."""
    content = read_json(path, "the index of the weights")
    digests, shapes, again = (content.get(key) for key in ("sha256", "shapes", "same"))
    good = all(isinstance(value, dict) for value in (digests, shapes, again))
    if good:
        good = all(isinstance(value, str) for value in (*digests.values(), *again.values()))  # pyright: ignore[reportOptionalMemberAccess]
        good = good and all(map(_is_shape, shapes.values()))  # pyright: ignore[reportOptionalMemberAccess]
    if not good:
        raise CheckpointError(
            f"weights are damaged: {path} is no index of weights; restore it or train again"
        )
    return digests, shapes, again  # pyright: ignore[reportReturnType]


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**48 for size in value)


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


def _read_shard(path: Path, digest: str) -> dict[str, Tensor]:
    try:
        content = read_bytes(path, _MOST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(
            f"weights are missing: no file {path}; is the run complete? continue it with --resume"
        ) from None
    except OSError as error:
        raise CheckpointError(f"weights cannot be read: {path}: {error.strerror}; restore it") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise CheckpointError(
            f"weights are damaged: {path} is not the file that was written, whose SHA-256 was {digest[:12]}...; restore it or "
            "train again"
        )
    try:
        return load_tensors_from_bytes(content)
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


def _join(pieces: Mapping[str, Tensor], shapes: Mapping[str, list[int]], index: Path) -> dict[str, Tensor]:
    of_tensor: dict[str, list[Tensor]] = {name: [] for name in shapes}
    for name in sorted(pieces):  # the numbers of a tensor's pieces have the same width
        of_tensor.setdefault(name.partition("#")[0], []).append(pieces[name])
    for name, cut in of_tensor.items():
        kinds = {piece.dtype for piece in cut}
        if len(kinds) != 1 or sum(t.numel() for t in cut) != math.prod(shapes.get(name, [-1])):
            raise CheckpointError(
                f"weights are damaged: {index} does not fit its files, in {name!r}; restore it or train again"
            )
    return {
        name: torch.cat([t.flatten() for t in cut]).reshape(shapes[name]) for name, cut in of_tensor.items()
    }


# ---- the weights of a run ----


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
    expected = flow.state_dict()
    for name, tensor in expected.items():
        if name not in weights or weights[name].shape != tensor.shape:
            came = "nothing" if name not in weights else f"shape {tuple(weights[name].shape)}"
            raise CheckpointError(
                f"the weights in {where} are not those of its configuration: {name} has {came} instead of "
                f"shape {tuple(tensor.shape)}; restore the folder, or train again"
            )
        if weights[name].dtype not in (torch.float32, torch.float64):
            raise CheckpointError(
                f"weights are float32 or float64, and {name} in {where} is {weights[name].dtype}; restore the folder"
            )
    if any(t.dtype == torch.float64 for t in weights.values()):
        flow.double()
    flow.load_state_dict({name: weights[name] for name in expected})
