"""What is measured: trainers and flows on MNIST, depth 1, width 1024 unless said otherwise."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import xorflow as xf
from xorflow.errors import ConfigError
from xorflow.training import (
    Options,
    Trainer,
    build_data,
    build_estimator,
    build_flow,
    create_run,
    finish_run,
    init_from_data,
    tf32_matmul,
)


def mnist_trainer(device: torch.device, dataset: xf.data.Dataset | None = None, **options: object) -> Trainer:
    """A trainer that has not made a step, and keeps nothing on disk; `dataset` is shared with others, if given."""
    chosen = Options(device=str(device)).replace(**options)
    dataset = dataset or build_data(chosen)
    torch.manual_seed(chosen.seed)
    flow = build_flow(chosen, dataset)
    init_from_data(flow, dataset.train)
    return Trainer(flow, build_estimator(chosen.estimator), dataset, chosen)


def bare_steps(trainer: Trainer, count: int | None = None) -> Callable[[], None]:
    """The steps of an epoch, or `count` of them, without the loop around them; captured, where that is possible."""
    captured, wanted = trainer.captured_steps(), count or trainer.steps_per_epoch
    order = torch.randperm(trainer.rows).to(trainer.device)
    batches = order.split(trainer.batch_size)

    def act() -> None:
        if captured is None:
            with tf32_matmul(trainer.rounds_products):
                for number in range(wanted):
                    trainer.make_step(batches[number], number)
            return
        captured.begin_epoch(order, 0)
        made = 0
        while made < wanted:
            made += captured.advance(wanted - made)

    return act


def train_flow(device: torch.device, **options: object) -> xf.LatentFlow:
    """A flow with trained weights: sampling's cost depends on them."""
    epochs, batch = (50, 256) if device.type == "cuda" else (10, 128)
    chosen = Options(epochs=epochs, batch_size=batch, device=str(device)).replace(**options)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        finish_run(create_run(chosen, out))
        return xf.load(out, device=str(device))


def read_flow(run: Path, device: torch.device) -> xf.LatentFlow:
    """The flow of a finished run, which must be of the kind that the figures are about."""
    flow = xf.load(run, device=str(device))
    if not isinstance(flow, xf.LatentFlow):
        raise ConfigError(f"--run is a run of one flow, and {run} is a {type(flow).__name__.lower()}")
    nets = [layer.conditioner for layer in flow.layers]
    wanted = flow.states.binary and flow.features == 784 and not flow.context_features
    if len(nets) != 1 or not wanted or not isinstance(nets[0], xf.MADE) or nets[0].hidden != (1024,):
        kinds = ", ".join(f"{type(net).__name__} {list(getattr(net, 'hidden', []))}" for net in nets)
        raise ConfigError(
            f"--run is a run of depth 1 on MNIST with a MADE of one hidden layer of 1,024 units; {run} has depth "
            f"{len(nets)}, {flow.features} features and {kinds}"
        )
    return flow


def new_flow(features: int, depth: int, device: torch.device) -> xf.LatentFlow:
    """An untrained flow of any size, orderings alternating, width 1024."""
    torch.manual_seed(0)
    orders = [("natural", "reversed")[index % 2] for index in range(depth)]
    layers = [xf.Layer(xf.MADE(features, hidden=(1024,), order=order)) for order in orders]
    return xf.LatentFlow(layers, xf.FactorisedBase(features, learned=True)).to(device)


def recipe_flow(name: str, device: torch.device) -> xf.LatentFlow | xf.Mixture:
    """The untrained model of a recipe, its weights shaken, so that every one of them takes part in a sample."""
    options = Options(device=str(device)).replace(recipe=name)
    dataset = build_data(options)
    torch.manual_seed(0)
    flow = build_flow(options, dataset)
    init_from_data(flow, dataset.train)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return flow.to(device).eval()


def mnist_intensities(device: torch.device) -> Tensor:
    """The grey values (N, 784) of the training images, uint8."""
    return xf.data.mnist().train.values.to(device)


def mnist_test(device: torch.device) -> xf.data.Split:
    test = xf.data.mnist().test
    assert test is not None
    return test.to(device)
