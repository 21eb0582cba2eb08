"""`python -m research strong` as a person types it: every row in the smallest budget, what is refused, and how it goes on."""

import json
import shutil
from pathlib import Path

import pytest

from command_line import Command
from research.__main__ import main
from research.strong.rows import MIXED_ROWS, STRONG_ROWS
from tiny_runs import read

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
