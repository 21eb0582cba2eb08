"""`python -m research estimators` as a person types it: everything in the smallest budget, a run, what is refused, Ctrl-C."""

import io
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from command_line import SMALL, Command
from research.__main__ import main
from research.estimators.command import show_measurements, show_training
from research.estimators.study import Study
from tiny_runs import read, rows_file
from xorflow.cli import main as xorflow

SMOKE = ("estimators", "--budget", "smoke", "--device", "cpu")
COMMITTED = Path(__file__).parents[2] / "research/results/estimators/table.json"
FIELDS = (
    "id", "estimator", "point", "layer", "part", "model", "claim", "bias", "bias_stderr", "bias_noise", "distance",
    "distance_stderr", "device", "variance", "variance_stderr",
    "snr", "cosine", "cosine_of_mean", "passes", "backward_passes", "milliseconds", "oracle",
    "objective", "draws", "batch", "groups", "warm_up", "variance_at_equal_cost", "reference",
)  # fmt: skip


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models and estimators, at the end of training."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.raises(SystemExit) as stop:
        main([*SMOKE, "--out", str(folder / "out"), "--work", str(folder / "work")])
    assert stop.value.code == 0
    return folder


def test_every_estimator_is_measured_with_its_oracle_said(smoke: Path) -> None:
    table = read(smoke / "out/table.json")
    assert table["version"] == 1
    assert table["description"].startswith("Smoke test")
    assert list(table["models"]) == [
        "depth-1", "depth-2", "posterior-1", "posterior-2", "small-2", "small-3"
    ]  # fmt: skip
    rows = table["rows"]
    assert len({row["id"] for row in rows}) == len(rows) > 300
    for row in rows:
        assert set(FIELDS) <= set(row), row["id"]
        assert row["milliseconds"] > 0
        assert row["passes"] >= 1
        assert row["variance"] is None or (math.isfinite(row["variance"]) and row["variance"] >= 0)
    kinds = {
        row["id"]: re.sub("[0-9]+ draws", "draws", row["oracle"]) for row in rows
    }  # more of a suspected bias
    plain = "mean of draws of a plain score function with 16 sets of samples, which is unbiased"
    shallow = {kinds[row["id"]] for row in rows if row["model"] in ("depth-1", "posterior-1")}
    assert shallow == {"closed form", plain}
    small = {kinds[row["id"]] for row in rows if row["model"].startswith("small")}
    assert small == {"enumeration", plain}
    deep = {row["layer"]: row["oracle"] for row in rows if row["id"].startswith("depth-2.converged.disarm.")}
    assert deep[1].startswith(
        "mean of 8 draws of score-function:baseline=leave-one-out,samples=16,sum_last=true"
    )
    assert deep[2].startswith("closed form of the last layer given the layers before")


def test_only_bounds_of_several_samples_have_a_plain_score_function_as_oracle(smoke: Path) -> None:
    rows = read(smoke / "out/table.json")["rows"]
    assert all(row["oracle"] is not None for row in rows)
    plain = [row for row in rows if "a plain score function" in row["oracle"]]
    assert {row["estimator"].partition(":")[0] for row in plain} == {"vimco"}
    small = [row for row in rows if row["id"].startswith("small-2.converged.vimco:samples=2.")]
    assert all(row["oracle"] == "enumeration" and row["bias"] is not None for row in small)


def test_straight_through_at_depth_1_is_the_exact_gradient(smoke: Path) -> None:
    rows = read(smoke / "out/table.json")["rows"]
    (own,) = [row for row in rows if row["model"] == "depth-1" and row["estimator"] == "straight-through"]
    assert (own["bias"], own["bias_stderr"], own["variance"], own["claim"]) == (0.0, 0.0, 0.0, "unbiased")


