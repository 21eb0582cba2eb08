"""How cost grows with features, depth, batch and samples: curves and fitted exponents."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from models import bare_steps, new_flow
from timing import alternate
from xorflow import evaluate
from xorflow.data import Dataset, Split
from xorflow.estimators import MaximumLikelihood
from xorflow.training import Options, Trainer


@dataclass(frozen=True)
class Sizes:
    """What the curves go through on one kind of device: large enough there that the work outgrows the launches."""

    features: tuple[int, ...] = (64, 256, 784, 1568, 3072, 6144, 12288)
    depths: tuple[int, ...] = (1, 2, 4, 8, 16)
    training_batches: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    sampling_batches: tuple[int, ...] = (4, 16, 64, 256, 1024)
    samples: tuple[int, ...] = (10, 30, 100, 300, 1000)
    training_batch: int = 32
    sampling_batch: int = 16
    images: int = 16


CPU = Sizes()
CUDA = Sizes(
    training_batches=(256, 1024, 2048, 4096, 8192, 16384, 32768),
    sampling_batches=(64, 256, 1024, 2048, 4096, 8192, 16384),
    samples=(10, 30, 100, 300, 1000, 3000),
    training_batch=2048,
    sampling_batch=2048,
    images=512,
)


def curves(device: torch.device, sizes: Sizes | None = None) -> list[dict[str, Any]]:
    """Every curve as JSON: the sizes and seconds, the exponent and the range it was fitted to, and what was held fixed."""
    s = sizes or (CUDA if device.type == "cuda" else CPU)
    train, sample = s.training_batch, s.sampling_batch
    return [
        _curve("training-features", _training, device, "D", s.features, B=train, L=1),
        _curve("sampling-features", _sampling, device, "D", s.features, B=sample, L=1),
        _curve("training-depth", _training, device, "L", s.depths, B=train, D=784),
        _curve("sampling-depth", _sampling, device, "L", s.depths, B=sample, D=784),
        _curve("training-batch", _training, device, "B", s.training_batches, D=784, L=1),
        _curve("sampling-batch", _sampling, device, "B", s.sampling_batches, D=784, L=1),
        _curve("bound-samples", _bound, device, "S", s.samples, B=s.images, D=784, L=2),
    ]


Action = tuple[Callable[[], Any], int]
"""What is timed, and how many times over it does what the curve is about."""


def _curve(
    name: str,
    make: Callable[..., Action],
    device: torch.device,
    against: str,
    sizes: tuple[int, ...],
    **held: int,
) -> dict[str, Any]:
    times = []
    for size in sizes:
        action, repeats = make(device, **held | {against: size})
        times.append(alternate({"it": action}, device, rounds=5, warm_up=1)["it"] / repeats)
        del action
        if device.type == "cuda":
            gc.collect()  # a trainer refers to itself
            torch.cuda.empty_cache()
    fitted = sizes[len(sizes) // 2 :]  # below, what a call costs by itself hides the growth
    slope = np.polyfit(np.log(fitted), np.log(times[-len(fitted) :]), 1)[0]
    return {
        "id": name,
        "against": against,
        "sizes": list(sizes),
        "seconds": times,
        "exponent": float(slope),
        "fitted": [fitted[0], fitted[-1]],
        "held": held | {"width": 1024},
    }


def _training(device: torch.device, *, D: int, L: int, B: int) -> Action:
    """A step of the trainer, with two draws of the layers before the last: on CUDA captured, eight a launch."""
    launch = 8 if device.type == "cuda" else 1
    values = torch.randint(2, (B * launch, D), device=device, dtype=torch.uint8)
    dataset = Dataset("noise", Split(values), None, None, categories=(2,) * D)
    # so many epochs only for the tables of learning rates to be long enough
    options = Options(layers=None, epochs=100, batch_size=B, device=str(device))
    trainer = Trainer(new_flow(D, L, device), MaximumLikelihood(samples=2), dataset, options)
    return bare_steps(trainer, launch), launch


def _sampling(device: torch.device, *, D: int, L: int, B: int) -> Action:
    """A batch of samples, noise included."""
    flow = new_flow(D, L, device)
    for _ in range(6):  # the first calls try each way of sampling
        flow().sample((B,))
    return lambda: flow().sample((B,)), 1


def _bound(device: torch.device, *, D: int, L: int, B: int, S: int) -> Action:
    """The importance-sampled bound of B rows, every layer sampled."""
    flow = new_flow(D, L, device)
    x = torch.randint(2, (B, D), device=device, dtype=torch.uint8)
    return lambda: evaluate.importance(flow, x, samples=S, sum_last=False), 1
