"""Rows with strong conditioners: what their figures are, the command that makes them, and the committed table."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import Command
from research.__main__ import main
from research.experiment import Trained
from research.rows import chosen
from research.strong.rows import MIXED_ROWS, STRONG_BUDGETS, STRONG_ROWS
from research.strong.score import greedy_on_fixed_base, score
from tiny_runs import read
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


# ---- `python -m research strong` as a person types it: every row in the smallest budget, and how it goes on ----


SMOKE = ("strong", "--budget", "smoke", "--device", "cpu")
KEYS = {
    "id", "recipe", "nll", "kind", "stderr", "draws", "greedy", "refit", "train_nll", "parameters", "seconds", "seeds",
}  # fmt: skip


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strong")
    with pytest.raises(SystemExit) as stop:
        main([*SMOKE, "--out", str(folder / "out"), "--work", str(folder / "work")])
    assert stop.value.code == 0
    return folder


def test_the_table(smoke: Path) -> None:
    rows = {row["id"]: row for row in read(smoke / "out/table.json")["rows"]}
    assert list(rows) == [row.id for row in (*STRONG_ROWS, *MIXED_ROWS)]
    seeds = {row.id: row.seeds for row in STRONG_ROWS}
    for row in rows.values():
        assert row.keys() >= KEYS
        assert row["kind"] == "exact"
        assert row["seeds"] == list(range(seeds[row["part"] or row["id"]]))
        assert abs(row["bf16"]["difference"]) < 0.1
    mixed, part = rows["transformer-mixed"], rows[MIXED_ROWS[0].part.id]
    # a mixture of two loses at most log 2 to either
    assert mixed["nll"] < min(part["each"]["nll"]) + 0.7
    assert mixed["parameters"] == 2 * part["parameters"]
    assert [len(rows[name]["components"]) for name in ("made", "transformer", part["id"], mixed["id"])] == [
        1, 2, 2, 4
    ]  # fmt: skip
    assert mixed["components"][:2] == pytest.approx(part["components"])
    assert len(rows["transformer-four"]["components"]) == 4
    assert {path.name for path in (smoke / "out").iterdir()} == {
        "plan.json", "runs", "table.json", "table.md", "samples.png"
    }  # fmt: skip


def test_a_recipe_is_selected_once(smoke: Path) -> None:
    names = {path.name for path in (smoke / "out/runs").iterdir()}
    assert "transformer-pair.ours.seed1.final.json" in names
    assert "transformer-pair.ours.seed1.select.json" not in names


def test_a_second_time_there_is_nothing_to_do(smoke: Path, research: Command) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (smoke / "out/runs").iterdir()}
    said = research(*SMOKE, "--out", smoke / "out", "--work", smoke / "elsewhere")
    assert (said.code, said.err) == (0, "")
    assert {path.name: path.stat().st_mtime_ns for path in (smoke / "out/runs").iterdir()} == before
    assert "transformer-mixed" in said.out


def test_a_mixture_of_other_recipes_is_not_passed_off_as_one_of_these(
    smoke: Path, research: Command, tmp_path: Path
) -> None:
    shutil.copytree(smoke / "out", tmp_path / "out")
    path = tmp_path / "out/runs/transformer-mixed.json"
    path.write_text(json.dumps(read(path) | {"recipe": "transformer-pair@0 x 2"}))
    refused = research(*SMOKE, "--out", tmp_path / "out", "--work", smoke / "work").refused()
    assert "is of transformer-pair@0 x 2, and row transformer-mixed now of transformer-pair@" in refused


def test_a_mixture_waits_for_its_parts(research: Command, tmp_path: Path) -> None:
    said = research(
        *SMOKE, "--rows", "made,transformer-mixed", "--out", tmp_path / "out", "--work", tmp_path / "work"
    )
    assert said.code == 0
    assert "transformer-mixed waits for the weights of its parts" in said.out


# ---- the committed table meets what was aimed at; nothing here is trained ----


TABLE = Path(__file__).parents[2] / "research/results/strong/table.json"
TARGETS = {"transformer-pair": (600, 77.80), "transformer-four": (1500, 77.4)}  # seconds of training, nats
RECURRENT_NLL = 81
BFLOAT16 = 0.02  # nats that rounded products may change a likelihood by
SAMPLES, THEIR_SECONDS = 100, 10


@pytest.fixture(scope="module")
def committed() -> dict[str, dict[str, Any]]:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    assert table["budget"] == "full"
    return {row["id"]: row for row in table["rows"]}


def test_every_figure_is_exact_and_the_mean_of_five_draws(committed: dict[str, dict[str, Any]]) -> None:
    for row in committed.values():
        assert row["kind"] == "exact"
        assert row["draws"]["seeds"] == [0, 1, 2, 3, 4]
        assert row["nll"] == pytest.approx(sum(row["draws"]["nll"]) / 5)
        assert row["train_nll"] < row["nll"] < row["refit"] < row["greedy_fixed"]
        assert abs(row["bf16"]["difference"]) <= BFLOAT16
        assert row["sampling"]["samples"] == SAMPLES
        assert row["sampling"]["seconds"] <= THEIR_SECONDS


@pytest.mark.parametrize("name", TARGETS)
def test_a_recipe_reaches_its_figure_in_its_time_with_two_seeds(
    name: str, committed: dict[str, dict[str, Any]]
) -> None:
    row, (seconds, nll) = committed[name], TARGETS[name]
    assert row["seeds"] == [0, 1]
    assert len(row["each"]["nll"]) == 2
    assert max(row["each"]["nll"]) <= nll
    assert row["seconds"] <= seconds
    assert row["recipe"] == RECIPES[name].label


def test_a_recurrent_network_reaches_its_figure(committed: dict[str, dict[str, Any]]) -> None:
    assert committed["recurrent"]["nll"] <= RECURRENT_NLL
    assert committed["recurrent"]["recipe"] == RECIPES["recurrent"].label


def test_what_was_selected_on_validation_data_is_what_was_trained(
    committed: dict[str, dict[str, Any]],
) -> None:
    for row in committed.values():
        assert (row["part"] is None) == bool(row["validation"])