def test_the_files_are_there_and_a_second_time_nothing_is_done(smoke: Path, research: Command) -> None:
    out = smoke / "out"
    assert {path.name for path in out.iterdir()} == {
        "plan.json", "parts", "table.json", "table.md", "variance_cost.png", "bias_variance.png", "variance_pixels.png",
        "variance_cost_posteriors.png", "bias_variance_posteriors.png",
    }  # fmt: skip
    before = {path: path.stat().st_mtime_ns for path in (out / "parts").iterdir()}
    said = research(*SMOKE, "--out", out, "--work", smoke / "elsewhere")
    assert (said.code, said.err) == (0, "")
    title = "depth-2, converged: gradient of the generator of layer 2"
    assert said.out.count(title) == len({  # one block for each objective and oracle
        (row["objective"], row["oracle"])
        for row in read(out / "table.json")["rows"]
        if row["id"].startswith("depth-2.converged.") and row["layer"] == 2
    })  # fmt: skip
    assert f"results  {out / 'table.md'}" in said.out
    assert {path: path.stat().st_mtime_ns for path in (out / "parts").iterdir()} == before
    assert not (smoke / "elsewhere").exists()
    text = (out / "table.md").read_text(encoding="utf-8")
    assert text.startswith("Smoke test")
    assert "### Converged: posterior of layer 1" in text


def test_training_goes_into_the_same_table(smoke: Path, research: Command, tmp_path: Path) -> None:
    given = ("--estimators", "analytic disarm", "--out", tmp_path / "out", "--work", smoke / "work")
    shutil.copytree(smoke / "out", tmp_path / "out")
    said = research(*SMOKE, "--training", *given)
    assert (said.code, said.err) == (0, "")
    table = read(tmp_path / "out/table.json")
    assert len(table["rows"]) > 300
    assert [(run["depth"], run["estimator"]) for run in table["training"]] == [
        (1, "analytic"), (1, "disarm"), (2, "analytic"), (2, "disarm")
    ]  # fmt: skip
    assert re.search(r"^ +1 +disarm +\d+\.\d +\d+\.\d  +\d", said.out, re.MULTILINE)
    assert re.search(r"^ +2 +analytic +– +– +–$", said.out, re.MULTILINE)
    assert (tmp_path / "out/training.png").exists()


# ---- runs ----


