"""Codes: words that are written exactly, read exactly, and worth more than they cost."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from research.depth.codes import _most_independent, choose_code, coded_flow
from tiny_runs import StopAt, assert_same_run, continue_run, train_run
from xorflow import FactorisedBase, LatentFlow, evaluate
from xorflow.conditioners import Source
from xorflow.data import Split
from xorflow.errors import ConfigError
from xorflow.flows import with_base
from xorflow.training import Interrupted, Observer, Options, build_data, create_run, open_run

COINS = 5


def coins(rows: int = 600) -> torch.Tensor:
    """Images of 8 x 8, blank but for five coins in the middle."""
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(rows, 8, 8)
    x[:, 3, 2 : 2 + COINS] = torch.randint(2, (rows, COINS), generator=generator).float()
    x[0] = 1  # data whose pixels never vary are refused
    return x.flatten(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("coins")
    np.save(path / "coins.npy", coins().reshape(-1, 8, 8).numpy().astype(np.uint8))
    return path


def options(folder: Path, **changes: object) -> Options:
    given = {
        "data": str(folder / "coins.npy"),
        "base": "learned:p0=0.99999",
        "conditioner": "made:hidden=32,direct=true",
        "layers": 2,
        "order": "inward",
        "estimator": "maximum-likelihood:samples=1",
        "epochs": 30,
        "lr": 0.01,
        "batch_size": 50,
        "device": "cpu",
        "evaluation_samples": 2,
    }
    return Options().replace(**given | changes)


def new_flow(chosen: Options, code: tuple[int, int] = (1, 5)) -> LatentFlow:
    return coded_flow(*code, chosen, build_data(chosen))


def train(
    chosen: Options, out: Path, observer: Observer | None = None, code: tuple[int, int] = (1, 5)
) -> None:
    """A run as the study of depth makes it."""
    create_run(chosen.without_model(), out, model=new_flow(chosen, code), dataset=build_data(chosen))
    continue_run(out, {}, observer)


def every(count: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product((0.0, 1.0), repeat=count)))


def rows_with(features: torch.Tensor, still: torch.Tensor) -> torch.Tensor:
    """Rows that are still but for the features, which take all values."""
    rows = still.repeat(2 ** len(features), 1)
    rows[:, features] = every(len(features))
    return rows


def tossed(rows: int = 400) -> torch.Tensor:
    """Twenty coins, ten features that are 0 and ten that are 1."""
    generator = torch.Generator().manual_seed(1)
    x = (torch.rand(rows, 40, generator=generator) < 0.5).to(torch.uint8)
    x[:, 20:30], x[:, 30:] = 0, 1
    x[0] = 1 - x[0]
    return x


@pytest.fixture(scope="module")
def of_tosses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tosses") / "tosses.npy"
    np.save(path, tossed().numpy())
    return path


@pytest.mark.parametrize("layers", [2, 3])
def test_writers_flip_the_slot_of_the_word_and_nothing_else(of_tosses: Path, layers: int) -> None:
    chosen = options(of_tosses.parent, data=str(of_tosses), order="natural", layers=layers, validation=0.1)
    dataset = build_data(chosen)
    code = choose_code(2, 3, dataset.train, layers)
    assert [len(groups) for groups in code.writers] == ([2] if layers == 2 else [1, 1])
    flow = new_flow(chosen, (2, 3))
    still = (code.ones > 0.5).float()
    for group in code.groups:
        assert set(group.slots.tolist()) <= set(range(20, 40))
        assert (
            len(group.codewords) == len(set(map(tuple, group.codewords.tolist()))) == 7
        )  # all but the silent one
        rows = rows_with(group.features, still)
        x = rows.to(torch.uint8)
        trace = flow.run(x, draws="greedy", stop=layers - 1)
        changed = (trace.end.state != rows).float()
        assert float(changed[:, group.features].sum()) == 0
        spelled = (rows[:, None, group.features] == group.codewords).all(-1).float()  # (rows, words)
        assert torch.equal(changed[:, group.slots], spelled)
        # what is drawn is what is most probable
        drawn = flow.run(x, draws=torch.rand(len(rows), layers, 40), stop=layers - 1)
        assert torch.equal(drawn.end.state, trace.end.state)
        # and the last layer is sure of the features, before it is trained
        logits = flow.layers[-1].conditioner({Source.STATE: trace.end.state})[:, group.features]
        told = logits[spelled.any(1)]
        assert bool(((told > 0).float() == rows[spelled.any(1)][:, group.features]).all())
        assert float(told.detach().abs().min()) > 3


def test_how_often_slots_are_one_after_writing(of_tosses: Path) -> None:
    chosen = options(of_tosses.parent, data=str(of_tosses), order="natural")
    flow, rows = new_flow(chosen, (2, 3)), build_data(chosen).train
    code = choose_code(2, 3, rows, 2)
    written = flow.run(rows.values, draws="greedy", stop=1).end.state
    assert torch.allclose(code.written(), written.float().mean(0), atol=0.01)


def test_data_whose_slots_are_usually_one_are_coded_as_well(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "negative.npy", 1 - np.load(folder / "coins.npy"))
    results = []
    for name, data in (("coins", folder / "coins.npy"), ("negative", tmp_path / "negative.npy")):
        train(options(folder, data=str(data)), tmp_path / name)
        flow = with_base(open_run(tmp_path / name).latent, FactorisedBase(64))
        rows = torch.from_numpy(np.load(data)).flatten(1)[1:]
        results.append(evaluate.importance(flow, rows, samples=2).nll)
    assert results[1] == pytest.approx(results[0], abs=0.1)


def test_grey_values_are_coded_as_what_is_drawn_from_them() -> None:
    grey = torch.zeros(3000, 12, dtype=torch.uint8)
    grey[:, 2:5] = 128
    split = Split(grey, stochastic=True)
    code = choose_code(1, 3, split, 2)
    (group,) = code.groups
    assert sorted(group.features.tolist()) == [2, 3, 4]
    assert code.ones[2:5].tolist() == pytest.approx([128 / 255] * 3)
    assert group.told.tolist() == pytest.approx(
        [1 / 8] * 7, abs=4 * (7 / 64 / 3000) ** 0.5
    )  # standard errors
    again = choose_code(1, 3, split, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(vars(group).values(), vars(again.groups[0]).values(), strict=True)
    )


def test_each_feature_is_the_one_that_those_before_tell_least_of() -> None:
    generator = torch.Generator().manual_seed(4)
    sources = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    mixed = sources @ torch.randn(5, 9, generator=generator, dtype=torch.float64)  # of rank 5
    covariance = torch.cov(mixed.T)
    found = _most_independent(covariance, 7).tolist()
    assert len(set(found)) == 7
    for step in range(1, 5):
        before = found[:step]
        known = torch.linalg.solve(covariance[before][:, before], covariance[before])
        left = covariance.diagonal() - (covariance[before] * known).sum(0)
        assert int(left.argmax()) == found[step]


def test_no_slots_no_code() -> None:
    generator = torch.Generator().manual_seed(5)
    x = (torch.rand(300, 40, generator=generator) < 0.5).to(torch.uint8)
    with pytest.raises(ConfigError, match="fewer than one row in 5, and the data have 0 of them"):
        choose_code(1, 5, Split(x), 2)


def test_words_are_the_most_frequent_values_if_there_are_few_slots() -> None:
    generator = torch.Generator().manual_seed(2)
    probabilities = torch.tensor([0.5, 0.4, 0.3])
    x = torch.zeros(2000, 8)
    x[:, :3] = (torch.rand(2000, 3, generator=generator) < probabilities).float()
    code = choose_code(1, 3, Split(x.to(torch.uint8)), 2)
    (group,) = code.groups
    assert sorted(group.features.tolist()) == [0, 1, 2]
    assert len(group.slots) == 5
    values, counts = x[:, group.features].unique(dim=0, return_counts=True)
    frequent = values[counts.argsort(descending=True)]
    assert {tuple(w) for w in group.codewords.tolist()} == {tuple(w) for w in frequent[1:6].tolist()}
    silent = (x[:, None, group.features] != group.codewords).any(-1).all(-1)
    assert torch.allclose(group.silence, x[silent][:, group.features].mean(0), atol=1e-3)


def test_a_code_is_worth_what_it_was_computed_to_be(folder: Path, tmp_path: Path) -> None:
    """Five coins cost 5 log 2 at depth 1; a flip of 31 costs 2.3 - 0.1, and coins that are certain 0.1 each."""
    train(options(folder), tmp_path / "two")
    train_run(options(folder, layers=1, estimator="maximum-likelihood"), tmp_path / "one")
    rows, fixed = coins()[1:].to(torch.uint8), FactorisedBase(64)
    one, two = (with_base(open_run(tmp_path / name).latent, fixed) for name in ("one", "two"))
    blank, flip = -math.log(0.9), math.log(9)
    assert evaluate.exact(one, rows).nll == pytest.approx(59 * blank + COINS * math.log(2), abs=0.05)
    found = evaluate.importance(two, rows, samples=2)
    assert found.nll == pytest.approx(64 * blank + flip * 31 / 32, abs=0.1)
    assert evaluate.greedy(two, rows).nll == pytest.approx(found.nll, abs=0.05)  # nothing is left to chance
    uses = evaluate.layer_use(two, rows)
    assert uses[0].flip_rate * 64 == pytest.approx(31 / 32, abs=0.05)


def test_a_flow_with_a_code_is_a_distribution_and_is_sampled_from(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.zeros(500, 10)
    x[:, 4:7] = torch.randint(2, (500, 3), generator=generator).float()
    x[0] = 1
    np.save(tmp_path / "few.npy", x.numpy().astype(np.uint8))
    chosen = options(tmp_path, data=str(tmp_path / "few.npy"), order="natural", epochs=3)
    train(chosen, tmp_path / "run", code=(1, 3))
    flow = with_base(open_run(tmp_path / "run").latent, FactorisedBase(10)).double()
    rows = every(10).to(torch.uint8)
    probabilities = flow.log_likelihood(rows).detach().exp()  # by enumeration of all choices
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-9)
    drawn = flow().sample((20_000,), generator=torch.Generator().manual_seed(0))
    index = (drawn.long() * 2 ** torch.arange(9, -1, -1)).sum(1)
    frequencies = torch.bincount(index, minlength=1024) / len(drawn)
    errors = (frequencies - probabilities) / (probabilities * (1 - probabilities) / len(drawn)).sqrt()
    often = probabilities > 1e-3  # about 20 draws or more
    assert float(errors[often].abs().max()) < 5  # standard errors


def test_a_run_with_a_code_resumes(folder: Path, tmp_path: Path) -> None:
    train(options(folder, epochs=2), tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(options(folder, epochs=2), tmp_path / "cut", StopAt({12}))
    continue_run(tmp_path / "cut", {})
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_the_code_stays_whatever_the_optimiser_does(folder: Path, tmp_path: Path) -> None:
    chosen = options(folder, optimiser="adamw", weight_decay=0.1, epochs=2)
    before = new_flow(chosen).layers[0].state_dict()
    train(chosen, tmp_path / "run")
    after = open_run(tmp_path / "run").latent.layers[0].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_seeds_share_a_code(folder: Path) -> None:
    one, two = (new_flow(options(folder, seed=seed)) for seed in (0, 1))
    orders = [[layer.conditioner.order for layer in flow.layers] for flow in (one, two)]
    assert orders[0] == orders[1]
