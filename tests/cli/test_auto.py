"""The recipe auto, the default for tables: a run like any other, with all that was tried, chosen and reached."""

from pathlib import Path

import pytest
import torch

import xorflow as xf
from command_line import Command
from tiny_runs import people_file, read
from xorflow.training import auto, auto_run, open_run
from xorflow.training.chow_liu import chow_liu


@pytest.fixture
def people(tmp_path: Path) -> Path:
    return people_file(tmp_path / "people.csv", rows=400)


def train(xorflow: Command, people: Path, out: Path, *more: str):
    given = ("--set", "orderings=2", *more)
    return xorflow("train", "--data", people, "--out", out, *given)


def test_a_run_shows_and_keeps_what_it_reached(xorflow: Command, people: Path, tmp_path: Path) -> None:
    said = train(xorflow, people, tmp_path / "run")
    assert said.code == 0
    for word in (
        "this model",
        "Chow-Liu tree",
        "independent columns",
        "bits given those",
        "samples",
        "orderings=2",
    ):
        assert word in said.out
    assert "natural  trees" in said.err
    result, config = (read(tmp_path / "run" / f"{name}.json") for name in ("result", "config"))
    assert result["test"]["kind"] == "exact"
    assert result["test"]["nll"] < result["independent_nll"]
    assert [column["column"] for column in result["columns"]] == ["colour", "size", "pet", "rooms"]
    assert result["auto"]["orderings"] == config["orderings"] == 2
    assert [len(result["rows"][name]) for name in ("data", "samples")] == [5, 5]
    assert {len(row) for row in result["rows"]["samples"]} == {4}
    assert config["recipe"] == "auto@1"
    assert (tmp_path / "run/samples.csv").read_text().startswith("colour,size,pet,rooms")
    run = open_run(tmp_path / "run")
    test = run.data().test
    assert test is not None
    nll = xf.evaluate.exact(run.flow, test).nll
    assert nll == pytest.approx(result["test"]["nll"], abs=1e-4)
    for command in ("evaluate RUN --json", "sample RUN --count 5 --out NEW", "score RUN --data DATA"):
        names = {"RUN": tmp_path / "run", "NEW": tmp_path / "new.csv", "DATA": people}
        assert xorflow(*(names.get(word, word) for word in command.split())).code == 0
    assert xorflow("train", "--out", tmp_path / "run", "--resume").code == 0


def test_all_its_likelihoods_are_densities_where_a_column_has_one(
    xorflow: Command, people: Path, tmp_path: Path
) -> None:
    heights = torch.randn(400, generator=torch.Generator().manual_seed(0)).mul(9).add(170).tolist()
    header, *rows = people.read_text().splitlines()
    lines = [f"{header},height", *(f"{row},{height:.4f}" for row, height in zip(rows, heights, strict=True))]
    people.write_text("\n".join(lines) + "\n")
    assert train(xorflow, people, tmp_path / "run").code == 0
    result, run = read(tmp_path / "run/result.json"), open_run(tmp_path / "run")
    data = run.data()
    test, validation = data.test, data.validation
    assert test is not None
    assert test.log_density is not None
    assert validation is not None
    tree = chow_liu(data.train.values, data.categories)
    assert tree is not None
    tree_nll = -float((tree.log_prob(test.values) + test.log_density).mean())
    assert result["chow_liu_nll"] == pytest.approx(tree_nll)
    floor = float(run.flow.floor()) - float(test.log_density.mean())
    assert result["test"]["floor"] == pytest.approx(floor)
    nll = xf.evaluate.exact(run.flow, validation).nll
    assert result["auto"]["validation_nll"] == pytest.approx(nll, abs=1e-3)


