"""Tables and pictures of the paper's rows: made from result files alone, and true of them; what the committed table reaches."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from research import results
from research.budgets import find_budget
from research.paper.rows import PAPER_TABLE, ROWS
from research.paper.study import PAPER
from research.paper.table import main_table, make_table, markdown, write_paper
from research.results import read_results
from xorflow import ConfigError, DataError

ROOT = Path(__file__).parents[2]


def evaluation(nll: float, kind: str, **more: Any) -> dict[str, Any]:
    return {
        "part": "test", "draw": "0" * 64, "nll": nll, "kind": kind, "stderr": 0.5, "rows": 10,
        "samples": None if kind == "exact" else 1000, "exact": nll - 10, "elbo": nll + 10, "greedy": nll + 1,
        "greedy_stderr": 0.5, "refit": nll - 5, "refit_stderr": 0.5, "argmax_posterior": None,
        "layers": [{"flip_rate": 0.25, "greedy_flip_rate": 0.0, "entropy": 1.5}],
    } | more  # fmt: skip


def put(folder: Path, row: str, variant: str, seed: int, nll: float, validation: float, **more: Any) -> None:
    """Both files of a run."""
    config = {"select": "greedy", "epochs": 10, "schedule": "constant"}
    shared = {
        "version": 1, "budget": "full", "row": row, "variant": variant, "seed": seed, "config": config,
        "epochs": 10, "best_epoch": 10, "parameters": 7, "seconds": 30.0, "together": 1, "device_name": "a machine",
        "metrics": {"epoch": [1, 2, 3], "train_nll": [3.0, 2.0, 1.0], "validation_nll": [250.0, None, 240.0]},
    }  # fmt: skip
    bits = base64.b64encode(np.packbits(np.ones((100, 3, 3), np.uint8)).tobytes()).decode()
    kind = "exact" if row.startswith("ste") else "lower bound"
    phases = {
        "select": {"selection": {"metric": "greedy", "nll": validation}, "samples": None},
        "final": {"selection": None, "samples": {"flow": "latent", "shape": [100, 3, 3], "bits": bits}},
    }
    for phase, own in phases.items():
        content = shared | own | {"phase": phase, "evaluation": evaluation(nll, kind, **more)}
        path = folder / "runs" / f"{row}.{variant}.seed{seed}.{phase}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A few rows of a full reproduction, below `results/paper`."""
    out = tmp_path / "results/paper"
    results.write(out / "plan.json", PAPER.plan(find_budget("full")))
    for seed, (nll, validation) in enumerate([(220.0, 31.0), (230.0, 30.0), (225.0, 32.0)]):
        put(out, "ste-1", "ours", seed, nll, validation)
    put(out, "ste-1", "improved", 0, 165.61, 1.0)
    layers = [{"flip_rate": 0.1 * n, "greedy_flip_rate": 0.05, "entropy": float(n)} for n in (1, 2)]
    put(out, "sfe-special-running-2", "ours", 0, 200.0, 1.0, layers=layers)
    score = {"value": 99.9, "is": "not a likelihood"}
    put(out, "sfe-posterior-greedy", "ours", 0, 250.0, 1.0, argmax_posterior=score)
    level = {"version": 1, "budget": "full", "row": "independent-pixels", "phase": "reference"}
    own = {"nll": 205.76, "kind": "exact", "stderr": None, "samples": None, "rows": 10}
    (out / "runs/independent-pixels.json").write_text(
        json.dumps(level | {"evaluation": own}), encoding="utf-8"
    )
    return out


def test_the_table_has_the_seed_that_validated_best_and_the_spread_of_all(folder: Path) -> None:
    table = make_table(read_results(folder, "paper"))
    assert table["budget"] == "full"
    rows = {row["id"]: row for row in table["rows"]}
    assert list(rows) == ["ste-1", "sfe-posterior-greedy", "sfe-special-running-2", "independent-pixels"]
    row = rows["ste-1"]
    assert {"id", "paper", "ours", "improved", "seeds", "config", "epochs", "seconds"} <= row.keys()
    keys = {"nll", "greedy", "exact", "elbo", "kind", "stderr", "mean", "spread"}
    assert keys <= row["ours"].keys()
    assert keys <= row["improved"].keys()
    assert row["paper"] == {"nll": 222.1, "greedy": None}
    assert (row["ours"]["seed"], row["ours"]["nll"]) == (1, 230.0)  # not the best on test data
    assert row["ours"]["mean"] == 225.0
    assert row["ours"]["spread"] == {"std": 5.0, "min": 220.0, "max": 230.0}
    assert row["ours"]["greedy_mean"] == 226.0
    assert row["seeds"] == [0, 1, 2]
    assert row["config"].keys() == {"ours", "improved"}
    assert (row["epochs"], row["seconds"]) == (10, 240.0)
    assert rows["sfe-posterior-greedy"]["improved"] is None
    assert rows["independent-pixels"]["ours"]["nll"] == 205.76
    assert "ste-2" in table["missing"]


def test_references_have_every_key(folder: Path) -> None:
    for found in make_table(read_results(folder, "paper"))["rows"]:
        assert {"nll", "greedy", "exact", "elbo", "kind", "stderr", "mean", "spread"} <= found["ours"].keys()


def test_a_seed_without_its_final_run_is_not_reported(folder: Path) -> None:
    (folder / "runs/ste-1.ours.seed1.final.json").unlink()
    (folder / "runs/ste-1.improved.seed0.final.json").unlink()
    row = make_table(read_results(folder, "paper"))["rows"][0]
    assert (row["ours"]["seed"], row["ours"]["nll"], row["improved"]) == (0, 220.0, None)


