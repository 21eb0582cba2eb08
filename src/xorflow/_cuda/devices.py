"""Which faster ways there are for a device, every decision of that kind in one place that a test can set; and what each capture
of launches needs."""

from __future__ import annotations

import functools
import gc
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

TYPES = ("cuda",)
"""Devices whose operations can be captured as graphs, and for which Triton compiles kernels."""

STEPPED_ON = ("cuda",)
"""Where decoding takes steps whose number is on the device, one graph each; tests take them elsewhere, uncaptured."""

COMPILED_ON = ("cuda",)
"""Where compiling is worth its minute, and needs no compiler beside PyTorch's own."""


def captures(device: torch.device) -> bool:
    """Whether work on a device can be captured as a graph, so that the host must not be asked for a number in it."""
    return device.type in TYPES


def decodes_by_graph(device: torch.device) -> bool:
    """Whether decoding takes steps whose number is on the device."""
    return device.type in STEPPED_ON


def compiles(device: torch.device) -> bool:
    """Whether `compile` is heeded on a device."""
    return device.type in COMPILED_ON


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported; it comes with PyTorch's CUDA builds."""
    return importlib.util.find_spec("triton") is not None


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on a device."""
    return captures(device) and has_triton()


def usable(tensor: Tensor) -> bool:
    """Whether a kernel can work on this tensor."""
    return has_kernels(tensor.device)


def rounds_products(device: torch.device, precision: str) -> bool:
    """Whether a run's float32 products may round their operands to TF32."""
    return captures(device) and precision in ("auto", "tf32")


# ---- captures ----

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
