"""What a study measures, keeps, repeats and refuses."""

import dataclasses
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from research.budgets import find_budget
from research.estimators.models import STUDY_BUDGETS, _Keeper, own_models
from research.estimators.names import default_estimators, parse_estimators
from research.estimators.study import Study, StudyRequest
from research.estimators.training import TrainingComparison
from tiny_runs import read, rows_file, tiny_dataset, tiny_options, train_run
from xorflow import fit
from xorflow.errors import ConfigError, Intractable, ModelError
from xorflow.training import ESTIMATORS, Interrupted, build_estimator, open_run
from xorflow.training import jobs as training_jobs
from xorflow.training.run import create_run, untrained

FEW = ("straight-through", "disarm")


def request(folder: Path, **changes: Any) -> StudyRequest:
    usual: dict[str, Any] = {
        "budget": find_budget("smoke", STUDY_BUDGETS), "out": folder / "out", "work": folder / "work", "device": "cpu",
        "models": "depth-1", "estimators": FEW,
    }  # fmt: skip
    of_budget = {key: changes.pop(key) for key in ("draws", "batch") if key in changes}
    usual["budget"] = dataclasses.replace(usual["budget"], **of_budget)
    return StudyRequest(**(usual | changes))


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in sorted((folder / "out").rglob("*.json"))}


class Watch:
    """Remembers what is done, and may stop there."""

    def __init__(self, stop: int | None = None) -> None:
        self.seen: list[str] = []
        self._stop = stop

    def on_done(self, name: str) -> None:
        self.seen.append(name)
        if self._stop is not None and len(self.seen) >= self._stop:
            raise KeyboardInterrupt


def test_three_points_of_one_training_each_with_weights_of_its_own(tmp_path: Path) -> None:
    study = Study(request(tmp_path, points="converged,start,middle"))
    assert [str(piece) for piece in study.pieces[:3]] == [
        "depth-1.start.straight-through",
        "depth-1.start.disarm",
        "depth-1.middle.straight-through",
    ]
    watch, planned = Watch(), study.planned
    assert [work.cost for work in planned] == [4.0, *[1.0] * 6]  # a model to train, and six pieces
    study.run(watch)
    assert list(dict.fromkeys(watch.seen)) == [work.name for work in planned]
    parts = [read(path) for path in sorted((tmp_path / "out/parts").iterdir())]
    assert len(parts) == 6
    assert len({part["weights"] for part in parts}) == 3
    assert len({part["batch_sha256"] for part in parts}) == 1
    for part in parts:
        (row,) = part["rows"]
        assert (row["part"], row["layer"], row["oracle"]) == ("generator", 1, "closed form")
        assert len(part["variance_by_feature"]) == 64
        assert part["shape"] == [8, 8]
        if part["estimator"] == "straight-through":
            assert (row["bias"], row["variance"]) == (0.0, 0.0)


def test_what_is_finished_is_never_repeated_and_more_is_added(tmp_path: Path) -> None:
    Study(request(tmp_path)).run()
    kept = files(tmp_path)
    again = Study(request(tmp_path, work=tmp_path / "elsewhere"))
    assert again.pieces == []
    assert not (tmp_path / "elsewhere").exists()
    more = Study(request(tmp_path, estimators=("disarm", "reinmax")))
    assert [piece.estimator for piece in more.pieces] == ["reinmax"]
    more.run()
    now = files(tmp_path)
    assert {name: time for name, time in kept.items() if name != "plan.json"}.items() <= now.items()
    assert "depth-1.converged.reinmax.json" in now


def test_ctrl_c_keeps_the_pieces_that_are_done(tmp_path: Path) -> None:
    wanted = request(tmp_path, estimators=("straight-through", "disarm", "reinmax"))
    with pytest.raises(KeyboardInterrupt):
        Study(wanted).run(Watch(stop=2))
    kept = files(tmp_path)
    assert "depth-1.converged.straight-through.json" in kept
    rest = Study(wanted)
    assert [piece.estimator for piece in rest.pieces] == ["disarm", "reinmax"]
    rest.run()
    assert (
        kept["depth-1.converged.straight-through.json"]
        == files(tmp_path)["depth-1.converged.straight-through.json"]
    )


