"""Runs that are trained as one against the same runs alone: the same weights, noise and states, to rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_runs import tiny_dataset
from xorflow import MADE, FactorisedBase, LatentFlow, Layer
from xorflow.data import Dataset, Split
from xorflow.estimators import Loss, Marginal
from xorflow.training import Options, Trainer
from xorflow.training.build import build_estimator, build_flow
from xorflow.training.checkpoint import optimiser_tensors
from xorflow.training.engine import EagerEngine
from xorflow.training.ensemble import Apart, Ensemble
from xorflow.training.lockstep import train_together

DEEP = {"layers": 2, "order": "alternating"}
GREY: dict[str, dict[str, Any]] = {
    "marginal": {},
    "fixed base": {"base": "fixed"},
    "marginal, depth 2": DEEP | {"estimator": "marginal:samples=2"},
    "straight-through, depth 2": DEEP | {"estimator": "straight-through"},
    "coupling": {"layers": 2, "conditioner": "coupling", "mask": "halves", "estimator": "marginal:samples=2"},
    "grey": {"estimator": "marginal:grey=true"},
    "direct": {"direct": True, "hidden": [12, 8]},
    "average, clip and warm-up": {"average": 0.9, "clip": 0.1, "warmup": 3},
    "adamw": {"optimiser": "adamw", "weight_decay": 0.1},
    "sgd": {"optimiser": "sgd", "lr": 0.01},
}
ROWS: dict[str, dict[str, Any]] = {
    "marginal": {},
    "marginal, depth 2": DEEP | {"estimator": "marginal:samples=3"},
    "straight-through": {"estimator": "straight-through"},
    "affine": {"transform": "affine"},
}


def grey_dataset() -> Dataset:
    values = (torch.rand(120, 9, generator=torch.Generator().manual_seed(0)) * 255).to(torch.uint8)
    return Dataset("grey", Split(values, stochastic=True), None, None, categories=(2,) * 9)


def trainers(data: Dataset, seeds: int = 3, **changes: Any) -> list[Trainer]:
    usual = {"epochs": 2, "batch_size": 16, "device": "cpu", "lr": 0.02, "hidden": [12]}
    found = []
    for seed in range(seeds):
        options = Options(seed=seed).replace(**(usual | changes))
        torch.manual_seed(seed)
        estimator = build_estimator(options.estimator)
        found.append(Trainer(build_flow(options, data), estimator, data, options))
    return found


def make_steps(work: Any, order: Tensor, steps: int = 10) -> None:
    engine = EagerEngine(work)
    engine.begin_epoch(order, 0)
    for step in range(steps):
        engine.advance(step % 5, step, 1)


def both_ways(data: Dataset, **changes: Any) -> tuple[list[Trainer], list[Trainer]]:
    alone, together = trainers(data, **changes), trainers(data, **changes)
    for trainer in alone:
        make_steps(trainer.machinery, trainer.row_order(0))
    make_steps(Ensemble([t.machinery for t in together]), torch.stack([t.row_order(0) for t in together]))
    return alone, together


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Whatever a checkpoint holds."""
    optimiser = {f"optimiser.{name}": t for name, t in optimiser_tensors(trainer.optimiser).items()}
    return trainer.step_module.state_dict() | optimiser | (trainer.average or {})


def assert_same_runs(alone: list[Trainer], together: list[Trainer], atol: float) -> None:
    for one, other in zip(alone, together, strict=True):
        expected, found = everything(one), everything(other)
        assert expected.keys() == found.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=atol)
        torch.testing.assert_close(other._bound_sum, one._bound_sum, rtol=1e-6, atol=0)
        assert torch.equal(one.generator.get_state(), other.generator.get_state())


@pytest.mark.parametrize("kind", GREY)
def test_grey_values_in_float64(kind: str) -> None:
    assert_same_runs(*both_ways(grey_dataset(), precision="64-true", **GREY[kind]), atol=1e-10)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("context", [False, True])
def test_categories_in_float64(kind: str, context: bool) -> None:
    data = tiny_dataset(context=context, validation=False)
    assert_same_runs(*both_ways(data, precision="64-true", **ROWS[kind]), atol=1e-10)


