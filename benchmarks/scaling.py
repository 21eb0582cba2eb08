"""How cost grows with features, depth, batch and samples: curves and fitted exponents."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import xorflow as xf
from timing import alternate
from xorflow import evaluate
from xorflow.estimators import Marginal


def curves(device: torch.device) -> list[dict[str, Any]]:
    gpu = device.type == "cuda"
    wide = [64, 256, 784, 3072, 12288] if gpu else [64, 128, 256, 784, 1568, 3072]
    return [
        _curve("training-features", "D", wide, lambda d: _training(d, 1, 64, device), device),
        _curve("sampling-features", "D", wide, lambda d: _sampling(d, 1, 16, device), device),
        _curve("training-depth", "L", [1, 2, 4, 8], lambda n: _training(784, n, 64, device), device),
        _curve("sampling-depth", "L", [1, 2, 4, 8], lambda n: _sampling(784, n, 16, device), device),
        _curve(
            "training-batch",
            "B",
            [32, 64, 128, 256, 512, 1024],
            lambda b: _training(784, 1, b, device),
            device,
        ),
        _curve("sampling-batch", "B", [1, 4, 16, 64, 256], lambda b: _sampling(784, 1, b, device), device),
        _curve("bound-samples", "S", [10, 30, 100, 300], lambda s: _bound(s, device), device),
    ]


def _curve(name: str, against: str, sizes: list[int], make, device: torch.device) -> dict[str, Any]:
    times = []
    for size in sizes:
        action = make(size)
        times.append(alternate({"it": action}, device, rounds=3, warm_up=1)["it"])
        del action
    half = len(sizes) // 2  # the exponent of the upper half: below, overhead hides the growth
    slope = np.polyfit(np.log(sizes[half - 1 :]), np.log(times[half - 1 :]), 1)[0]
    return {"id": name, "against": against, "sizes": sizes, "seconds": times, "exponent": float(slope)}


def _flow(features: int, depth: int, device: torch.device) -> xf.LatentFlow:
    torch.manual_seed(0)
    layers = [
        xf.Layer(xf.MADE(features, hidden=(1024,), order=("natural", "reversed")[i % 2]))
        for i in range(depth)
    ]
    return xf.LatentFlow(layers, xf.FactorisedBase(features)).to(device)


def _training(features: int, depth: int, batch: int, device: torch.device):
    flow, estimator = _flow(features, depth, device), Marginal(samples=2)
    x = torch.randint(2, (batch, features), device=device, dtype=torch.uint8)

    def step() -> None:
        flow.zero_grad(set_to_none=True)
        estimator(flow, x).surrogate.backward()

    return step


def _sampling(features: int, depth: int, batch: int, device: torch.device):
    flow = _flow(features, depth, device)
    return lambda: flow().sample((batch,))


def _bound(samples: int, device: torch.device):
    flow = _flow(784, 2, device)
    x = torch.randint(2, (32, 784), device=device, dtype=torch.uint8)
    return lambda: evaluate.importance(flow, x, samples=samples, sum_last=False)
