"""`python -m research depth` as a person types it: some rows in the smallest budget, what is refused, and how it goes on."""

import base64
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from command_line import Command
from research.__main__ import main
from tiny_runs import read

SMOKE = ("depth", "--budget", "smoke", "--device", "cpu")
ROWS = "ar-1-marginal,ar-1-plain,ar-2-code,ar-2-onto,made-1-mixture,coupling-4-nested-posterior,coupling-2-random-ste"
KEYS = {
    "id", "family", "base", "depth", "estimator", "greedy", "bound", "kind", "stderr", "refit", "flip_rates", "parameters",
    "seconds", "seeds", "effective_depth", "entropy", "ordering", "sampling_passes", "spread", "config",
}  # fmt: skip


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in sorted(folder.glob("*.json"))}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("depth")
    with pytest.raises(SystemExit) as stop:
        main([*SMOKE, "--rows", ROWS, "--out", str(folder / "out"), "--work", str(folder / "work")])
    assert stop.value.code == 0
    return folder


def test_the_table(smoke: Path) -> None:
    table = read(smoke / "out/table.json")
    rows = {row["id"]: row for row in table["rows"]}
    assert list(rows) == [
        "ar-1-marginal", "ar-1-plain", "ar-1-plain-own", "ar-1-half", "ar-2-code", "ar-2-code-own", "ar-2-onto",
        "made-1-mixture", "coupling-4-nested-posterior", "coupling-2-random-ste",
    ]  # fmt: skip
    for row in rows.values():
        assert row.keys() >= KEYS
        assert len(row["flip_rates"]) == len(row["entropy"]) >= row["depth"]
        assert row["kind"] == ("exact" if row["depth"] == 1 else "lower bound")
        assert 0 <= row["effective_depth"] <= row["depth"]
        assert row["seeds"] == [0]
        assert 6 < row["bound"] < 200
    assert rows["ar-1-plain"]["base"] == "fixed" != rows["ar-1-plain-own"]["base"]
    # on the base 0.9 / 0.1 nothing is below the cost of 64 zeros
    assert min(rows[name]["bound"] for name in ("ar-1-marginal", "ar-1-plain", "ar-2-code")) > 64 * 0.1053
    assert rows["ar-2-onto"]["config"]["init"] == "rows/ar-1-half"
    seconds = [rows[name]["seconds"] for name in ("ar-1-half", "ar-2-onto")]
    assert seconds == sorted(seconds)  # with those of the runs that they started from
    assert rows["coupling-4-nested-posterior"]["sampling_passes"] == 4
    assert rows["ar-1-marginal"]["sampling_passes"] == 64
    values = read(smoke / "out/runs/ar-1-marginal.ours.seed0.final.json")["evaluation"]["values"]
    images = np.frombuffer(base64.b64decode(values), "<f4")
    assert -images.mean() == pytest.approx(rows["ar-1-marginal"]["bound"], abs=1e-4)
    assert [point["nll"] for point in table["paper"]] == [222.1, 211.2, 205.6, 209.1]
    assert table["independent"] == read(smoke / "out/runs/independent-pixels.json")["evaluation"]["nll"]
    assert {path.name for path in (smoke / "out").iterdir()} == {
        "plan.json", "runs", "table.json", "table.md", "depth.png"
    }  # fmt: skip


def test_a_second_time_there_is_nothing_to_do(smoke: Path, research: Command) -> None:
    before = files(smoke / "out/runs")
    said = research(*SMOKE, "--rows", ROWS, "--out", smoke / "out", "--work", smoke / "elsewhere")
    assert (said.code, said.err) == (0, "")
    assert files(smoke / "out/runs") == before
    assert "coupling-4-nested-posterior" in said.out
    assert said.out.endswith(f"pictures {smoke / 'out/depth.png'}\n")


def test_what_is_missing_is_made_from_what_is_there(smoke: Path, research: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(smoke / "out", out)
    given = (*SMOKE, "--rows", "ar-2-onto", "--out", out)
    lost = [out / f"runs/ar-2-onto.ours.seed0.{phase}.json" for phase in ("select", "final")]
    figures = [read(path)["evaluation"]["nll"] for path in lost]
    for path in lost:
        path.unlink()
    # without the weights that the row starts from, it says so
    said = research(*given, "--work", tmp_path / "empty")
    assert said.code == 2
    assert "row ar-2-onto starts from row ar-1-half, whose weights are not in" in said.err
    shutil.copytree(smoke / "work", tmp_path / "work")
    shutil.rmtree(tmp_path / "work/smoke/ar-2-onto.ours")
    kept = files(out / "runs")
    assert research(*given, "--work", tmp_path / "work").code == 0
    assert [read(path)["evaluation"]["nll"] for path in lost] == figures
    assert kept.items() <= files(out / "runs").items()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "is damaged: it holds no JSON object; remove it"),
        (lambda text: text.replace('"version": 1', '"version": "x"', 1), "research depth did not write it"),
        (lambda text: text.replace('"evaluation": {', '"nothing": {'), "is damaged: it lacks 'evaluation'"),
    ],
)
def test_damaged_results_are_named(
    research: Command, smoke: Path, tmp_path: Path, damage, words: str
) -> None:
    shutil.copytree(smoke / "out", tmp_path / "out")
    path = tmp_path / "out/runs/ar-1-marginal.ours.seed0.final.json"
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    given = (*SMOKE, "--rows", "ar-1-marginal", "--out", tmp_path / "out", "--work", tmp_path / "work")
    assert words in research(*given).refused()


def test_results_of_another_command(research: Command, smoke: Path, tmp_path: Path) -> None:
    work = ("--work", tmp_path / "work")
    said = research("paper", "--budget", "smoke", "--rows", "floor", "--out", smoke / "out", *work).refused()
    assert "holds results of research depth, and this is research paper: choose another --out" in said
    plan = json.loads((smoke / "out/plan.json").read_text(encoding="utf-8"))
    assert plan["experiment"] == "depth"
