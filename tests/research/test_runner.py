"""What a reproduction trains, keeps, repeats and refuses."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from research.budgets import find_budget, write_digits
from research.experiment import Request
from research.files import RunName
from research.paper.study import PAPER
from research.rows import TrainedRow, chosen
from research.runner import Runner, final_epochs
from tiny_runs import StopAt, read, train_run
from xorflow.errors import ConfigError
from xorflow.training import Interrupted


def request(folder: Path, rows: str = "marginal", **changes: Any) -> Request:
    usual: dict[str, Any] = {
        "experiment": PAPER, "rows": chosen(rows, PAPER.rows), "budget": find_budget("smoke"), "seeds": 1,
        "out": folder / "out", "work": folder / "work", "device": "cpu", "workers": 1,
    }  # fmt: skip
    return Request(**(usual | changes))


def with_options(wanted: Request, **options: Any) -> Request:
    """The same request, of rows whose recipe says something else."""
    return dataclasses.replace(wanted, rows=[changed(row, **options) for row in wanted.rows])


def changed(row: TrainedRow, **options: Any) -> TrainedRow:
    return dataclasses.replace(row, recipes={**row.recipes, "ours": {**row.recipes["ours"], **options}})


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in sorted((folder / "out/runs").iterdir())}


def failures(outcomes: list) -> list[str]:
    return [outcome.error for outcome in outcomes if outcome.error is not None]


def test_select_then_final_and_never_again(tmp_path: Path) -> None:
    made = Runner(request(tmp_path, "marginal,floor", seeds=2))
    assert [run.name for run in made.planned] == [
        f"marginal.ours.seed{seed}.{phase}" for phase in ("select", "final") for seed in (0, 1)
    ]
    assert failures(made.run()) == []
    kept = files(tmp_path)
    assert sorted(kept) == sorted(["floor.json", *(f"{run.name}.json" for run in made.planned)])
    again = Runner(request(tmp_path, "marginal,floor", seeds=2))
    assert again.planned == []
    assert again.run() == []
    assert files(tmp_path) == kept
    more = Runner(request(tmp_path, seeds=3))
    assert [run.name for run in more.planned] == ["marginal.ours.seed2.select", "marginal.ours.seed2.final"]


def test_a_file_holds_all_that_there_is_to_know(tmp_path: Path) -> None:
    assert failures(Runner(request(tmp_path)).run()) == []
    select, final = (
        read(tmp_path / f"out/runs/marginal.ours.seed0.{phase}.json") for phase in ("select", "final")
    )
    assert (select["config"]["validation"], final["config"]["validation"]) == (60, 0)
    assert (select["data"]["sizes"], final["data"]["sizes"]) == (
        {"train": 200, "validation": 60, "test": 100},
        {"train": 260, "test": 100},
    )
    assert (select["evaluation"]["part"], final["evaluation"]["part"]) == ("validation", "test")
    assert final["evaluation"]["draw"] == final["data"]["sha256"]["test"]
    assert select["selection"] == {"metric": "likelihood", "nll": select["evaluation"]["exact"]}
    assert select["metrics"]["epoch"] == [1, 2]
    assert None not in select["metrics"]["validation_nll"]
    assert select["samples"] is None
    assert final["samples"]["shape"] == [100, 8, 8]
    assert final["versions"].keys() == {"xorflow", "source", "torch", "python"}
    for run in (select, final):
        assert run["seconds"] > 0
        assert run["evaluation_seconds"] > 0
        assert run["device"] == "cpu"
        assert (run["version"], run["budget"], run["seed"]) == (1, "smoke", 0)


def test_an_interrupted_run_goes_on_from_its_folder(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert failures(Runner(request(whole)).run()) == []
    made = Runner(request(broken))
    write_digits(made._digits)
    name = RunName(made._request.rows[0], "ours", 0, "select")
    folder = name.folder(broken / "work/smoke")
    with pytest.raises(Interrupted):
        train_run(made._job(name).options, folder, StopAt({3}))
    begun = (folder / "config.json").stat().st_mtime_ns
    assert failures(made.run()) == []
    assert (folder / "config.json").stat().st_mtime_ns == begun
    for phase in ("select", "final"):
        runs = [read(top / f"out/runs/marginal.ours.seed0.{phase}.json") for top in (whole, broken)]
        assert runs[0]["evaluation"] == runs[1]["evaluation"]
        assert runs[0]["metrics"] == runs[1]["metrics"]


def test_the_length_of_a_final_run() -> None:
    assert [final_epochs(100, best, 5) for best in (1, 5, 84, 85, 86, 90, 100)] == [
        5,
        5,
        85,
        85,
        100,
        100,
        100,
    ]
    assert final_epochs(2, 1, 1) == 1
    assert final_epochs(7, 7, 5) == 7


def test_the_length_is_that_of_the_seed_selected_first_and_then_stays(tmp_path: Path) -> None:
    wanted = with_options(request(tmp_path, seeds=2), schedule="constant")
    assert failures(Runner(wanted).run()) == []
    runs = tmp_path / "out/runs"
    for seed, (nll, best) in enumerate([(9.0, 2), (8.0, 1)]):
        path = runs / f"marginal.ours.seed{seed}.select.json"
        content = read(path) | {"selection": {"metric": "likelihood", "nll": nll}, "best_epoch": best}
        path.write_text(json.dumps(content), encoding="utf-8")
        (runs / f"marginal.ours.seed{seed}.final.json").unlink()
    (row,) = wanted.rows
    made = Runner(wanted)
    assert made._job(RunName(row, "ours", 0, "final")).options.epochs == 1  # seed 1 is better
    content = read(runs / "marginal.ours.seed0.select.json") | {
        "epochs": 2,
        "phase": "final",
        "samples": {"flow": "latent", "shape": [0, 8, 8], "bits": ""},
    }
    content["config"] |= {"epochs": 2, "validation": 0.0}
    (runs / "marginal.ours.seed0.final.json").write_text(json.dumps(content), encoding="utf-8")
    assert made._job(RunName(row, "ours", 1, "final")).options.epochs == 2  # as the final run there is


@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "constant", "estimator": "score-function:objective=bound,entropy=0.7,anneal=0.5"}],
)
def test_what_is_scheduled_over_all_epochs_is_not_cut_short(tmp_path: Path, options: dict[str, Any]) -> None:
    wanted = with_options(request(tmp_path), **options)
    assert failures(Runner(wanted).run()) == []
    path = tmp_path / "out/runs/marginal.ours.seed0.select.json"
    path.write_text(json.dumps(read(path) | {"best_epoch": 1}), encoding="utf-8")
    (tmp_path / "out/runs/marginal.ours.seed0.final.json").unlink()
    (row,) = wanted.rows
    assert Runner(wanted)._job(RunName(row, "ours", 0, "final")).options.epochs == 2


def test_another_recipe_is_never_mixed_in(tmp_path: Path) -> None:
    assert failures(Runner(request(tmp_path)).run()) == []
    with pytest.raises(
        ConfigError, match=r"select\.json was made with clip 0\.0, and the row now says 1\.0: remove"
    ):
        Runner(with_options(request(tmp_path), clip=1.0)).run()
    elsewhere = with_options(request(tmp_path, out=tmp_path / "other"), clip=1.0)
    with pytest.raises(
        ConfigError, match=r"was begun with clip 0\.0, and the row now says 1\.0: remove that folder"
    ):
        Runner(elsewhere).run()


def test_a_run_that_fails_harms_no_other(tmp_path: Path) -> None:
    wanted = request(tmp_path, "ste-1,marginal", seeds=1)
    bad = changed(wanted.rows[0], estimator="maximum-likelihood", lr=1e30, optimiser="sgd")
    outcomes = Runner(dataclasses.replace(wanted, rows=[bad, wanted.rows[1]])).run()
    assert [outcome.job.name for outcome in outcomes if outcome.error] == ["ste-1.ours.select"]
    assert "not finite" in failures(outcomes)[0]
    names = {path.name.partition(".seed")[0] for path in (tmp_path / "out/runs").iterdir()}
    assert names == {"ste-1.improved", "marginal.ours"}
    # once it is mended, its final run follows; what is finished stays
    kept = files(tmp_path)
    (tmp_path / "work/smoke/ste-1.ours").rename(tmp_path / "away")
    assert failures(Runner(wanted).run()) == []
    assert len(files(tmp_path)) == 6
    assert kept.items() <= files(tmp_path).items()
