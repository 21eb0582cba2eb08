"""Runs that begin with the weights of another, and layers that keep what they begin with."""

from pathlib import Path

import pytest
import torch

from research.budgets import write_digits
from tiny_runs import train_run
from xorflow import LatentFlow, evaluate, load
from xorflow.errors import ConfigError
from xorflow.training import Options, build_data, independent_nll, open_run
from xorflow.training.run import initialised_flow

FIXED = {
    "base": "fixed",
    "epochs": 1,
    "conditioner": "made:hidden=16",
    "device": "cpu",
    "evaluation_samples": 2,
    "batch_size": 50,
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("digits") / "digits.npy"
    write_digits(path)
    return path


@pytest.fixture(scope="module")
def one(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one layer."""
    run = tmp_path_factory.mktemp("one") / "run"
    train_run(Options().replace(data=str(digits), **FIXED), run)
    return run


def new_flow(options: Options) -> LatentFlow:
    flow = initialised_flow(options, build_data(options))
    assert isinstance(flow, LatentFlow)
    return flow


def test_the_last_layers_are_the_run_and_the_others_near_the_identity(digits: Path, one: Path) -> None:
    options = Options().replace(
        data=str(digits), layers=3, order="random:1,reversed,natural", init=str(one), **FIXED
    )
    flow, before = new_flow(options), open_run(one).latent
    for mine, theirs in zip(flow.layers[-1].parameters(), before.layers[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    x = build_data(options).train.values[:50]
    trace = flow.run(x, draws=torch.rand(len(x), 3, 64))
    rates = trace.u.float().mean((0, 2))
    assert rates[:2].max() < 0.01
    assert float(torch.stack([n.mean for n in trace.generator[:2]]).detach().max()) < 0.01
    # what comes out is nearly what the run itself says
    drawn = flow.run(x, draws="greedy", stop=2)
    assert torch.equal(drawn.end.state, x)


def test_the_base_is_the_runs_own_unless_it_is_given(digits: Path, one: Path) -> None:
    shared = FIXED | {"data": str(digits), "base": "learned", "init": str(one)}
    before = open_run(one).latent
    assert torch.equal(new_flow(Options().replace(**shared)).base.logits, before.base.logits)
    flow = new_flow(Options().replace(**shared | {"base": "learned:p0=0.99"}))
    assert flow.base.log_table()[0].exp()[:, 0].tolist() == pytest.approx([0.99] * 64)
    for mine, theirs in zip(flow.layers[-1].parameters(), before.layers[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_run_that_starts_from_another_trains_and_can_be_read(
    digits: Path, one: Path, tmp_path: Path
) -> None:
    shared = {"data": str(digits), "layers": 2, "order": "reversed,natural", "init": str(one)}
    options = Options().replace(**FIXED).replace(**shared, estimator="vimco:samples=2,sum_last=true")
    train_run(options, tmp_path / "two")
    assert load(tmp_path / "two").depth == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"conditioner": "made:hidden=8"}, "layer 1 of the run in .* has another hidden of its conditioner"),
        ({"order": "reversed"}, "layer 1 of the run in .* has another order of its conditioner"),
        ({"init": "./nowhere"}, "there is no folder nowhere"),
    ],
)
def test_a_start_that_does_not_fit(digits: Path, one: Path, changes: dict, words: str) -> None:
    options = Options().replace(**{**FIXED, "data": str(digits), "init": str(one), **changes})
    with pytest.raises(ConfigError, match=words):
        new_flow(options)


def test_a_run_with_more_layers(digits: Path, tmp_path: Path) -> None:
    train_run(Options().replace(data=str(digits), layers=2, **FIXED), tmp_path / "two")
    with pytest.raises(
        ConfigError, match="has 2 layers, and a run that is initialised from it has as many or more; got 1"
    ):
        new_flow(Options().replace(data=str(digits), init=str(tmp_path / "two"), **FIXED))


def test_what_is_no_start() -> None:
    with pytest.raises(ConfigError, match=r"data, biases, random, or the folder of a run.*got 'zero'"):
        Options().replace(init="zero")


# ---- couplings with posteriors ----


@pytest.mark.parametrize("posterior", ["diagonal", "linear"])
@pytest.mark.parametrize("mask", ["nested", "random", "checkerboard"])
def test_a_coupling_begins_at_independent_features(digits: Path, mask: str, posterior: str) -> None:
    """Each feature is taken by one layer, which has its frequency and a posterior by Bayes' rule, or left to the base."""
    options = Options().replace(
        **{
            **FIXED,
            "base": "learned:p0=0.999",
            "data": str(digits),
            "conditioner": f"coupling:hidden=16,mask={mask}",
            "layers": 4,
        },
        posterior=posterior,
    )
    flow, data = new_flow(options), build_data(options)
    for layer in flow.layers:  # what the networks see does not matter yet
        with torch.no_grad():
            layer.conditioner.net.layers[-1].weight.zero_()  # pyright: ignore
    assert data.test is not None
    bound = evaluate.importance(flow, data.test, samples=20, proposal="q").nll
    independent = independent_nll(data, data.test)
    assert abs(bound - independent) < 0.05 * independent


def test_layers_of_random_masks_leave_features_for_later_ones(digits: Path) -> None:
    options = Options().replace(
        **FIXED
        | {"base": "learned", "data": str(digits), "layers": 6, "posterior": "diagonal"}
        | {"conditioner": "coupling:hidden=16,mask=random"}
    )
    flow = new_flow(options)
    taken = torch.stack([layer.posterior.slope != 0 for layer in flow.layers])  # pyright: ignore
    assert taken.sum(0).max() == 1
    counts = taken.sum(1).tolist()
    assert (counts[1], counts[3]) == (0, 0)
    assert counts[0] == 32
    assert counts[0] > counts[2] > counts[4] > 0
    assert counts[5] > 0