def test_interrupted_training_goes_on_to_the_same_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(folder: Path) -> list[str]:
        names = [f"depth-1.{point}.straight-through.json" for point in ("start", "middle", "converged")]
        return [read(folder / "out/parts" / name)["weights"] for name in names]

    wanted = {"points": "start,middle,converged", "estimators": ("straight-through",)}
    Study(request(tmp_path / "whole", **wanted)).run()
    keep = _Keeper.on_step

    def interrupt(self: _Keeper, step: int) -> None:
        keep(self, step)
        if step == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(_Keeper, "on_step", interrupt)
    broken = request(tmp_path / "broken", **wanted)
    with pytest.raises(Interrupted):
        Study(broken).run()
    Study(broken).run()
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")


def test_every_model_of_our_own_can_be_built_and_its_default_estimators_too(tmp_path: Path) -> None:
    for subject in own_models(find_budget("smoke", STUDY_BUDGETS), tmp_path, "cpu"):
        flow = subject.blank()
        refused = []
        for text in subject.estimators:
            try:
                build_estimator(text).admit(flow)
            except ModelError:
                refused.append(text)
        assert refused == []
        assert len(set(subject.estimators)) == len(subject.estimators)
    named = {text.partition(":")[0] for depth in (1, 2) for text in default_estimators(depth, posterior=True)}
    assert named == set(ESTIMATORS)  # whoever adds an estimator adds it to the study


@pytest.mark.parametrize(
    "text", ["disarm:sum_last=true,common=true", "score-function:objective=elbo,credit=local-divergence"]
)
def test_what_is_the_same_as_another_below_depth_3_is_not_measured_there(text: str) -> None:
    measured = {depth: text in default_estimators(depth, posterior=True) for depth in (1, 2, 3)}
    assert measured == {1: False, 2: False, 3: True}


def test_budgets_are_found_by_name() -> None:
    assert [budget.name for budget in STUDY_BUDGETS] == ["smoke", "quick", "full"]
    with pytest.raises(ConfigError, match="--budget is one of smoke, quick, full; got 'huge'"):
        find_budget("huge", STUDY_BUDGETS)


