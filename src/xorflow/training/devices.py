"""Which device to train on, and what to say when it runs out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

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


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a precision that the device has not."""
    if precision == "16-mixed" and device.type == "cpu":
        raise ConfigError(
            "precision 16-mixed needs an accelerator, and the device is the cpu; use bf16-mixed"
        )


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
        if any(words in str(error) for words in _NO_MEMORY):
            raise OutOfMemory(f"out of memory; {remedy}") from error
        raise


def default_generator(device: torch.device) -> torch.Generator:
    """The process's own generator for a device, from which dropout draws: there is no way to give it another."""
    return (
        torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    )
