"""Every estimator in training: own parameters, checkpoints, several runs as one, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiny_runs import tiny_options, train_run
from xorflow.errors import ConfigError, ModelError
from xorflow.estimators import DoubleCV, Estimator, Loss, Rebar, Relax
from xorflow.training import ESTIMATORS, Options, Trainer, build_data, build_estimator, build_flow

DRAWING = [
    "score-function:baseline=leave-one-out,samples=2",
    "score-function:objective=elbo,baseline=leave-one-out,samples=2", "vimco:samples=2,sum_last=true",
    "vimco:samples=3,proposal=q", "disarm", "arms:samples=3,common=true", "rebar", "relax:hidden=2",
    "double-cv:samples=2", "concrete", "st-gumbel", "reinmax", "local-expectation", "score-function:baseline=none",
    "score-function:objective=elbo,baseline=none", "maximum-likelihood:samples=2", "straight-through",
]  # fmt: skip
OWN = {"rebar": Rebar, "relax": Relax, "double-cv:samples=2": DoubleCV}


@pytest.fixture
def bits(tmp_path: Path) -> Path:
    """Rows of five bits, of which the second copies the first and the fourth is mostly off."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2, (256, 5), dtype=np.uint8)
    x[:, 1] = x[:, 0]
    x[:, 3] &= rng.integers(0, 2, 256, dtype=np.uint8)
    np.save(tmp_path / "bits.npy", x)
    return tmp_path / "bits.npy"


def trainers(path: Path, estimator: str, seeds: int, **changes: Any) -> list[Trainer]:
    options = tiny_options(
        path, estimator=estimator, order="alternating", posterior="mlp:hidden=16", **changes
    )
    data, found = build_data(options), []
    for seed in range(seeds):
        torch.manual_seed(seed)
        flow = build_flow(options, data)
        found.append(Trainer(flow, build_estimator(estimator), data, options.replace(seed=seed)))
    return found


def trainer(path: Path, estimator: str, **changes: Any) -> Trainer:
    return trainers(path, estimator, 1, **changes)[0]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("estimator", [*DRAWING, "analytic", "analytic:objective=elbo"])
def test_every_estimator_trains(bits: Path, estimator: str, layers: int) -> None:
    """Fifteen passes over the data take the bound up, from the first epoch to the last."""
    if layers > 1 and estimator.startswith("analytic"):
        with pytest.raises(ModelError, match="needs one layer"):
            trainer(bits, estimator, layers=layers)
        return
    run = trainer(bits, estimator, layers=layers, epochs=15, lr=0.02)
    records: list[dict[str, Any]] = []
    run.observer = type("Watch", (), {"on_start": lambda *_: None, "on_step": lambda *_: None})()
    run.observer.on_epoch = records.append  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    run.train()
    assert records[-1]["train_nll"] < records[0]["train_nll"] - 0.1


@pytest.mark.parametrize("estimator", OWN)
def test_own_parameters_are_trained_and_lessen_the_second_loss(bits: Path, estimator: str) -> None:
    """The flow held still, each parameter moves, and the mean square of the gradient on fresh noise falls."""
    run = trainer(bits, estimator, layers=2, epochs=20, lr=0.1)
    own = run.estimator
    assert isinstance(own, tuple(OWN.values()))
    for parameter in run.flow.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():  # far from where they should be
        getattr(own, "alphas", getattr(own, "etas", None)).fill_(3.0)
    before = {name: p.detach().clone() for name, p in own.named_parameters()}
    values = [mean_control(run)]
    run.train()
    values.append(mean_control(run))
    assert values[1] < 0.7 * values[0]
    assert all(not torch.equal(p, before[name]) for name, p in own.named_parameters())
    grouped = {id(p) for group in run.optimiser.param_groups for p in group["params"]}
    assert {id(p) for p in own.parameters()} <= grouped


def mean_control(run: Trainer) -> float:
    x = run.dataset.train.gather(torch.arange(128)).x
    generator = torch.Generator().manual_seed(7)
    found = [run.estimator(run.flow, x, generator=generator).control for _ in range(20)]
    return float(torch.stack([value.detach() for value in found if value is not None]).mean())


@pytest.mark.parametrize("estimator", OWN)
def test_own_parameters_are_in_a_checkpoint(bits: Path, tmp_path: Path, estimator: str) -> None:
    options = tiny_options(bits, estimator=estimator, layers=2, lr=0.02)
    data = build_data(options)
    run = Trainer(build_flow(options, data), build_estimator(estimator), data, options, tmp_path / "run")
    run.train()
    run.save()
    again = Trainer(build_flow(options, data), build_estimator(estimator), data, options, tmp_path / "run")
    again.restore()
    pairs = zip(run.estimator.parameters(), again.estimator.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("estimator", OWN)
def test_own_parameters_are_named_by_the_seed(bits: Path, estimator: str) -> None:
    """Whatever the process has drawn before."""
    options = tiny_options(bits, estimator=estimator, layers=2)
    data, starts = build_data(options), []
    for state in range(2):
        torch.manual_seed(state)
        flow = build_flow(options, data)
        run = Trainer(flow, build_estimator(estimator), data, options)
        starts.append([p.detach() for p in run.estimator.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*starts, strict=True))


class Aimless(Estimator):
    """Returns a second loss, and has nothing that it could train."""

    def loss(self, flow, start, draws):
        value = flow.log_likelihood(start.x, start.context).mean()
        return Loss(surrogate=-value, bound=value.detach(), control=value.new_zeros(()))


def test_a_control_variate_without_parameters_is_refused(bits: Path) -> None:
    options = tiny_options(bits)
    data = build_data(options)
    flow = build_flow(options, data)
    with pytest.raises(ConfigError, match="Aimless trains a control variate that has no parameters"):
        Trainer(flow, Aimless(), data, options).train()


@pytest.mark.parametrize(
    ("estimator", "changes", "words"),
    [
        ("disarm", {"own": True}, "layer 1 sees its own u"),
        ("analytic", {"layers": 2}, "needs one layer; with 2 layers"),
        ("score-function:baseline=leave-one-out,samples=1", {}, "leaves none of 1"),
        ("relax:hidden=0", {}, "it has no parameters"),
        ("vimco:proposal=q", {"posterior": "none"}, "posterior=mlp"),
        (
            "vimco",
            {"posterior": "mlp"},
            "posterior has an effect only if the estimator draws from it, and 'vimco' does not",
        ),
        ("maximum-likelihood", {"posterior": "linear"}, "leave posterior out"),
    ],
)
def test_refusals_are_one_line(bits: Path, tmp_path: Path, estimator: str, changes: dict, words: str) -> None:
    options = tiny_options(bits, estimator=estimator, **changes)
    with pytest.raises((ConfigError, ModelError)) as error:
        train_run(options, tmp_path / "run")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("estimator", ["arms", "rebar", "relax"])
def test_binary_methods_refuse_more_categories(tmp_path: Path, estimator: str) -> None:
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).integers(0, 3, (60, 4), dtype=np.uint8))
    with pytest.raises(ModelError, match="for choices between two values"):
        train_run(tiny_options(tmp_path / "rows.npy", estimator=estimator), tmp_path / "run")


def test_all_names_are_here() -> None:
    named = {text.partition(":")[0] for text in (*DRAWING, "analytic")}
    assert named == set(ESTIMATORS) - {"proposal-prefix"}
    assert isinstance(Options().estimator, str)
