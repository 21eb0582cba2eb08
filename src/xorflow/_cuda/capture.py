"""What every capture of launches on a CUDA device needs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CAPTURING = threading.Lock()


@contextmanager
def capturing() -> Iterator[None]:
    """Within this block a device's launches may be captured: by one thread at a time, and nothing is collected.

    Among the cycles of objects that would be collected may be earlier graphs, and destroying one is not allowed during a
    capture.
    """
    with _CAPTURING:
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


_OF_THREAD = threading.local()


def stream_of_thread(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """A CUDA stream that this thread keeps for a purpose.

    PyTorch has 32 streams and deals them out in turn: threads that took a new one for every run would soon share theirs with
    the stream on which another thread captures, and whatever they launch there would fail.
    """
    kept: dict[tuple[torch.device, str], torch.cuda.Stream] = _OF_THREAD.__dict__.setdefault("streams", {})
    if (device, purpose) not in kept:
        kept[device, purpose] = torch.cuda.Stream(device)
    return kept[device, purpose]
