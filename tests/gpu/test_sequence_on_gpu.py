"""Transformers and recurrent networks on a CUDA device: captured steps, dropout inside of them, samples, rounded products."""

import time
from typing import Any

import pytest
import torch

import xorflow as xf
from tiny_runs import call, make_steps
from xorflow._cuda.steps import CapturedSteps, FusedAdam
from xorflow._devices import dropout_generator
from xorflow.flows.layer import by_passes
from xorflow.training import Options, Trainer, init_from_data
from xorflow.training.build import build_data, build_estimator, build_flow

CUDA = torch.device("cuda", 0)
SMALL = {"batch_size": 40, "validation": 54_000, "device": "cuda"}


def transformer(**settings: Any) -> dict[str, Any]:
    return {
        "conditioner": call("transformer", **{"width": 32, "depth": 2, "heads": 4, "dropout": 0.0} | settings)
    }


def recurrent(**settings: Any) -> dict[str, Any]:
    return {"conditioner": call("recurrent", **{"width": 32, "depth": 2} | settings)}


KINDS: dict[str, dict[str, Any]] = {
    "transformer": transformer(),
    "transformer, bf16": transformer() | {"precision": "bf16-mixed"},
    "transformer, labels": transformer() | {"label": True, "clip": 1.0, "average": 0.9},
    "transformer in parts": transformer() | {"accumulate": 3},
    "transformer, compiled": transformer() | {"precision": "bf16-mixed", "compile": True},
    "mixture": transformer(depth=1) | {"mixture": "2"},
    "split mixture, soft targets": transformer(depth=1)
    | {
        "mixture": "2",
        "shared": False,
        "estimator": "maximum-likelihood:split_batch=true,soft_targets=true",
    },
    "recurrent": recurrent(),
    "recurrent, lstm, bf16": recurrent(cell="lstm") | {"precision": "bf16-mixed"},
}


def _trainer(**options: Any) -> Trainer:
    chosen = Options().replace(**(SMALL | options))
    dataset = build_data(chosen)
    torch.manual_seed(0)
    flow = build_flow(chosen, dataset)
    init_from_data(flow, dataset.train)
    return Trainer(flow, build_estimator(chosen.estimator), dataset, chosen)


def _advance(trainer: Trainer, captured: CapturedSteps | None, steps: int) -> float:
    """The mean of the bound over the first steps."""
    make_steps(trainer, captured, steps)
    return float(trainer.bound_sum) / steps


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_are_the_plain_ones(kind: str) -> None:
    """To rounding: some fused kernels add up gradients in an order that changes."""
    plain, trainer = _trainer(**KINDS[kind]), _trainer(**KINDS[kind])
    captured = trainer.captured_steps()
    assert captured is not None, trainer.not_captured
    expected = _advance(plain, None, 11)
    assert _advance(trainer, captured, 11) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("kind", ["transformer", "mixture", "recurrent"])
def test_weights_that_change_beside_the_backward_pass_are_those_that_change_after_it(kind: str) -> None:
    """All but the few whose first gradients are so small that rounding turns Adam's step around."""
    plain, captured = (_trainer(**KINDS[kind], precision="32-true") for _ in range(2))
    assert isinstance(captured.optimiser, FusedAdam)
    _advance(plain, None, 3)
    _advance(captured, CapturedSteps(captured, 0), 3)
    for expected, weight in zip(plain.flow.parameters(), captured.flow.parameters(), strict=True):
        apart = (weight - expected).abs() > 0.1 * plain.options.lr
        assert float(apart.double().mean()) < 0.01


@pytest.mark.parametrize("network", [transformer(dropout=0.5), recurrent(dropout=0.5)])
def test_dropout_in_a_captured_step_follows_the_generator(network: dict[str, Any]) -> None:
    def bound(seed: int) -> float:
        trainer = _trainer(**network)
        captured, generator = CapturedSteps(trainer, 0), dropout_generator(trainer.flow, CUDA)
        assert generator is not None
        generator.manual_seed(seed)
        return _advance(trainer, captured, 1)

    first, again, other = bound(1), bound(1), bound(2)
    assert again == pytest.approx(first, rel=1e-6)
    assert abs(other - first) > 1e-5 * abs(first)


@pytest.mark.parametrize("network", [transformer(), recurrent()])
def test_cached_samples_are_those_of_whole_passes(
    network: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = _trainer(**network, precision="64-true").flow.double().eval()
    noise = flow.draw_noise(8, torch.Generator(CUDA).manual_seed(0))
    found = flow.sample_with(noise)
    monkeypatch.setattr(type(flow.layers[0].conditioner), "incremental", lambda *_: None)
    assert torch.equal(flow.sample_with(noise), found)


@torch.no_grad()
def _assert_launched(flow: xf.LatentFlow, context: torch.Tensor | None = None) -> None:
    """Captured steps give the very integers of whole passes, without a pass that mends them."""
    noise = flow.draw_noise(8, torch.Generator(CUDA).manual_seed(0))
    net = flow.layers[0].conditioner
    decoder = net.incremental(8, context, 56)
    assert decoder is not None
    order = torch.tensor(net.order, device=CUDA)
    y = flow.base.sample(noise.base).index_select(1, order)
    found = decoder.decode(y, noise.layers[:, 0].index_select(1, order))
    assert found is not None, "steps are not captured"
    expected = by_passes(flow.layers[0], flow.base.sample(noise.base), noise.layers[:, 0], context)
    assert torch.equal(found, expected.index_select(1, order))


@pytest.mark.parametrize(
    "changes",
    [transformer(), transformer(rotary=True) | {"skip": 0.01}, transformer() | {"label": True}],
)
def test_launched_steps_give_the_samples_of_whole_passes(changes: dict[str, Any]) -> None:
    flow = _trainer(precision="64-true", **changes).flow.double().eval()
    context = torch.eye(10, device=CUDA, dtype=torch.float64)[:8] if changes.get("label") else None
    for _ in range(2):  # a second decoder captures anew
        _assert_launched(flow, context)


def test_a_hundred_samples_of_the_large_transformer_take_a_second() -> None:
    flow = _trainer(**transformer(width=256, depth=8, heads=8)).flow.eval()
    flow().sample((2,))
    torch.cuda.synchronize()
    began = time.perf_counter()
    assert flow().sample((100,)).shape == (100, 784)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 2


def test_rounded_products_hardly_change_a_likelihood() -> None:
    trainer = _trainer(**transformer(width=64))
    _advance(trainer, None, 20)
    x = xf.data.mnist().test.values[:200].to(CUDA)
    exact = xf.evaluate.exact(trainer.flow, x)
    rounded = xf.evaluate.exact(trainer.flow, x, autocast=torch.bfloat16)
    assert rounded.nll == pytest.approx(exact.nll, abs=0.1)
