"""`xorflow recipes`, and runs that begin from one."""

import json
from pathlib import Path

import pytest

from command_line import Command
from tiny_runs import StopAt, read, rows_file, train_run
from xorflow.training import Interrupted, Options
from xorflow.training.recipes import AUTO, RECIPES, Recipe


def test_recipes_are_listed(xorflow: Command) -> None:
    said = xorflow("recipes")
    assert said.code == 0
    words = " ".join(said.out.split())
    for recipe in (AUTO, *RECIPES.values()):
        assert recipe.label in words
    assert f"{RECIPES['demo'].nll:.2f}" in words


def test_recipes_as_json(xorflow: Command) -> None:
    listed = json.loads(xorflow("recipes", "--json").out)
    assert [entry["name"] for entry in listed] == ["auto", *RECIPES]
    assert all({"version", "data", "summary", "options", "minutes", "nll"} <= set(entry) for entry in listed)


@pytest.fixture
def stew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = rows_file(tmp_path / "rows.npy")
    options = {
        "data": str(path),
        "conditioner": "made:hidden=8",
        "epochs": 3,
        "batch_size": 32,
        "device": "cpu",
    }
    monkeypatch.setitem(RECIPES, "stew", Recipe("stew", 2, "Small.", options, data=str(path)))
    return path


def test_a_run_from_a_recipe(xorflow: Command, stew: Path, tmp_path: Path) -> None:
    said = xorflow("train", "--recipe", "stew", "--epochs", "1", "--out", tmp_path / "run")
    assert said.code == 0
    config = read(tmp_path / "run/config.json")
    assert (config["recipe"], config["conditioner"], config["epochs"]) == ("stew@2", "made:hidden=8", 1)


def test_one_run_for_each_seed(xorflow: Command, stew: Path, tmp_path: Path) -> None:
    given = ("train", "--recipe", "stew", "--epochs", "1", "--seeds", "0,1", "--out", tmp_path / "runs")
    assert xorflow(*given).code == 0
    assert xorflow(*given, "--resume").code == 0
    assert read(tmp_path / "runs/seed-1/config.json")["recipe"] == "stew@2"


@pytest.mark.parametrize("again", [(), ("--recipe", "stew")], ids=str)
def test_an_interrupted_run_goes_on_with_or_without_its_name(
    xorflow: Command, stew: Path, tmp_path: Path, again: tuple[str, ...]
) -> None:
    with pytest.raises(Interrupted):
        train_run(Options().replace(recipe="stew"), tmp_path / "run", StopAt({2}))
    assert xorflow("train", *again, "--out", tmp_path / "run", "--resume").code == 0
    assert read(tmp_path / "run/result.json")["epochs"] == 3


def test_a_recipe_in_a_file(xorflow: Command, stew: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('recipe = "stew"\nepochs = 1\n', encoding="utf-8")
    assert xorflow("train", "--config", tmp_path / "run.toml", "--out", tmp_path / "run").code == 0
    config = read(tmp_path / "run/config.json")
    assert (config["recipe"], config["conditioner"], config["epochs"]) == ("stew@2", "made:hidden=8", 1)
