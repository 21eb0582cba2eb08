"""Devices: which one there is, how far its products round, what dropout draws from, what to say when memory runs out.

And which faster ways there are on a device, every decision of that kind in one place that a test can set, and what captures of
launches need.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from xorflow._distributed import local_rank, process_count
from xorflow.errors import ConfigError, OutOfMemory


def resolve_device(name: str) -> torch.device:
    """`auto` is the first CUDA device, or else the CPU; any other name must be a device that is there."""
    if process_count() > 1:
        return _of_this_process(name)
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is auto, cpu, cuda, cuda:N or mps; got {name!r}") from None
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(device.type, False):
        have = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ConfigError(
            f"device {name!r} is not there: this machine has {', '.join(have)}; choose one of them, or auto"
        )
    return device


def _of_this_process(name: str) -> torch.device:
    """Of several processes of a run, each has a GPU of its own."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"of several processes each has a GPU of its own, or all the CPU; got device={name!r}: leave it out"
        )
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank() >= torch.cuda.device_count():
        raise ConfigError(
            f"of several processes each has a GPU of its own, and this machine has {torch.cuda.device_count()}; begin fewer "
            "processes, or choose device=cpu"
        )
    return torch.device("cuda", local_rank())


@contextmanager
def tf32_matmul(wanted: bool = True) -> Iterator[None]:
    """Within this block float32 products on CUDA round their operands to TF32."""
    if not wanted:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def bf16_autocast(device: torch.device, precision: str) -> torch.autocast:
    """Within this block networks compute as a run of that precision trains, where it is bfloat16; logits and sums do not."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed")


_NO_MEMORY = ("allocate memory", "not enough memory", "Storage size calculation overflowed")
"""What PyTorch says on a CPU, the last of sizes that no machine could have."""


@contextmanager
def out_of_memory_as_error(remedy: str) -> Iterator[None]:
    """Turn a lack of memory, of a device or the machine, into one line: which option lowers the need."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        told = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if told or any(message in str(error) for message in _NO_MEMORY):
            raise OutOfMemory(f"out of memory; {remedy}") from error
        raise


def dropout_generator(module: nn.Module, device: torch.device) -> torch.Generator | None:
    """What the dropout of a module draws from, the process's own generator for a device; None if nothing is dropped."""
    if not any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules()):
        return None
    return (
        torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    )


_DROPOUT_SEEDS = 2**42
"""Added to a run's seed for dropout, beyond all seeds: the numbers that binarise rows must not be those that drop units."""


@contextmanager
def seeded_dropout(generator: torch.Generator | None, seed: int, state: Tensor | None) -> Iterator[None]:
    """Within this block the process's generator is a run's, new or in the state of a checkpoint; it is given back as it was."""
    if generator is None:
        yield
        return
    before = generator.get_state()
    if state is None:
        generator.manual_seed(_DROPOUT_SEEDS + seed)
    else:
        generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


# ---- faster ways ----

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
