"""Files of an experiment that were damaged: one line that names the file and says what to do, and no other run is harmed."""

import base64
import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import Command
from research import results
from research.__main__ import main
from research.budgets import find_budget
from research.paper.figures import draw_best, draw_curves
from research.paper.study import PAPER
from research.results import damage_as_error, read_results, write_table
from tiny_runs import read
from xorflow import DataError

ROWS = {"paper": "ste-1,marginal,floor", "depth": "ar-1-marginal,ar-2-code", "strong": "made"}
SELECT, FINAL = "ste-1.ours.seed0.select", "ste-1.ours.seed0.final"


def smoke(command: str, rows: str, folder: Path) -> list[str]:
    shared = ["--budget", "smoke", "--device", "cpu", "--seeds", "1"]
    return [command, *shared, "--rows", rows, "--out", str(folder / "out"), "--work", str(folder / "work")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small experiment, made once for each command."""
    folders: dict[str, Path] = {}

    def folder(command: str) -> Path:
        if command not in folders:
            folders[command] = tmp_path_factory.mktemp(command)
            # what it says is no part of what the test's own command says
            with redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as stop:
                main(smoke(command, ROWS[command], folders[command]))
            assert stop.value.code == 0
        return folders[command]

    return folder


def put(*place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Something else in a place of a file."""

    def edit(content: dict[str, Any]) -> None:
        for key in place[:-1]:
            content = content[key]
        content[place[-1]] = value

    return edit


def drop(*place: str) -> Callable[[dict[str, Any]], None]:
    """A place of a file that is not there."""

    def edit(content: dict[str, Any]) -> None:
        for key in place[:-1]:
            content = content[key]
        del content[place[-1]]

    return edit


DAMAGE = [
    ("paper", SELECT, drop("evaluation"), "it lacks 'evaluation'"),
    ("paper", FINAL, drop("phase"), "it lacks 'phase'"),
    ("paper", FINAL, put("seed", value=1), "it holds the run ste-1.ours.seed1.final"),
    ("paper", "floor", drop("row"), "it lacks 'row'"),
    ("depth", "ar-2-code.ours.seed0.select", drop("budget"), "it lacks 'budget'"),
    ("strong", "made.ours.seed0.final", drop("evaluation"), "it lacks 'evaluation'"),
]


@pytest.mark.parametrize(("command", "name", "damage", "words"), DAMAGE)
def test_a_damaged_file_of_a_run_is_named(
    made, research: Command, tmp_path: Path, command: str, name: str, damage, words: str
) -> None:
    shutil.copytree(made(command) / "out", tmp_path / "out")
    path = tmp_path / f"out/runs/{name}.json"
    content = read(path)
    damage(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    before = {file: file.read_bytes() for file in (tmp_path / "out/runs").iterdir()}
    said = research(*smoke(command, "floor" if command == "paper" else ROWS[command], tmp_path)).refused()
    assert f"{path} is damaged: " in said
    assert words in said
    assert said.endswith("; remove it, and it is made again\n")
    assert {file: file.read_bytes() for file in (tmp_path / "out/runs").iterdir()} == before


# ---- the folders of runs ----


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def edit_config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: text("config.json", json.dumps(read(folder / "config.json") | changes))(folder)


def a_file_instead(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("", encoding="utf-8")


WORK = [
    (text("config.json", '{"ver'), "config.json is no readable JSON"),
    (text("config.json", '{"version": 99}'), "config.json has version 99, and this xorflow reads"),
    (edit_config(estimator=3), "config.json: estimator is a text; got 3"),
    (edit_config(model={}), "config.json: the model in this configuration is not one that this version can build"),
    (edit_config(data_format={"shape": 3}), "config.json is damaged: its shape is 3, and its model has 64 features"),
    (lambda folder: (folder / "config.json").unlink(), "is no folder of a run: it has no config.json"),
    (a_file_instead, "is to be a folder, and is a file; remove it, and the run is made"),
    (text("metrics.jsonl", "{"), "metrics.jsonl is damaged: its last record is to be of epoch 2"),
    (text("metrics.jsonl", '{"epoch": 1, "train_nll": 1.0}\n'), "its last record is to be of epoch 2"),
    (text("metrics.jsonl", '{"epoch": 2}\n'), "metrics.jsonl is damaged: KeyError 'train_nll'"),
    (lambda folder: (folder / "metrics.jsonl").unlink(), "metrics.jsonl is damaged: FileNotFoundError"),
    (text("result.json", "{"), "result.json is no readable JSON"),
    (text("result.json", '{"seconds": 1}'), "result.json is damaged: 'device' is not there, or not whole"),
    (text("weights.safetensors", "x"), "weights.safetensors is not the file that was written"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), WORK)
def test_a_damaged_folder_of_a_run_harms_no_other(
    made, research: Command, tmp_path: Path, damage, words: str
) -> None:
    given = smoke("paper", ROWS["paper"], tmp_path)
    shutil.copytree(made("paper") / "work", tmp_path / "work")
    for path in (tmp_path / "work").rglob("config.json"):  # runs know where their data lie
        own = read(path) | {"data": str(tmp_path / "work/smoke/digits.npy")}
        path.write_text(json.dumps(own), encoding="utf-8")
    folder = tmp_path / "work/smoke/ste-1.ours/seed0/select"
    damage(folder)
    said = research(*given)
    assert said.code == 2
    assert said.err.startswith("error: ste-1.ours.select, seed 0: ")
    assert said.err.count("\n") == 1
    assert words in said.err
    assert str(folder) in said.err
    runs = tmp_path / "out/runs"
    kept = {path.name: path.read_bytes() for path in runs.iterdir()}
    assert kept.keys() == {"floor.json"} | {
        f"{name}.seed0.{phase}.json" for name in ("ste-1.improved", "marginal.ours") for phase in ("select", "final")
    }  # fmt: skip
    # what the line says to do helps, and nothing that was finished is made again
    (shutil.rmtree if folder.is_dir() else Path.unlink)(folder)
    assert research(*given).code == 0
    assert len(list(runs.iterdir())) == 7
    assert kept.items() <= {path.name: path.read_bytes() for path in runs.iterdir()}.items()


@pytest.mark.parametrize("content", [b'{"a": 1}\n', b"\xff\xfe\n", b'{"epoch": 1, "train_nll": null}\n'])
def test_an_unfinished_run_goes_on_whatever_its_metrics_hold(
    research: Command, tmp_path: Path, content: bytes
) -> None:
    """They are written anew from its last checkpoint on."""
    folder = tmp_path / "work/smoke/marginal.ours/seed0/select"
    given = smoke("paper", "marginal", tmp_path)
    assert research(*given).code == 0
    (folder / "result.json").unlink()
    (folder / "metrics.jsonl").write_bytes(content)
    shutil.rmtree(tmp_path / "out")
    assert research(*given).code == 0
    run = read(tmp_path / "out/runs/marginal.ours.seed0.select.json")
    assert run["metrics"]["epoch"] == [1, 2]


# ---- pictures and tables of damaged records ----


def run(phase: str, **changes: Any) -> dict[str, Any]:
    bits = base64.b64encode(np.packbits(np.ones((100, 3, 3), np.uint8)).tobytes()).decode()
    return {
        "version": 1, "budget": "full", "row": "ste-1", "variant": "ours", "seed": 0, "phase": phase,
        "config": {"select": "greedy"}, "selection": {"nll": 1.0}, "evaluation": {"nll": 2.0, "kind": "exact"},
        "metrics": {"epoch": [1, 2], "validation_nll": [3.0, None]},
        "samples": {"flow": "latent", "shape": [100, 3, 3], "bits": bits},
    } | changes  # fmt: skip


def put_run(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / f"runs/ste-1.ours.seed0.{content['phase']}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    results.write(tmp_path / "plan.json", PAPER.plan(find_budget("full")))
    for phase in ("select", "final"):
        put_run(tmp_path, run(phase))
    return tmp_path


@pytest.mark.parametrize(
    "metrics",
    [{"epoch": [1], "validation_nll": [1.0, 2.0]}, {"epoch": [1], "validation_nll": [None]}, {"epoch": [1]}, []],
)  # fmt: skip
def test_curves(folder: Path, metrics: Any) -> None:
    put_run(folder, run("select", metrics=metrics))
    with pytest.raises(DataError) as error:
        draw_curves(read_results(folder, "paper"), folder / "curves.png")
    assert str(error.value).startswith("the record of a run of ste-1 is damaged (")
    assert not (folder / "curves.png").exists()


@pytest.mark.parametrize("change", [{"bits": "!"}, {"bits": "AAAA"}, {"bits": 3}, {"shape": [100, 9, 9]}])
def test_samples(folder: Path, change: dict[str, Any]) -> None:
    content = run("final")
    put_run(folder, content | {"samples": content["samples"] | change})
    found = read_results(folder, "paper")
    with pytest.raises(DataError) as error:
        draw_best(found, folder / "samples.png")
    assert str(error.value).startswith("the record of a run of ste-1 is damaged (")
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "runs"]


def test_any_table(folder: Path) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("division by zero")

    with pytest.raises(DataError, match=r"a record in .* is damaged \(ZeroDivisionError division by zero\)"):
        write_table(folder, broken, broken)
    with pytest.raises(DataError, match=r"^its own words$"), damage_as_error("a file"):
        raise DataError("its own words")
