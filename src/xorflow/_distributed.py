"""One run on several processes, by torch.distributed: which of them this one is, what they add up and tell each other."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xorflow.errors import ConfigError, ProcessLost, UserError

PATIENCE = timedelta(minutes=5)
"""After so long a process that does not answer has ended the run."""

_LAST_SECONDS = 0.3
"""gloo's threads may still let go of the last tensors: a Python that ends meanwhile aborts, as of torch 2.13."""

_SMALL = 2**16
"""Tensors of fewer numbers travel together."""


def under_torchrun() -> bool:
    """Whether the environment says that this process is one of several, as torchrun and schedulers have it."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def process_count() -> int:
    """How many processes make this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which of them this one is, from 0: that one writes and prints."""
    return dist.get_rank() if dist.is_initialized() else 0


def local_rank() -> int:
    """Which of those on this machine."""
    return int(os.environ.get("LOCAL_RANK", rank())) if dist.is_initialized() else 0


def add_up(tensors: Sequence[Tensor]) -> None:
    """Make each the sum over all processes, in place; on all of them to the bit the same."""
    large = [tensor for tensor in tensors if tensor.numel() >= _SMALL]
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() < _SMALL:
            by_kind[tensor.device, tensor.dtype].append(tensor)
    joined = [torch.cat([tensor.flatten() for tensor in alike]) for alike in by_kind.values()]
    with _answered():
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in (*large, *joined)]:
            assert work is not None
            work.wait()
    for alike, total in zip(by_kind.values(), joined, strict=True):
        pieces = total.split([tensor.numel() for tensor in alike])
        for tensor, piece in zip(alike, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))


def relative_shares(counts: Sequence[int]) -> list[float]:
    """This process's share of each of these, relative to its share of all together; of the only process 1."""
    if process_count() == 1:
        return [1.0] * len(counts)
    whole = torch.tensor(counts, dtype=torch.float64)
    add_up([whole])
    of_all = sum(counts) / float(whole.sum())
    return [count / total / of_all for count, total in zip(counts, whole.tolist(), strict=True)]


def gathered(content: bytes) -> list[bytes]:
    """What each process has, in their order."""
    sizes = torch.zeros(process_count(), dtype=torch.int64)
    sizes[rank()] = len(content)
    add_up([sizes])
    mine = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    each = [torch.empty_like(mine) for _ in sizes]
    with _answered():
        dist.all_gather(each, mine)
    return [bytes(one[:size].tolist()) for one, size in zip(each, sizes.tolist(), strict=True)]


def require_same(parts: Mapping[str, str | Mapping[str, Tensor]]) -> None:
    """Refuse a run whose processes have different ones of these, by their digests."""
    mine = json.dumps({name: _digest(part) for name, part in parts.items()}).encode()
    first, *others = map(json.loads, gathered(mine))
    for number, other in enumerate(others, 1):
        different = [name for name in first if other.get(name) != first[name]]
        if different or len(other) > len(first):
            raise ConfigError(
                f"all processes of a run have the same {', '.join(parts)}; process {number} and process 0 have different "
                f"{' and '.join(different)}: give each the same command, files and packages"
            )


def _digest(part: str | Mapping[str, Tensor]) -> str:
    if isinstance(part, str):
        return part
    digest = hashlib.sha256()
    for name, tensor in sorted(part.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ---- a group begins and ends ----


@contextmanager
def process_group(**how: Any) -> Iterator[None]:
    """Within this block this process is one of a group, made from what torch takes or, without that, from its environment."""
    on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    try:
        dist.init_process_group(backend, timeout=PATIENCE, **how)
    except (dist.DistError, ValueError) as error:
        place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise ConfigError(
            f"the processes of this run do not meet at {place}: {error}; is that port taken? choose another"
        ) from error
    try:
        yield
    except UserError as error:
        if not isinstance(error, ProcessLost):
            _store().set(_PROBLEM, f"process {rank()}: {error}")
        raise
    finally:
        dist.destroy_process_group()
        time.sleep(_LAST_SECONDS)


_PROBLEM = "problem"


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


@contextmanager
def _answered() -> Iterator[None]:
    """Within this block all processes answer; otherwise it is said what became of one."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessLost(_why(error)) from error


def _why(error: RuntimeError) -> str:
    try:
        if _store().check([_PROBLEM]):
            return _store().get(_PROBLEM).decode()
    except RuntimeError:  # the process that has the store has ended
        pass
    hangs = any(
        words in str(error).lower() for words in ("timed out", "timeout")
    )  # the first operation's, and others'
    what = f"has not answered for {PATIENCE.total_seconds():g} seconds" if hangs else "has ended"
    return f"a process of this run {what}; continue from the last checkpoint with --resume"