def test_a_model_that_cannot_be_evaluated_is_kept(
    xorflow: Command, people: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scarce(*arguments: object) -> None:
        raise MemoryError

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(auto_run, "columns", scarce)
        said = train(xorflow, people, run)
    assert said.code == 2
    assert (
        "its weights are kept, but its likelihood on validation and test data could not be computed"
        in said.err
    )
    assert xorflow("train", "--out", run, "--resume").code == 2
    assert xorflow("evaluate", run).code == 0
    assert train(xorflow, people, tmp_path / "whole").code == 0
    completed, whole = (read(tmp_path / f"{name}/result.json") for name in ("run", "whole"))
    assert completed["test"]["nll"] == whole["test"]["nll"]
    assert xorflow("train", "--out", run, "--resume").code == 0


def test_a_run_that_is_stopped_while_it_is_evaluated_says_that_its_model_is_kept(
    xorflow: Command, people: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(auto_run, "columns", stopped)
    said = train(xorflow, people, tmp_path / "run")
    assert said.code == 130
    assert f"the model is kept: xorflow evaluate {tmp_path / 'run'}" in said.err
    assert xorflow("evaluate", tmp_path / "run").code == 0


def test_its_configuration_makes_the_same_model(xorflow: Command, people: Path, tmp_path: Path) -> None:
    assert train(xorflow, people, tmp_path / "run", "--seed", "1").code == 0
    config = tmp_path / "run/config.json"
    assert xorflow("train", "--config", config, "--out", tmp_path / "again").code == 0
    one, other = (xf.load(tmp_path / name).state_dict() for name in ("run", "again"))
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())


def test_several_seeds(xorflow: Command, people: Path, tmp_path: Path) -> None:
    assert train(xorflow, people, tmp_path / "runs", "--seeds", "0,1").code == 0
    first, second = (read(tmp_path / f"runs/seed-{seed}/result.json")["auto"]["weights"] for seed in (0, 1))
    assert [*first] == ["natural", "random:1"]
    assert [*second] == ["natural", "random:9"]


def test_an_interrupted_run_goes_on_from_the_units_that_are_done(
    xorflow: Command, people: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, network = [], auto._Search._network

    def stopped(self: auto._Search, order: str, kind: str) -> object:
        if len(made) == 1:
            raise KeyboardInterrupt
        made.append((order, kind))
        return network(self, order, kind)

    monkeypatch.setattr(auto._Search, "_network", stopped)
    run = tmp_path / "run"
    said = train(xorflow, people, run)
    assert said.code == 130
    assert f"what was saved is kept; continue with: xorflow train --out {run} --resume" in said.err
    assert "is not finished; continue it with" in xorflow("evaluate", run).err
    made.clear()
    assert xorflow("train", "--out", run, "--resume").code == 0
    assert made == [("natural", "network with dropout")]
    monkeypatch.undo()
    assert train(xorflow, people, tmp_path / "whole").code == 0
    one, other = (xf.load(folder).state_dict() for folder in (run, tmp_path / "whole"))
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    assert not (run / "units").exists()
    one, other = (read(folder / "result.json")["test"] for folder in (run, tmp_path / "whole"))
    assert one == other


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--epochs", "1"), ""),
        (("--recipe", "none", "--set", "layers=1"), ""),
        (
            ("--set", "validation=0"),
            "a plain run, not one of the recipe auto, for tables of fixed values: it chooses by",
        ),
    ],
)
def test_a_plain_run_is_made_where_anything_of_a_model_is_chosen(
    xorflow: Command, people: Path, tmp_path: Path, given: tuple[str, ...], words: str
) -> None:
    said = xorflow("train", "--data", people, "--out", tmp_path / "run", *given)
    assert said.code == 0
    assert words in said.err
    assert read(tmp_path / "run/config.json")["recipe"] == "none"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--recipe auto", "recipe 'auto' is for tables, and the data are mnist"),
        (
            "--data PEOPLE --recipe auto --epochs 3",
            "chooses all of a model and of its training but minutes and",
        ),
        ("--data PEOPLE --minutes 3 --epochs 2", "minutes has an effect only if recipe is auto"),
        ("--data PEOPLE --minutes 3 --set validation=0", "minutes has an effect only if recipe is auto"),
        ("--data PEOPLE --recipe auto --set tensorboard=true", "and got tensorboard=true"),
        ("--data PEOPLE --recipe auto --set orderings=9", "orderings is below 9; got 9"),
        ("--data PEOPLE --recipe auto --set validation=0", "chooses by validation rows, and there are none"),
        ("--data PEOPLE --recipe auto --out PEOPLE", "is a file"),
    ],
)
def test_what_means_nothing_is_refused(
    xorflow: Command, people: Path, given: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(people.parent)
    said = xorflow("train", *(str(people) if word == "PEOPLE" else word for word in given.split()))
    assert said.code == 2
    assert words in said.err
    assert not (people.parent / "runs").exists()
