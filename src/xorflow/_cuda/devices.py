"""Which faster ways there are for a device: every decision of that kind, in one place that a test can set."""

from __future__ import annotations

import functools
import importlib.util

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
