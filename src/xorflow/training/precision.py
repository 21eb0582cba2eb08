"""How far matrix products may round their operands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