@pytest.mark.parametrize("kind", ["marginal", "marginal, depth 2"])
def test_float32(kind: str) -> None:
    assert_same_runs(*both_ways(grey_dataset(), **GREY[kind]), atol=1e-5)


def test_estimators_keep_a_state_for_each_run() -> None:
    changes = DEEP | {"estimator": 'special-case:baseline="running-mean"'}
    alone, together = both_ways(grey_dataset(), **changes)
    assert_same_runs(alone, together, atol=1e-5)
    states = [list(trainer.estimator.state_dict().values()) for trainer in together]
    assert states[0]
    assert not torch.equal(states[0][0], states[1][0])


def test_masked_weights_stay_zero() -> None:
    _, together = both_ways(grey_dataset())
    for trainer in together:
        net = trainer.flow.layers[0].conditioner.net
        assert not bool((net[0].weight * (1 - net[0].mask)).any())


def test_a_run_that_is_no_number_any_more_leaves_the_others_alone() -> None:
    _, expected = both_ways(grey_dataset(), clip=0.1)
    found = trainers(grey_dataset(), clip=0.1)
    ensemble = Ensemble([t.machinery for t in found])
    next(found[1].flow.parameters()).data.fill_(torch.nan)
    make_steps(ensemble, torch.stack([t.row_order(0) for t in found]))
    assert bool(found[1]._bound_sum.isnan())
    weights = [list(t.flow.parameters()) for t in found]
    for k in (0, 2):
        assert all(torch.equal(a, b) for a, b in zip(weights[k], expected[k].flow.parameters(), strict=True))


def test_a_layer_that_is_used_twice_is_stacked_once() -> None:
    def shared(seed: int) -> Trainer:
        torch.manual_seed(seed)
        layer = Layer(MADE(9, (8,)))
        options = Options(seed=seed, epochs=2, batch_size=16, device="cpu", average=0.5, estimator="marginal")
        flow = LatentFlow([layer, layer], FactorisedBase(9))
        return Trainer(flow, Marginal(2), data, options)

    data = grey_dataset()
    alone, together = [shared(s) for s in range(2)], [shared(s) for s in range(2)]
    for trainer in alone:
        make_steps(trainer.machinery, trainer.row_order(0))
    make_steps(Ensemble([t.machinery for t in together]), torch.stack([t.row_order(0) for t in together]))
    assert_same_runs(alone, together, atol=1e-5)


class _Deciding(Marginal):
    """Looks at its loss on the host."""

    def loss(self, *args: Any) -> Loss:
        found = super().loss(*args)
        assert float(found.bound) < 0
        return found


def test_what_cannot_be_stacked_says_why_and_can_still_be_trained_alone() -> None:
    data = grey_dataset()
    with pytest.raises(Apart, match="one run is not several"):
        train_together(trainers(data, seeds=1))
    with pytest.raises(Apart, match="more than their seed"):
        Ensemble([trainers(data)[0].machinery, trainers(data, lr=0.5)[1].machinery])
    with pytest.raises(Apart, match="not the same tensor"):
        Ensemble([trainers(data)[0].machinery, trainers(grey_dataset())[1].machinery])
    with pytest.raises(Apart, match="bf16-mixed are trained one by one"):
        Ensemble([t.machinery for t in trainers(data, precision="bf16-mixed")])
    with pytest.raises(Apart, match="with Muon are trained one by one"):
        Ensemble([t.machinery for t in trainers(data, optimiser="muon")])
    other = trainers(data, seeds=2)
    object.__setattr__(other[1].options, "order", "reversed")
    flow = build_flow(other[1].options, data)
    object.__setattr__(other[1].options, "order", "natural")
    other[1] = Trainer(flow, Marginal(), data, other[1].options)
    with pytest.raises(Apart, match="models are not the same"):
        Ensemble([t.machinery for t in other])
    found = [Trainer(t.flow, _Deciding(), data, t.options) for t in trainers(data)]
    before = [t.generator.get_state() for t in found]
    with pytest.raises(Apart, match=r"cannot be stacked: .*"):
        Ensemble([t.machinery for t in found])
    assert all(torch.equal(t.generator.get_state(), state) for t, state in zip(found, before, strict=True))
    alone = trainers(data)
    for one, other_one in zip(found, alone, strict=True):
        one.train()
        other_one.train()
        pairs = zip(one.flow.parameters(), other_one.flow.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
