"""What is measured: trainers and flows on MNIST, depth 1, width 1024 unless said otherwise."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

import xorflow as xf
from xorflow.training import (
    Options,
    Trainer,
    build_data,
    build_estimator,
    build_flow,
    start_from_data,
    train_run,
)


def mnist_trainer(device: torch.device, **options: object) -> Trainer:
    """A trainer that has not made a step, and keeps nothing on disk."""
    chosen = Options(device=str(device)).replace(**options)
    dataset = build_data(chosen)
    torch.manual_seed(0)
    flow = build_flow(chosen, dataset)
    start_from_data(flow, dataset.train)
    return Trainer(flow, build_estimator(chosen.estimator), dataset, chosen)


def trained_flow(run: Path | None, device: torch.device) -> xf.LatentFlow:
    """A flow with trained weights: sampling's cost depends on them."""
    if run is not None:
        return xf.load(run, device=str(device))
    epochs, batch = (50, 256) if device.type == "cuda" else (10, 128)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        train_run(Options(epochs=epochs, batch_size=batch, device=str(device)), out)
        return xf.load(out, device=str(device))


def new_flow(features: int, depth: int, device: torch.device) -> xf.LatentFlow:
    """An untrained flow of any size, orderings alternating, width 1024."""
    torch.manual_seed(0)
    orders = [("natural", "reversed")[index % 2] for index in range(depth)]
    layers = [xf.Layer(xf.MADE(features, hidden=(1024,), order=order)) for order in orders]
    return xf.LatentFlow(layers, xf.FactorisedBase(features, learned=True)).to(device)


def mnist_intensities(device: torch.device) -> Tensor:
    """The grey values (N, 784) of the training images, uint8."""
    return xf.data.mnist().train.values.to(device)


def mnist_test(device: torch.device) -> xf.data.Split:
    test = xf.data.mnist().test
    assert test is not None
    return test.to(device)
