"""The hardware's limit: the operations and bytes that a computation cannot do without, at two rates measured in the same run.

The longer of the two times. Caches are not considered, nor that features follow each other, nor what noise costs to compute: a
yardstick rather than a proof.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

import xorflow as xf
from timing import alternate
from xorflow.conditioners import MaskedLinear

LIMIT = "hardware's limit"


@dataclass(frozen=True)
class Limit:
    seconds: float
    rates: str


def training_limit(made: xf.MADE, batch: int, device: torch.device) -> Limit:
    """A step of depth 1 with Adam."""
    used, stored = _weights(made)
    # forward, gradients of all weights, and that of the hidden layer, which needs half of the weights
    operations = 2 * batch * used * 2.5
    # forward 1, backward 0.5, gradients written 1, Adam reads 4 and writes 3; activations, six times each
    moved = 4 * stored * 9.5 + batch * made.features * (1 + 4 * 6) + batch * sum(made.hidden) * 4 * 6
    return _limit(operations, moved, device, rounded=True)


def sampling_limit(made: xf.MADE, batch: int, device: torch.device) -> Limit:
    """A batch of samples of depth 1: every weight used once for each, as if all features were known."""
    used, stored = _weights(made)
    # weights; two uniforms are read and an int64 is written for each feature
    moved = 4 * stored + batch * made.features * (4 + 4 + 8)
    return _limit(2 * batch * used, moved, device, rounded=False)


def bound_limit(flow: xf.LatentFlow, images: int, draws: int, device: torch.device) -> Limit:
    """The bound with every layer sampled: the first network sees the images only, later ones every draw."""
    used = [_weights(layer.conditioner)[0] for layer in flow.layers]
    operations = 2 * images * (used[0] + draws * sum(used[1:]))
    # the uniforms of all draws, written and read
    moved = 2 * 4 * images * draws * flow.depth * flow.features
    return _limit(operations, moved, device, rounded=False)


def _limit(operations: float, moved: float, device: torch.device, *, rounded: bool) -> Limit:
    bandwidth, rate = _bandwidth(device), _rate(device, rounded)
    rates = (
        f"{operations / 1e9:.3g} GFLOP of weights not masked at {rate / 1e12:.3g} TFLOP/s, {moved / 1e6:,.0f} MB at "
        f"{bandwidth / 1e12:.3g} TB/s, both rates measured; the longer of the two, caches not considered"
    )
    return Limit(max(operations / rate, moved / bandwidth), rates)


def _weights(made: xf.MADE) -> tuple[int, int]:
    """How many are not masked, and how many are stored."""
    layers = [layer for layer in made.net.linear if isinstance(layer, MaskedLinear)]
    return sum(int(layer.mask.sum()) for layer in layers), sum(layer.weight.numel() for layer in layers)


@functools.cache
def _bandwidth(device: torch.device) -> float:
    """Bytes a second by copying."""
    numbers = 2**28 if device.type == "cuda" else 2**26
    source = torch.randn(numbers, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * numbers / alternate({"copy": lambda: target.copy_(source)}, device, rounds=10)["copy"]


@functools.cache
def _rate(device: torch.device, rounded: bool) -> float:
    """Operations a second by products; rounded to TF32 on CUDA, as training does them there, or in full float32."""
    on_cuda = device.type == "cuda"
    side = 8192 if on_cuda else 2048
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    if on_cuda:
        torch.set_float32_matmul_precision("high" if rounded else "highest")
    spent = alternate({"product": lambda: a @ b}, device, rounds=10)["product"]
    torch.set_float32_matmul_precision(before)
    return 2 * side**3 / spent