# ---- runs of a user ----


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers on rows with K = 3."""
    folder = tmp_path_factory.mktemp("runs")
    data = rows_file(folder / "rows.npy")
    train_run(tiny_options(data, layers=2, order="alternating", epochs=1, base="learned"), folder / "run")
    return folder / "run"


def of_run(run: Path, folder: Path, **changes: Any) -> StudyRequest:
    return request(folder, run=run, models=None, **changes)


def test_a_run_is_studied_on_its_own_data(run: Path, tmp_path: Path) -> None:
    texts = ("maximum-likelihood:samples=2", "score-function:baseline=leave-one-out,samples=2")
    Study(of_run(run, tmp_path, estimators=texts, points="start,converged")).run()
    parts = [read(path) for path in sorted((tmp_path / "out/parts").iterdir())]
    assert {(part["model"], part["point"]) for part in parts} == {("run", "start"), ("run", "converged")}
    assert len({part["weights"] for part in parts}) == 2
    for part in parts:
        assert [(row["part"], row["layer"]) for row in part["rows"]] == [
            ("generator", 1), ("generator", 2), ("base", None)
        ]  # fmt: skip
        assert part["shape"] is None


def test_the_start_of_a_run_is_where_its_training_began(run: Path, tmp_path: Path) -> None:
    opened = open_run(run)
    fresh = create_run(opened.options, tmp_path / "fresh").flow.state_dict()
    begun = untrained(opened).state_dict()
    assert all(torch.equal(fresh[name], begun[name]) for name in fresh)


def test_the_default_estimators_of_a_run_leave_out_what_is_not_defined(run: Path, tmp_path: Path) -> None:
    study = Study(of_run(run, tmp_path, estimators=None))
    wanted = {piece.estimator for piece in study.pieces}
    assert "disarm" not in wanted
    assert "score-function:baseline=leave-one-out,samples=2" in wanted
    study.pieces = []
    study.run()
    refused = {entry["estimator"]: entry["reason"] for entry in read(tmp_path / "out/plan.json")["refused"]}
    assert "for choices between two values" in refused["disarm"]


REFUSED = {
    "K > 2": ({"estimators": ("disarm",)}, ModelError, "DisARM is for choices between two values"),
    "depth": ({"estimators": ("analytic",)}, ModelError, "needs one layer"),
    "no posterior": ({"estimators": ("score-function:objective=elbo",)}, ModelError, "needs a posterior"),
    "middle": ({"points": "middle"}, ConfigError, "a run keeps no weights in between"),
    "point": (
        {"points": "end"},
        ConfigError,
        r"--points names points of training .*: start, converged, or several with a \*; got 'end'",
    ),
    "no point": ({"points": ""}, ConfigError, "--points names points"),
    "draws": ({"draws": 7}, ConfigError, "--draws is at least 8"),
    "batch": ({"batch": 0}, ConfigError, "--batch is at least 1"),
    "seed": ({"seed": -1}, ConfigError, "--seed is at least 0"),
    "models": ({"models": "depth-1"}, ConfigError, "leave it out beside RUN"),
    "device": ({"device": "tpu"}, ConfigError, "device is auto"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_means_nothing(case: str, run: Path, tmp_path: Path) -> None:
    changes, error, words = REFUSED[case]
    usual: dict[str, Any] = {"models": None, "estimators": ("maximum-likelihood:samples=2",)}
    with pytest.raises(error, match=words):
        Study(request(tmp_path, run=run, **(usual | changes)))
    assert not (tmp_path / "out").exists()


def test_more_rows_than_there_are(run: Path, tmp_path: Path) -> None:
    study = Study(of_run(run, tmp_path, estimators=("maximum-likelihood",), batch=1000))
    with pytest.raises(
        ConfigError, match="--batch takes at most the 160 rows of the training data; got 1000"
    ):
        study.run()


def test_a_model_without_an_exact_gradient(tmp_path: Path) -> None:
    """Twenty features whose only layer sees its own u: 2^20 choices."""
    data = tmp_path / "rows.npy"
    np.save(data, np.random.default_rng(0).integers(0, 2, (60, 20), dtype=np.uint8))
    train_run(tiny_options(data, own=True, estimator="score-function", epochs=1), tmp_path / "run")
    with pytest.raises(Intractable, match="this model has none"):
        Study(of_run(tmp_path / "run", tmp_path, estimators=("score-function",)))


def test_a_run_made_in_python_has_no_start(tmp_path: Path) -> None:
    flow = zoo.make("K3 D3").float()
    fit(flow, _three_features(), out=tmp_path / "run", epochs=1, batch_size=50, device="cpu")
    with pytest.raises(
        ConfigError, match=r"--points names points of training .*: converged, .*; got 'start'"
    ):
        Study(of_run(tmp_path / "run", tmp_path, estimators=("maximum-likelihood",), points="start"))


def _three_features():
    whole = tiny_dataset()
    cut = {
        name: dataclasses.replace(split, values=split.values[:, :3]) for name, split in whole.parts.items()
    }
    return dataclasses.replace(whole, **cut, categories=(3, 3, 3))


def test_other_settings_need_another_folder(tmp_path: Path) -> None:
    Study(request(tmp_path, estimators=("straight-through",))).run()
    with pytest.raises(ConfigError, match="holds a study with draws 8, and this has 16"):
        Study(request(tmp_path, draws=16))
    with pytest.raises(ConfigError, match="holds a study with seed 0, and this has 1"):
        Study(request(tmp_path, seed=1))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(ConfigError, match="holds no results of research estimators"):
        Study(request(tmp_path, out=tmp_path / "other"))
    with pytest.raises(ConfigError, match="is a file; choose another --out"):
        Study(request(tmp_path, out=tmp_path / "other/file"))
    with pytest.raises(ConfigError, match=r"--models names models of depth-1, .*; got 'depth-9'"):
        Study(request(tmp_path, models="depth-9"))


DAMAGE = {
    '{"version": 2}': "a newer version wrote it",
    '{"version": "x"}': "research estimators did not write it",
    '{"version": 1}': "is damaged: it lacks 'model'",
    '{"version": 1, "model": "x", "point": "start", "estimator": "disarm", "rows": []}': "of another estimator or model",
}


@pytest.mark.parametrize("text", DAMAGE)
def test_a_damaged_or_foreign_file(text: str, tmp_path: Path) -> None:
    Study(request(tmp_path, estimators=("straight-through",))).run()
    (tmp_path / "out/parts/depth-1.converged.straight-through.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=DAMAGE[text]):
        Study(request(tmp_path, estimators=("straight-through",)))


# ---- how estimators are named ----


def test_estimators_are_told_apart_whatever_separates_them() -> None:
    expected = ("disarm", "score-function:baseline=greedy,sum_last=true", "maximum-likelihood")
    for given in (
        ["disarm score-function:baseline=greedy,sum_last=true maximum-likelihood"],
        ["disarm;score-function:baseline=greedy,sum_last=true", "maximum-likelihood", "disarm"],
        ["disarm,score-function:baseline=greedy,sum_last=true,maximum-likelihood"],
    ):
        assert parse_estimators(given) == expected
    assert parse_estimators(None) is None
    with pytest.raises(ConfigError, match="--estimators names none"):
        parse_estimators([" "])
    with pytest.raises(ConfigError, match="estimator is one of"):
        parse_estimators(["disarms"])


# ---- training ----


def test_training_with_each_estimator_is_a_file_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = request(
        tmp_path, models=None, estimators=("analytic", "disarm", "score-function:objective=elbo")
    )
    assert [outcome.error for outcome in TrainingComparison(wanted, 1).run()] == [None] * 5
    runs = {(run["depth"], run["estimator"]): run for run in map(read, (tmp_path / "out/training").iterdir())}
    assert len(runs) == 6
    assert runs[2, "analytic"]["error"].startswith("not defined: ")
    assert (runs[1, "disarm"]["kind"], runs[2, "disarm"]["kind"]) == ("exact", "lower bound")
    assert runs[2, "disarm"]["samples"] == 8
    assert (runs[1, "disarm"]["posterior"], runs[1, "score-function:objective=elbo"]["posterior"]) == (
        "none",
        "mlp",
    )
    assert {run["epochs"] for run in runs.values() if "epochs" in run} == {1}
    monkeypatch.setattr(training_jobs, "make_run", lambda *_, **__: pytest.fail("finished"))
    assert TrainingComparison(wanted, 1).run() == []


def test_no_runs_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--jobs is at least 1; got 0"):
        TrainingComparison(request(tmp_path), 0)


def test_gradients_that_are_no_numbers_are_a_finding(tmp_path: Path) -> None:
    comparison = TrainingComparison(request(tmp_path, models=None, estimators=("maximum-likelihood",)), 1)
    for folder, trial in comparison._trials.items():
        options = trial.options.replace(
            lr=1e38, conditioner="made:hidden=16+16", optimiser="sgd", schedule="constant", epochs=3
        )
        comparison._trials[folder] = dataclasses.replace(trial, options=options)
    failed = comparison.run()
    assert [outcome.job.name for outcome in failed if outcome.error is not None] == [
        "depth 1, maximum-likelihood",
        "depth 2, maximum-likelihood",
    ]
    kept = read(tmp_path / "out/training/depth-1.maximum-likelihood.json")
    assert kept["error"].startswith("the loss is not finite at step 2 (epoch 1)")
    assert "train again" not in kept["error"]
