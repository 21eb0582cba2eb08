"""Whether float32 products on CUDA may round their operands, in a process whose threads want different things."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

_Kind = Literal["quick", "full"]


class _Room:
    """Threads of one kind may be inside together; the other kind waits. PyTorch's setting belongs to the whole process."""

    def __init__(self) -> None:
        self._inside: dict[_Kind, int] = {"quick": 0, "full": 0}
        self._changed = threading.Condition()
        self._before = "highest"

    def enter(self, kind: _Kind) -> None:
        other: _Kind = "full" if kind == "quick" else "quick"
        with self._changed:
            self._changed.wait_for(lambda: self._inside[other] == 0)
            self._inside[kind] += 1
            if kind == "quick" and self._inside[kind] == 1:
                self._before = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("high")

    def leave(self, kind: _Kind) -> None:
        with self._changed:
            self._inside[kind] -= 1
            if self._inside[kind] == 0:
                if kind == "quick":
                    torch.set_float32_matmul_precision(self._before)
                self._changed.notify_all()


_ROOM = _Room()


@contextmanager
def quick_products(wanted: bool = True) -> Iterator[None]:
    """Within this block float32 products on CUDA round their operands to TF32."""
    with _inside("quick" if wanted else None):
        yield


@contextmanager
def full_products() -> Iterator[None]:
    """Within this block they do not, whatever other threads are training: for evaluation."""
    with _inside("full"):
        yield


def rounded_products(device: torch.device, precision: str) -> torch.autocast:
    """Within this block networks compute as a run of that precision trains, where it is bfloat16; logits and sums do not."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed")


@contextmanager
def _inside(kind: _Kind | None) -> Iterator[None]:
    if kind is None:
        yield
        return
    _ROOM.enter(kind)
    try:
        yield
    finally:
        _ROOM.leave(kind)
