"""Devices: which one to train on, how far its products round, what dropout draws from, and what to say when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from xorflow.errors import ConfigError, OutOfMemory


def resolve_device(name: str) -> torch.device:
    """`auto` is the first CUDA device, or else the CPU; any other name must be a device that is there."""
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
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(f"out of memory; {remedy}") from error
    except RuntimeError as error:
        if any(message in str(error) for message in _NO_MEMORY):
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
