"""Each estimator's step at full size on a CUDA device, captured against eager, and the study of estimators there."""

import pytest
import torch

from research.estimators import measure
from tiny_runs import make_steps
from xorflow._cuda.steps import CapturedSteps
from xorflow.data import mnist
from xorflow.training import Options, Trainer
from xorflow.training.build import build_data, build_estimator, build_flow, init_from_data

SMALL = {
    "conditioner": "made:hidden=64",
    "batch_size": 64,
    "epochs": 1,
    "validation": 54_000,
    "device": "cuda",
    "precision": "32-true",
}
ESTIMATORS = [
    "score-function:baseline=leave-one-out,samples=3",
    "score-function:objective=elbo,baseline=leave-one-out,samples=2,sum_last=true", "vimco:samples=3",
    "vimco:samples=2,proposal=q,sum_last=true", "disarm", "disarm:sum_last=true,common=true", "arms:samples=3",
    "rebar", "rebar:sum_last=true", "relax", "relax:sum_last=true", "double-cv:samples=2",
    "double-cv:samples=2,sum_last=true", "concrete", "st-gumbel", "reinmax", "proposal-prefix",
    "proposal-prefix:mix=0.1,sum_last=true", "score-function", "score-function:baseline=greedy",
    "score-function:standardise=one",
    "score-function:credit=impatient,baseline=none,standardise=feature", "score-function:objective=elbo",
    "score-function:objective=elbo,baseline=greedy",
    "score-function:objective=elbo,sum_last=true",
]  # fmt: skip


def _trainer(estimator: str, layers: int, seed: int = 0) -> Trainer:
    options = Options().replace(
        **SMALL, layers=layers, order="alternating", posterior="mlp:hidden=64", estimator=estimator, seed=seed
    )
    dataset = build_data(options)
    torch.manual_seed(seed)
    return Trainer(build_flow(options, dataset), build_estimator(estimator), dataset, options)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("estimator", [*ESTIMATORS, "analytic", "local-expectation"])
def test_captured_steps_are_the_plain_ones(estimator: str, layers: int) -> None:
    deep_only = "sum_last" in estimator and estimator.startswith(("rebar", "relax", "double-cv"))
    if (layers == 1 and deep_only) or (layers == 2 and estimator in ("analytic", "local-expectation")):
        return  # refused
    weights = []
    for is_captured in (False, True):
        trainer = _trainer(estimator, layers)
        make_steps(trainer, CapturedSteps(trainer, 0) if is_captured else None, 9)
        weights.append(
            [
                *(p.detach().clone() for p in trainer.module.parameters()),
                *(b.detach().clone() for b in trainer.module.buffers()),  # what baselines remember
                trainer.bound_sum.clone(),
            ]
        )
    for plain, captured in zip(*weights, strict=True):
        assert bool(plain.isfinite().all())
        torch.testing.assert_close(captured, plain, rtol=1e-5, atol=1e-6)


# ---- the study: captured draws, and the same answers as operation by operation ----


STUDIED = [
    "straight-through", "score-function", "score-function:baseline=greedy",
    "score-function:baseline=leave-one-out,samples=4,sum_last=true",
    "vimco:samples=4", "disarm", "arms:samples=4", "rebar", "relax", "double-cv:samples=2", "concrete", "st-gumbel",
    "reinmax", "maximum-likelihood", "score-function:objective=elbo", "vimco:samples=2,proposal=q",
]  # fmt: skip


def bench(layers: int, draws: int = 32) -> measure.Bench:
    options = Options().replace(
        conditioner="made:hidden=64",
        layers=layers,
        order="alternating",
        posterior="mlp:hidden=64",
        base="fixed",
    )
    data = mnist()
    torch.manual_seed(0)
    flow = build_flow(options, data)
    init_from_data(flow, data.train)
    generator = torch.Generator().manual_seed(0)
    batches = [data.train.batch(16, generator) for _ in range(5)]
    return measure.Bench(flow.to("cuda"), batches[0], batches[1:], draws)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("layers", [1, 2])
def test_every_estimator_is_captured_and_unbiased_if_it_says_so(layers: int) -> None:
    study = bench(layers)
    for text in STUDIED:
        for row in study.measure(text)["rows"]:
            assert row["step"] == "captured", text
            assert row["milliseconds"] > 0
            if row["claim"] == "unbiased" and row["bias"] is not None:
                assert abs(row["bias"]) <= 4 * row["bias_noise"], row


@pytest.mark.parametrize("text", ["score-function", "disarm", "rebar"])
def test_captured_draws_are_of_the_same_law(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = bench(2, 128).measure(text)["rows"]

    def never(*arguments: object) -> None:
        raise RuntimeError("as a step that copies from the host")

    monkeypatch.setattr(measure, "_captured", never)
    for row, eager in zip(captured, bench(2, 128).measure(text)["rows"], strict=True):
        assert (row["step"], eager["step"]) == ("captured", "eager")
        error = (row["variance_stderr"] ** 2 + eager["variance_stderr"] ** 2) ** 0.5
        assert abs(row["variance"] - eager["variance"]) < 5 * error
