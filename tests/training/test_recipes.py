"""Recipes: legal options under a name and a version, kept by the runs that use them."""

from pathlib import Path

import pytest

from tiny_runs import continue_run, read, rows_file, train_run
from xorflow import data
from xorflow.errors import ConfigError
from xorflow.training import (
    CONDITIONERS,
    Options,
    build_data,
    build_estimator,
    build_flow,
    from_mapping,
    read_config,
)
from xorflow.training.config import from_json
from xorflow.training.recipes import RECIPES, Recipe, expanded


@pytest.fixture
def cooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe named `stew` for a file of rows."""
    path = rows_file(tmp_path / "rows.npy")
    options = {
        "data": str(path),
        "conditioner": "made:hidden=8",
        "epochs": 2,
        "batch_size": 32,
        "device": "cpu",
    }
    monkeypatch.setitem(RECIPES, "stew", Recipe("stew", 3, "Small.", options, data=str(path)))
    return path


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_legal_and_describes_itself(name: str) -> None:
    recipe = RECIPES[name]
    options = Options().replace(recipe=name)
    assert options == from_mapping({"recipe": name}, "here")
    assert options.recipe == f"{name}@{recipe.version}" == recipe.label
    assert options.data == recipe.data
    assert recipe.summary.endswith(".")
    for key, value in recipe.options.items():
        assert options.to_json()[key] == value


def test_recipes_build_models() -> None:
    digits = data.mnist()
    for name in RECIPES:
        options = Options().replace(recipe=name)
        small = {"width": 8, "depth": 1, "heads": 2, "hidden": [8]}
        network = {
            key: small.get(key, value) for key, value in CONDITIONERS.read(options.conditioner).items()
        }
        options = options.replace(conditioner=CONDITIONERS.text(network))
        flow = build_flow(options, digits)
        assert build_estimator(options.estimator).admit(flow) is flow


def test_the_demo_is_the_defaults_and_has_its_figures() -> None:
    assert Options().replace(recipe="demo") == Options(recipe="demo@1")
    result = read(Path(__file__).parents[2] / "research/results/demo/result.json")
    assert RECIPES["demo"].nll == pytest.approx(result["test"]["nll"], abs=0.05)
    assert RECIPES["demo"].images == result["data"]["sizes"]["train"]
    assert RECIPES["demo"].minutes == pytest.approx(result["seconds"] / 60, abs=0.1)


def test_the_recipes_for_a_gpu_have_their_figures() -> None:
    rows = read(Path(__file__).parents[2] / "research/results/strong/table.json")["rows"]
    measured = {row["recipe"]: row for row in rows}
    for recipe in RECIPES.values():
        if recipe.machine == "one H200":
            row = measured.get(recipe.label)
            assert (row is None) == (recipe.nll is None), recipe.label
            if row is not None:
                assert recipe.nll == pytest.approx(row["nll"], abs=0.05)
                assert recipe.minutes == pytest.approx(row["seconds"] / 60, abs=0.1)
                assert (row["config"]["validation"], recipe.images) == (0, 60_000)


def test_the_recipe_for_two_cores_has_its_figures() -> None:
    folder = Path(__file__).parents[2] / "research/results"
    result, cost = read(folder / "small/result.json"), read(folder / "costs.json")["small"]
    recipe = RECIPES["recurrent-cpu"]
    assert recipe.machine == "two cores"
    assert recipe.nll == pytest.approx(result["test"]["nll"], abs=0.05)
    assert recipe.minutes == pytest.approx(result["seconds"] / 60, abs=0.5)
    assert recipe.images == result["data"]["sizes"]["train"]
    assert cost["cores"] == 2
    assert result["epochs"] == recipe.options["epochs"]


def test_what_is_given_beside_a_recipe_overrides_it() -> None:
    options = Options().replace(recipe="transformer-10min", epochs=3, lr=0.5)
    assert (options.epochs, options.lr, options.clip) == (3, 0.5, 1.0)
    assert from_mapping({"epochs": 3, "recipe": "recurrent"}, "here").epochs == 3


def test_what_a_run_keeps_is_not_expanded_again() -> None:
    """A newer version of a recipe, or one that is gone, changes nothing about a run that used it."""
    kept = Options().replace(recipe="recurrent", epochs=3).to_json()
    assert from_json(kept, "config.json").to_json() == kept
    gone = from_json(kept | {"recipe": "gone@7"}, "config.json")
    assert (gone.recipe, gone.average, gone.epochs) == ("gone@7", 0.995, 3)
    assert gone.replace(recipe="gone@7", epochs=4).average == 0.995
    assert gone.replace(recipe="none").average == 0.995


@pytest.mark.parametrize("label", ["recurrent", "recurrent@4"])
def test_a_recipe_is_named_with_or_without_its_version(label: str) -> None:
    assert expanded({"recipe": label, "epochs": 3})["average"] == 0.995
    assert Options().replace(recipe=label).conditioner.startswith("recurrent:width=512,")
    assert from_mapping({"recipe": label}, "here").recipe == "recurrent@4"


def test_a_recipe_over_another_is_refused() -> None:
    """Options that only the first one names would stay."""
    first = Options().replace(recipe="recurrent-cpu")
    with pytest.raises(
        ConfigError, match=r"those of recipe 'recurrent-cpu@1' already, and 'demo@1' is another"
    ):
        first.replace(recipe="demo")
    assert first.replace(recipe="recurrent-cpu", epochs=1).epochs == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"recipe": "soup"}, "recipe is none or one of demo, made-strong"),
        ({"recipe": "transformer-10min", "data": "people.csv"}, "is for mnist, and the data are people.csv"),
        ({"recipe": 3}, "recipe is a text; got 3"),
        ({"recipe": "recurrent@1"}, "recipe 'recurrent' is at version 4 here; got version '1'"),
        ({"recipe": "soup@1"}, "got 'soup@1'; see xorflow recipes"),
    ],
)
def test_recipes_that_do_not_fit_are_one_line(given: dict, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_mapping(given, "here")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_keeps_the_recipe_with_its_version(cooked: Path, tmp_path: Path) -> None:
    train_run(Options().replace(recipe="stew", epochs=1), tmp_path / "run")
    config = read(tmp_path / "run/config.json")
    assert (config["recipe"], config["epochs"], config["conditioner"]) == ("stew@3", 1, "made:hidden=8")
    assert build_data(read_config(tmp_path / "run/config.json")[0]).name
    with pytest.raises(ConfigError, match=r"epochs is 1 in .* and 2 here"):
        continue_run(tmp_path / "run", {"recipe": "stew"})
    assert continue_run(tmp_path / "run", {"recipe": "stew", "epochs": 1})["epochs"] == 1


def test_a_recipe_that_moved_on_does_not_continue_a_run(
    cooked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_run(Options().replace(recipe="stew"), tmp_path / "run")
    monkeypatch.setitem(
        RECIPES, "stew", Recipe("stew", 4, "Small.", RECIPES["stew"].options, data=str(cooked))
    )
    with pytest.raises(ConfigError, match=r"recipe is 'stew@3' in .* and 'stew@4' here"):
        continue_run(tmp_path / "run", {"recipe": "stew"})
    assert continue_run(tmp_path / "run", {})["epochs"] == 2
