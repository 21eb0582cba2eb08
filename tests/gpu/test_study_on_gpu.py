"""The study at full size on a CUDA device: captured draws, and the same answers as operation by operation."""

import pytest
import torch

from research.estimators import cost as study_cost
from research.estimators.measure import Bench
from xorflow.data import mnist
from xorflow.training import Options
from xorflow.training.build import build_flow, init_from_data

ESTIMATORS = [
    "straight-through", "score-function", "score-function:baseline=greedy",
    "score-function:baseline=leave-one-out,samples=4,sum_last=true",
    "vimco:samples=4", "disarm", "arms:samples=4", "rebar", "relax", "double-cv:samples=2", "concrete", "st-gumbel",
    "reinmax", "maximum-likelihood", "score-function:objective=elbo", "vimco:samples=2,proposal=q",
]  # fmt: skip


def bench(layers: int, draws: int = 32) -> Bench:
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
    return Bench(flow.to("cuda"), batches[0], batches[1:], draws)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("layers", [1, 2])
def test_every_estimator_is_captured_and_unbiased_if_it_says_so(layers: int) -> None:
    study = bench(layers)
    for text in ESTIMATORS:
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

    monkeypatch.setattr(study_cost, "_captured", never)
    for row, eager in zip(captured, bench(2, 128).measure(text)["rows"], strict=True):
        assert (row["step"], eager["step"]) == ("captured", "eager")
        error = (row["variance_stderr"] ** 2 + eager["variance_stderr"] ** 2) ** 0.5
        assert abs(row["variance"] - eager["variance"]) < 5 * error