def test_the_markdown_says_what_each_number_is(folder: Path) -> None:
    table = make_table(read_results(folder, "paper"))
    lines = main_table(table).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    ours, improved = "230.0 ± 0.5 | 220.0 | 231.0", "with entropy bonus | 165.6 ± 0.5 |"
    assert f"| straight-through, depth 1 | 222.1 | – | {ours} | {improved}" in lines[2]
    assert "| ≤ " in lines[3]
    assert lines[5] == "| independent pixels | – | – | 205.8 | 205.8 | – | – | – | – | – |"
    text = markdown(table)
    assert "| ours | 205.3 | 99.9 | 251.0 |" in text
    assert text.count("not a likelihood") == 1
    assert "| ours | 2 | 2.00 nats | 20.00 % | 5.00 % |" in text


def test_everything_is_written_beside_the_runs(folder: Path) -> None:
    table = write_paper(folder)
    assert json.loads((folder / "table.json").read_text(encoding="utf-8")) == table
    assert (folder / "table.md").read_text(encoding="utf-8").startswith("Full run of every recipe")
    for name in ("curves.png", "samples.png"):
        picture = imread(folder / name)
        assert min(picture.shape[:2]) > 400
        assert picture[..., :3].std() > 0.05
    samples = imread(folder / "samples.png")[300:600, :, 0]
    left, right = np.array_split(samples, 2, axis=1)
    assert min(left.mean(), right.mean()) > 0.2  # both sides hold (white) images


def test_without_any_run_there_is_an_empty_table(tmp_path: Path) -> None:
    results.write(tmp_path / "plan.json", PAPER.plan(find_budget("smoke")))
    assert write_paper(tmp_path)["rows"] == []
    assert (tmp_path / "samples.png").exists()


def test_files_that_are_not_ours(folder: Path) -> None:
    path = folder / "runs/ste-1.ours.seed0.final.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | {"version": 2}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"final\.json has version 2, and version 1 is read here"):
        write_paper(folder)
    path.write_text(json.dumps(content | {"evaluation": {}}), encoding="utf-8")
    with pytest.raises(DataError, match=r"a record in .* is damaged \(KeyError 'nll'\); restore it"):
        write_paper(folder)


# ---- the committed table of the full reproduction meets what was aimed at; nothing here is trained ----


TABLE = Path(__file__).parents[2] / "research/results/paper/table.json"
GREEDY = 167.5  # of every improved row, through the generator
MARGINAL_EXACT, MARGINAL_GREEDY = 148.5, 167.0
NEAR = 1.0  # nats: the full posterior's optimum is the marginal
PRINTED = {row.id: row for row in PAPER_TABLE}
IMPROVED = [row.id for row in ROWS if "improved" in row.recipes]
POSTERIOR = [row.id for row in ROWS if row.family == "full posterior"]


@pytest.fixture(scope="module")
def committed() -> dict[str, dict[str, Any]]:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    assert (table["budget"], table["missing"]) == ("full", [])
    return {row["id"]: row for row in table["rows"]}


def test_every_row_is_there_with_three_seeds(committed: dict[str, dict[str, Any]]) -> None:
    for row in ROWS:
        found = committed[row.id]
        assert found["seeds"] == [0, 1, 2]
        assert (found["improved"] is not None) == (row.id in IMPROVED)
    assert set(IMPROVED) == {row.id for row in ROWS} - {"marginal"}


@pytest.mark.parametrize("name", PRINTED)
def test_as_the_paper_describes_it_the_nll_is_at_or_below_the_papers(
    committed: dict[str, dict[str, Any]], name: str
) -> None:
    assert committed[name]["paper"] == {"nll": PRINTED[name].nll, "greedy": PRINTED[name].greedy}
    assert committed[name]["ours"]["nll"] <= PRINTED[name].nll


@pytest.mark.parametrize("name", [name for name, row in PRINTED.items() if row.greedy is not None])
def test_a_row_above_the_papers_greedy_figure_has_three_attempts(
    committed: dict[str, dict[str, Any]], name: str
) -> None:
    greedy = PRINTED[name].greedy
    assert greedy is not None
    assert committed[name]["ours"]["greedy"] <= greedy or len(committed[name]["attempts"]) >= 3


@pytest.mark.parametrize("name", PRINTED)
def test_improved_the_nll_is_below_the_papers(committed: dict[str, dict[str, Any]], name: str) -> None:
    assert committed[name]["improved"]["nll"] < PRINTED[name].nll


@pytest.mark.parametrize("name", IMPROVED)
def test_improved_the_greedy_nll_is_low_at_every_depth(
    committed: dict[str, dict[str, Any]], name: str
) -> None:
    assert committed[name]["improved"]["greedy"] <= GREEDY


@pytest.mark.parametrize("name", POSTERIOR)
def test_the_improved_full_posterior_comes_near_the_marginal(
    committed: dict[str, dict[str, Any]], name: str
) -> None:
    assert abs(committed[name]["improved"]["greedy"] - committed["marginal"]["ours"]["greedy"]) <= NEAR


def test_the_exact_marginal(committed: dict[str, dict[str, Any]]) -> None:
    found = committed["marginal"]["ours"]
    assert (found["kind"], found["nll"]) == ("exact", found["exact"])
    assert found["exact"] <= MARGINAL_EXACT
    assert found["greedy"] <= MARGINAL_GREEDY
