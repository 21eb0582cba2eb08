"""One step: learning rates, optimisers, where weight decay reaches, clipping."""

import math
from typing import Any

import pytest
import torch

from tiny_runs import tiny_dataset, tiny_flow
from xorflow.estimators import Marginal
from xorflow.flows import LatentFlow
from xorflow.training import Options, Trainer
from xorflow.training.optimiser import make_optimiser
from xorflow.training.step import Step, learning_rate

CPU = torch.device("cpu")


def test_cosine_falls_from_the_highest_rate_to_almost_zero() -> None:
    rates = [learning_rate(Options(lr=2.0), step, 100) for step in range(100)]
    assert rates[0] == 2.0
    assert rates == sorted(rates, reverse=True)
    assert rates[50] == pytest.approx(1.0)
    assert 0 < rates[99] < 1e-3
    assert learning_rate(Options(lr=2.0), 100, 100) == pytest.approx(0.0)


def test_constant_stays() -> None:
    options = Options(lr=0.5, schedule="constant")
    assert {learning_rate(options, step, 10) for step in range(10)} == {0.5}


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_warm_up_rises_evenly_and_ends_at_the_highest_rate(schedule: str) -> None:
    options = Options(lr=1.0, warmup=4, schedule=schedule)
    rates = [learning_rate(options, step, 20) for step in range(5)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_a_run_that_is_shorter_than_its_warm_up_only_rises() -> None:
    assert learning_rate(Options(lr=1.0, warmup=10), 4, 5) == pytest.approx(5 / 11)


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
)
def test_names_of_optimisers(name: str, kind: type[torch.optim.Optimizer]) -> None:
    optimiser = make_optimiser(Step(tiny_flow(), Marginal()), Options(optimiser=name), CPU)
    assert type(optimiser) is kind


def test_weight_decay_reaches_matrices_only_and_each_parameter_once() -> None:
    flow = tiny_flow(context=3)
    optimiser = make_optimiser(Step(flow, Marginal()), Options(weight_decay=0.1), CPU)
    decayed = {id(p) for g in optimiser.param_groups if g["weight_decay"] for p in g["params"]}
    every = [id(p) for g in optimiser.param_groups for p in g["params"]]
    assert len(every) == len(set(every)) == len(list(flow.parameters()))
    for name, parameter in flow.named_parameters():
        assert (id(parameter) in decayed) == (parameter.dim() == 2 and not name.startswith("base")), name


def test_a_fixed_base_is_not_optimised() -> None:
    flow = tiny_flow()
    flow.base.logits.requires_grad_(False)
    optimiser = make_optimiser(Step(flow, Marginal()), Options(), CPU)
    assert all(p is not flow.base.logits for g in optimiser.param_groups for p in g["params"])


def _change(flow: LatentFlow, **options: Any) -> float:
    """How far one epoch of one step moves all weights together."""
    before = [p.detach().clone() for p in flow.parameters()]
    chosen = Options(epochs=1, batch_size=140, device="cpu", schedule="constant", optimiser="sgd", **options)
    Trainer(flow, Marginal(), tiny_dataset(validation=False), chosen).train()
    pairs = zip(flow.parameters(), before, strict=True)
    return math.sqrt(sum(float((p.detach() - q).square().sum()) for p, q in pairs))


def test_clipping_bounds_the_norm_of_the_gradient() -> None:
    free = _change(tiny_flow(), lr=1.0)
    assert free > 0.011
    assert _change(tiny_flow(), lr=1.0, clip=0.01) == pytest.approx(0.01, rel=1e-3)
    assert _change(tiny_flow(), lr=1.0, clip=100 * free) == pytest.approx(free, rel=1e-6)


def test_the_schedule_reaches_the_optimiser() -> None:
    """Warm-up makes the first step's rate lr / (warmup + 1)."""
    assert _change(tiny_flow(), lr=1.0, warmup=9) == pytest.approx(
        0.1 * _change(tiny_flow(), lr=1.0), rel=1e-4
    )
