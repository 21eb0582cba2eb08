"""Rows with strong conditioners: what their figures are."""

import pytest
import torch

from research.experiment import Trained
from research.rows import chosen
from research.strong.rows import MIXED_ROWS, STRONG_BUDGETS, STRONG_ROWS
from research.strong.score import greedy_on_fixed_base, score
from xorflow import MADE, FactorisedBase, LatentFlow, Layer, Mixture, data, evaluate
from xorflow.errors import ConfigError
from xorflow.training import report
from xorflow.training.recipes import RECIPES


def flow(base: FactorisedBase, seed: int = 0) -> LatentFlow:
    torch.manual_seed(seed)
    return LatentFlow([Layer(MADE(6, hidden=(8,)))], base).double().eval()


def bits() -> data.Dataset:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(2, (60, 6), generator=generator, dtype=torch.uint8)
    return data.Dataset("bits", data.Split(values[:40]), None, data.Split(values[40:]), (2,) * 6)


def test_rows_are_recipes() -> None:
    for row in STRONG_ROWS:
        options = row.options("ours").to_json()
        expected = RECIPES[row.recipes["ours"]["recipe"]].options
        assert {key: options[key] for key in expected} == expected
        with pytest.raises(ConfigError, match="no variant"):
            row.options("improved")


def test_the_fixed_base_replaces_the_learned_one() -> None:
    split = bits().test
    assert split is not None
    fixed, learned = flow(FactorisedBase(6)), flow(FactorisedBase(6, p0=0.6, learned=True))
    expected = evaluate.greedy(fixed, split).nll

    def on_fixed_base(model: LatentFlow | Mixture) -> float:
        run = Trained(None, model, split, split, {}, STRONG_BUDGETS[0])
        return evaluate.exact(greedy_on_fixed_base(run), split).nll

    assert on_fixed_base(learned) == pytest.approx(expected, abs=1e-6)
    assert evaluate.greedy(learned, split).nll != pytest.approx(expected, abs=1e-3)
    twice = Mixture([learned, flow(FactorisedBase(6, p0=0.6, learned=True))])
    assert on_fixed_base(twice) == pytest.approx(expected, abs=1e-6)


def test_figures_of_data_that_are_drawn_once() -> None:
    dataset, model = bits(), flow(FactorisedBase(6, learned=True))
    assert dataset.test is not None
    known = report(model, dataset, 1, ("test",))["test"]
    found = score(Trained(None, model, dataset.test, dataset.train, known, STRONG_BUDGETS[0]))
    assert found["draws"] == {"seeds": [0], "nll": [pytest.approx(known["nll"])], "spread": 0}
    assert found["nll"] == pytest.approx(known["nll"])
    assert found["train_nll"] == pytest.approx(evaluate.exact(model, dataset.train).nll)


def test_five_draws_of_mnist() -> None:
    torch.manual_seed(0)
    model = LatentFlow([Layer(MADE(784, hidden=(4,)))], FactorisedBase(784, learned=True)).eval()
    mnist = data.mnist(validation=0)
    assert mnist.test is not None
    known = {
        "nll": evaluate.exact(model, mnist.test).nll,
        "stderr": 0.0,
        "greedy_nll": 0.0,
        "refit_nll": 0.0,
        "layers": [],
    }
    found = score(Trained(None, model, mnist.test, mnist.train, known, STRONG_BUDGETS[-1]))
    assert found["draws"]["seeds"] == [0, 1, 2, 3, 4]
    assert len(set(found["draws"]["nll"])) == 5
    assert found["nll"] == pytest.approx(sum(found["draws"]["nll"]) / 5)
    assert 0 < found["draws"]["spread"] < 5


def test_rows_by_name() -> None:
    rows = (*STRONG_ROWS, *MIXED_ROWS)
    assert [row.id for row in chosen("transformer-mixed,made", rows)] == ["made", "transformer-mixed"]
    with pytest.raises(ConfigError, match="--rows names rows of made, "):
        chosen("", rows)
