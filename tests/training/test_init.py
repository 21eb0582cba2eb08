"""Where training begins: at the best constant model that base and masks can express, or with the weights of another run."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from research.budgets import write_digits
from tiny_runs import train_run
from xorflow import LatentFlow, evaluate, load
from xorflow.data import Dataset, Split
from xorflow.errors import ConfigError, ModelError
from xorflow.training import Options, build_data, build_flow, independent_nll, init_from_data, open_run
from xorflow.training.build import category_frequencies
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


# ---- every model that the command line offers begins at about the best constant model that it can express ----


SIZES = {"bits": (2,) * 4, "three": (3,) * 3, "mixed": (2, 4, 3)}
TRANSFORMER = "transformer:width=8,depth=1,heads=2,dropout=0"
NETWORKS = {
    "made": {},
    "chain": {"variant": "chain"},
    "own": {"own": True},
    "affine": {"transform": "affine"},
    "transformer": {"conditioner": TRANSFORMER},
    "recurrent": {"conditioner": "recurrent:width=8"},
    "chain transformer": {"conditioner": TRANSFORMER, "variant": "chain"},
    "own recurrent": {"conditioner": "recurrent:width=8", "own": True},
    "affine transformer": {"conditioner": TRANSFORMER, "transform": "affine"},
    "affine coupling": {"conditioner": "coupling:hidden=8", "transform": "affine"},
    **{
        f"coupling {mask}": {"conditioner": f"coupling:hidden=8,mask={mask}"}
        for mask in ("halves", "alternate", "checkerboard", "random", "nested")
    },
}
POSTERIORS = ("none", "mlp", "made", "linear", "diagonal")
EXACT, BOUND = 0.6, 2.0
"""Nats above the best constant model: of the likelihood, and of the evidence bound, which also pays for draws."""


@cache
def dataset(kind: str) -> Dataset:
    """Two kinds of rows, each with noise; of bits, images of 2 x 2."""
    random, sizes = np.random.default_rng(0), SIZES[kind]
    prototypes = np.stack([random.integers(0, size, 2) for size in sizes], 1)
    noise = np.stack([random.integers(0, size, 60) for size in sizes], 1)
    chosen = prototypes[(random.random(60) < 0.2).astype(int)]
    x = torch.from_numpy(np.where(random.random(chosen.shape) < 0.2, noise, chosen))
    shape = (2, 2) if kind == "bits" else None
    return Dataset("in memory", Split(x), None, Split(x), categories=sizes, shape=shape)


def best_constant(flow: LatentFlow, data: Dataset) -> float:
    """By expectation maximisation over the choices of each feature, where some layer moves it."""
    frequencies = category_frequencies(data.train, flow.states.sizes)
    masks = [layer.conditioner.mask for layer in flow.layers]
    moved = torch.stack([torch.ones(flow.features).bool() if m is None else ~m for m in masks]).any(0)
    total = 0.0
    for d, size in enumerate(flow.states.sizes):
        row, wanted = flow.base.log_probs_of(d).exp().double(), frequencies[d]
        if flow.base.learned:
            reached = wanted
        elif not moved[d]:
            reached = row
        else:
            reached = _fitted(row, wanted)
        total -= float((counted(data, d, size) * reached.log()).sum())
    return total


def counted(data: Dataset, d: int, size: int) -> Tensor:
    return torch.bincount(data.train.values[:, d], minlength=size).double() / len(data.train)


def _fitted(row: Tensor, wanted: Tensor) -> Tensor:
    """The mixture of shifts of the base that is nearest to the frequencies."""
    size = len(row)
    shifted = torch.stack([row.roll(u) for u in range(size)])  # (u, k)
    weights = torch.full((size,), 1 / size, dtype=torch.float64)
    for _ in range(500):
        joint = weights[:, None] * shifted
        weights = (wanted * joint / joint.sum(0)).sum(1)
    return (weights[:, None] * shifted).sum(0)


def options_of(network: str, base: str, layers: int, posterior: str) -> Options:
    order = "natural" if "chain" in network or "coupling" in network else "alternating"
    shared = {"base": base, "layers": layers, "order": order, "conditioner": "made:hidden=8"}
    posterior = f"{posterior}:hidden=8" if posterior in ("mlp", "made") else posterior
    return Options().replace(**shared | {"posterior": posterior} | NETWORKS[network])


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("base", ["learned", "fixed"])
@pytest.mark.parametrize("network", list(NETWORKS))
@pytest.mark.parametrize("kind", list(SIZES))
def test_the_start_is_near_the_best_constant_model(
    kind: str, network: str, base: str, posterior: str
) -> None:
    data = dataset(kind)
    begun = 0
    for layers in (1, 2):
        try:
            flow = initialised_flow(options_of(network, base, layers, posterior), data)
        except (
            ConfigError,
            ModelError,
        ):  # refused whatever the start is: a mask without an image, a correction of own u
            continue
        assert isinstance(flow, LatentFlow)
        flow = flow.double().eval()
        best = best_constant(flow, data)
        assert evaluate.exact(flow, data.train).nll < best + EXACT, layers
        if posterior != "none":
            assert evaluate.elbo(flow, data.train, samples=20).nll < best + BOUND, layers
        begun += 1
    refused = (network.endswith(("checkerboard", "nested")) and kind != "bits") or (
        network.startswith("own") and posterior in ("linear", "diagonal")
    )
    assert bool(begun) != refused


# ---- the base that couplings leave the frequencies to, where features have different numbers of categories ----


def test_a_learned_base_of_unequal_categories_begins_finite() -> None:
    sizes = (2, 5, 3)
    values = torch.stack([torch.arange(30) % k for k in sizes], 1).to(torch.uint8)
    data = Dataset("rows", Split(values), None, None, sizes)
    flow = build_flow(Options(layers=2, conditioner="coupling:hidden=4"), data)
    init_from_data(flow, data.train)
    assert all(bool(weight.isfinite().all()) for weight in flow.parameters())
