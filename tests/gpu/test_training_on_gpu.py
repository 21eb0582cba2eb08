"""Captured steps against plain ones, interrupted runs, and data that never wait for the host, on a CUDA device."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny_runs import StopAt, continue_run, make_steps, train_run
from xorflow._cuda.steps import CapturedSteps
from xorflow.data import Split, validate
from xorflow.errors import DataError, TrainingError
from xorflow.estimators import Loss, MaximumLikelihood
from xorflow.flows import LatentFlow, Point
from xorflow.training import Interrupted, Job, Options, Trainer, optimiser, run_jobs
from xorflow.training.build import build_data, build_estimator, build_flow
from xorflow.training.checkpoint import load_tensors

SMALL = {
    "conditioner": "made:hidden=64",
    "epochs": 2,
    "batch_size": 250,
    "validation": 54_000,
    "device": "cuda",
}
KINDS = {
    "marginal": {},
    "fixed base": {"base": "fixed"},
    "average and clip": {"average": 0.9, "clip": 1.0, "warmup": 3},
    "adamw": {"optimiser": "adamw", "weight_decay": 0.01},
    "sgd": {"optimiser": "sgd", "lr": 1e-4},
    "bf16": {"precision": "bf16-mixed"},
    "float64": {"precision": "64-true"},
    "labels": {"label": True},
    "straight-through, depth 2": {"layers": 2, "order": "alternating", "estimator": "straight-through"},
    "marginal, depth 2": {"layers": 2, "order": "alternating", "estimator": "maximum-likelihood:samples=2"},
    "coupling": {
        "layers": 2, "conditioner": "coupling:hidden=64,mask=checkerboard", "estimator": "maximum-likelihood:samples=2",
    },
    "running mean": {"layers": 2, "order": "alternating", "estimator": "score-function:standardise=feature"},
    "recurrent, muon": {
        "optimiser": "muon", "conditioner": "recurrent:width=32", "skip": 1e-3,
    },
    "muon": {
        "optimiser": "muon", "weight_decay": 0.01, "clip": 1.0, "skip": 1e-3,
        "conditioner": "transformer:width=32,depth=2,heads=2,dropout=0,rotary=true",
    },
}  # fmt: skip
AMPLIFIED = {"muon": 1e-4, "recurrent, muon": 1e-4}
"""How far two ways may be apart where small differences of gradients grow; the matrices move by 0.01 a step."""


def _trainer(**options: object) -> Trainer:
    chosen = Options().replace(**(SMALL | options))
    dataset = build_data(chosen)
    torch.manual_seed(0)
    return Trainer(build_flow(chosen, dataset), build_estimator(chosen.estimator), dataset, chosen)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_are_the_plain_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # rounded, the least difference becomes a large one wherever a gradient is almost nothing
    exact = optimiser.orthogonal
    monkeypatch.setattr(optimiser, "orthogonal", lambda matrices: exact(matrices.double()).to(matrices.dtype))
    weights = []
    for is_captured in (False, True):
        trainer = _trainer(**KINDS[kind])
        make_steps(trainer, CapturedSteps(trainer, 0) if is_captured else None, 11)
        weights.append([*(p.detach().clone() for p in trainer.flow.parameters()), trainer.bound_sum.clone()])
    for plain, captured in zip(*weights, strict=True):
        torch.testing.assert_close(captured, plain, rtol=1e-5, atol=AMPLIFIED.get(kind, 1e-6))


def test_captured_steps_are_chosen() -> None:
    trainer = _trainer()
    assert trainer.captured_steps() is not None
    assert trainer.not_captured is None


class _AsksTheHost(MaximumLikelihood):
    """An estimator that decides on the host, and does not say so."""

    def loss(self, flow: LatentFlow, start: Point, draws: Tensor | None) -> Loss:
        found = super().loss(flow, start, draws)
        return found if found.bound.item() < 0 else Loss(found.surrogate * 2, found.bound)


class _SaysSo(_AsksTheHost):
    def not_capturable(self, flow: LatentFlow) -> str | None:
        del flow
        return "it asks the host"


def test_a_capture_that_fails_leaves_the_plain_path(caplog: pytest.LogCaptureFixture) -> None:
    """With the same noise as if nothing had been tried; and other runs can still be captured."""
    found = []
    for estimator in (_AsksTheHost(samples=2), _SaysSo(samples=2)):
        chosen = Options().replace(**(SMALL | KINDS["marginal, depth 2"]))
        dataset = build_data(chosen)
        torch.manual_seed(0)
        trainer = Trainer(build_flow(chosen, dataset), estimator, dataset, chosen)
        trainer.train()
        assert trainer.not_captured is not None
        found.append(trainer)
    assert "capturing one failed" in caplog.text
    for tried, plain in zip(found[0].flow.parameters(), found[1].flow.parameters(), strict=True):
        torch.testing.assert_close(tried, plain, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[0].generator.get_state(), found[1].generator.get_state())
    trainer = _trainer()
    assert trainer.captured_steps() is not None
    assert trainer.not_captured is None


@pytest.mark.parametrize("kind", ["average and clip", "marginal, depth 2", "running mean"])
def test_an_interrupted_run_resumes_to_the_same_weights(kind: str, tmp_path: Path) -> None:
    options = Options().replace(**(SMALL | KINDS[kind]))
    train_run(options, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_run(options, tmp_path / "parts", StopAt((16,)))
    continue_run(tmp_path / "parts", {})
    whole, parts = (load_tensors(tmp_path / name, "weights") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_loss_that_is_no_number_stops_the_run_and_names_a_layer(tmp_path: Path) -> None:
    wild = {"optimiser": "sgd", "lr": 1e38, "schedule": "constant", "conditioner": "made:hidden=16+16"}
    with pytest.raises(TrainingError) as error:
        train_run(Options().replace(**(SMALL | wild)), tmp_path / "run")
    assert "is not finite at step 24 (epoch 1)" in str(error.value)  # at the end of an epoch
    assert "in layer 1" in str(error.value)  # its weights stay finite, for certain choices have no gradient
    assert "(on cuda steps are not looked at one by one" in str(error.value)
    assert not (tmp_path / "run/weights.safetensors").exists()


def test_runs_at_once_are_the_runs_alone(tmp_path: Path) -> None:
    """Bit for bit: each is a process of its own."""
    options = Options().replace(**SMALL)
    outcomes = run_jobs(
        [Job(options.replace(seed=seed), tmp_path / f"at-once-{seed}") for seed in range(2)], 2
    )
    assert [outcome.error for outcome in outcomes] == [None] * 2
    for seed in range(2):
        train_run(options.replace(seed=seed), tmp_path / f"alone-{seed}")
        found, expected = (
            load_tensors(tmp_path / f"{name}-{seed}", "weights") for name in ("at-once", "alone")
        )
        assert all(torch.equal(found[name], expected[name]) for name in expected)


# ---- data: nothing waits for the host, and a gather can be captured ----


GOOD = [[0, 1, 2], [1, 0, 3]]
CATEGORIES = (2, 2, 4)


def grey(n: int, d: int) -> Split:
    return Split((torch.arange(n * d) * 11 % 256).reshape(n, d).to(torch.uint8), stochastic=True)


@pytest.mark.parametrize("categories", [(4, 4, 4), CATEGORIES])
def test_one_synchronisation_on_a_gpu_and_of_floats_two(
    categories: tuple[int, ...], synchronisations
) -> None:
    for dtype in (torch.uint8, torch.int64, torch.float32):
        x = torch.tensor(GOOD, device="cuda", dtype=dtype)
        assert synchronisations(lambda x=x: validate(x, categories)) == (2 if dtype.is_floating_point else 1)
        assert validate(x, categories).device == x.device
        with pytest.raises(DataError, match="row 0, feature 0"):
            validate(x + 5, categories)


def test_gather_on_a_gpu_never_waits_and_can_be_captured(synchronisations) -> None:
    split = grey(64, 16).to("cuda")
    rows, noise = torch.zeros(8, dtype=torch.int64, device="cuda"), torch.zeros(8, 16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    assert synchronisations(lambda: split.gather(rows, noise)) == 0
    assert synchronisations(lambda: split.gather(rows, generator=generator)) == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = split.gather(rows, noise).x
    new_rows, new_noise = torch.randint(64, (8,)), torch.rand(8, 16)
    rows.copy_(new_rows)
    noise.copy_(new_noise)
    graph.replay()
    assert torch.equal(out.cpu(), grey(64, 16).gather(new_rows, new_noise).x)
    assert torch.equal(split.frozen(0).values.cpu(), grey(64, 16).frozen(0).values)
    with pytest.raises(DataError, match=r"torch\.Generator\('cuda'\)"):
        split.batch(3, torch.Generator())