@pytest.fixture(scope="module")
def bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one layer on rows with K = 3, to be refused much."""
    folder = tmp_path_factory.mktemp("bits")
    data = rows_file(folder / "rows.npy")
    with pytest.raises(SystemExit) as stop:
        xorflow(["train", "--data", str(data), "--out", str(folder / "run"), *SMALL, "--epochs", "1"])
    assert stop.value.code == 0
    return folder / "run"


def test_a_run_is_studied_into_its_own_folder(bits: Path, research: Command) -> None:
    said = research(
        "estimators",
        bits,
        "--estimators",
        "maximum-likelihood,score-function:baseline=leave-one-out,samples=2",
        "--draws",
        "8",
        "--batch",
        "4",
    )
    assert (said.code, said.err) == (0, "")
    assert re.search(r"^maximum-likelihood +0 +0 +1 +1 ", said.out, re.MULTILINE)
    assert "run, converged: gradient of the base" in said.out
    assert said.out.count("log-likelihood; exact gradient: closed form") == 2  # generator and base
    table = read(bits / "estimators/table.json")
    assert {row["estimator"] for row in table["rows"]} == {
        "maximum-likelihood",
        "score-function:baseline=leave-one-out,samples=2",
    }
    assert {(row["draws"], row["batch"]) for row in table["rows"]} == {(1, 4), (8, 4)}
    assert table["description"].startswith("Study of the run in run.")
    (seconds,) = table["seconds"].values()
    assert seconds >= 0


def test_what_a_run_is_refused_is_said(bits: Path, research: Command, tmp_path: Path) -> None:
    said = research("estimators", bits, "--budget", "smoke", "--out", tmp_path / "out", "--device", "cpu")
    assert (said.code, said.err) == (0, "")
    told = " ".join(said.out.split())
    assert "not defined for this model: disarm, arms:samples=4, rebar, relax; table.md says why" in told
    reason = "DisARM is for choices between two values"
    assert reason in (tmp_path / "out/table.md").read_text(encoding="utf-8")


BAD = {
    "one sample": (
        ("--estimators", "score-function:baseline=leave-one-out,samples=1"),
        "leave-one-out needs samples=2 or more",
    ),
    "no parameters": (("--estimators", "relax:hidden=0"), "without one it has no parameters"),
    "nothing to control": (("--estimators", "rebar:sum_last=true"), "is for choices between two values"),
    "K > 2": (
        ("--estimators", "disarm"),
        "DisARM is for choices between two values, and layer 1 has features with 3",
    ),
    "no such": (("--estimators", "magic"), "estimator is one of maximum-likelihood"),
    "no option": (("--estimators", "disarm:x=1"), "estimator 'disarm' takes"),
    "posterior": (("--estimators", "score-function:objective=elbo"), "needs a posterior in every layer"),
    "draws": (("--draws", "3"), "--draws is at least 8"),
    "batch": (
        ("--estimators", "maximum-likelihood", "--batch", "9999"),
        "--batch takes at most the 160 rows",
    ),
    "points": (("--points", "middle"), "a run keeps no weights in between"),
    "budget": (("--budget", "huge"), "--budget is one of smoke, quick, full"),
    "models": (("--models", "depth-1"), "leave it out beside RUN"),
    "training": (("--training",), "--training trains models of its own"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str, bits: Path, research: Command, tmp_path: Path) -> None:
    given, words = BAD[case]
    assert (
        words in research("estimators", bits, *given, "--device", "cpu", "--out", tmp_path / "out").refused()
    )


def test_a_control_variate_of_one_layer_that_is_summed_out(
    smoke: Path, research: Command, tmp_path: Path
) -> None:
    given = ("--models", "depth-1", "--estimators", "rebar:sum_last=true", "--out", tmp_path / "out")
    said = research(*SMOKE, *given, "--work", smoke / "work").refused()
    assert "the control variate of Rebar without parameters; use analytic" in said


def test_a_folder_that_is_no_run(research: Command, tmp_path: Path) -> None:
    assert "RUN is the folder of a run" in research("estimators", tmp_path / "nothing").refused()


def test_a_model_without_an_oracle(
    research: Command, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = rows_file(tmp_path / "rows.npy")  # 3^12 choices of two layers that see their own u
    options = ("--layers", "2", "--set", "own=true", "--estimator", "score-function", *SMALL, "--epochs", "1")
    with pytest.raises(SystemExit) as stop:
        xorflow(["train", "--data", str(data), "--out", str(tmp_path / "run"), *options])
    assert stop.value.code == 0
    capfd.readouterr()  # what training says
    assert (
        "a study compares gradients with exact ones, and this model has none"
        in research("estimators", tmp_path / "run").refused()
    )


def test_ctrl_c_says_how_to_go_on(
    bits: Path, research: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Study, observer: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Study, "run", interrupted)
    out = tmp_path / "the results"
    said = research(
        "estimators",
        bits,
        "--estimators",
        "maximum-likelihood",
        "--estimators",
        "reinmax",
        "--draws",
        "16",
        "--out",
        out,
    )
    assert (said.code, said.out) == (130, "")
    words, again = said.err.strip().rsplit(": ", 1)
    assert words == "stopped; continue from the last checkpoints with"
    assert shlex.split(again) == [
        "python", "-m", "research", "estimators", str(bits), "--estimators", "maximum-likelihood", "--estimators", "reinmax",
        "--draws", "16", "--out", str(out),
    ]  # fmt: skip


# ---- what a person sees ----


def test_the_table_fits_80_columns(smoke: Path) -> None:
    text = io.StringIO()
    table, console = read(smoke / "out/table.json"), Console(file=text, width=80)
    show_measurements(console, table | {"refused": []}, everything=True)
    show_training(console, read(COMMITTED)["training"])
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text.getvalue()  # nothing is cut: long names go on in the next line
