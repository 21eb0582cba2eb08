"""Pictures and tables of damaged result files: one error that says which file it is."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from research import results
from research.budgets import find_budget
from research.paper.figures import draw_best, draw_curves
from research.paper.study import PAPER
from research.results import damage_as_error, read_results, write_table
from xorflow import DataError


def run(phase: str, **changes: Any) -> dict[str, Any]:
    bits = base64.b64encode(np.packbits(np.ones((100, 3, 3), np.uint8)).tobytes()).decode()
    return {
        "version": 1, "budget": "full", "row": "ste-1", "variant": "ours", "seed": 0, "phase": phase,
        "config": {"select": "greedy"}, "selection": {"nll": 1.0}, "evaluation": {"nll": 2.0, "kind": "exact"},
        "metrics": {"epoch": [1, 2], "validation_nll": [3.0, None]},
        "samples": {"flow": "latent", "shape": [100, 3, 3], "bits": bits},
    } | changes  # fmt: skip


def put(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / f"runs/ste-1.ours.seed0.{content['phase']}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    results.write(tmp_path / "plan.json", PAPER.plan(find_budget("full")))
    for phase in ("select", "final"):
        put(tmp_path, run(phase))
    return tmp_path


@pytest.mark.parametrize(
    "metrics",
    [{"epoch": [1], "validation_nll": [1.0, 2.0]}, {"epoch": [1], "validation_nll": [None]}, {"epoch": [1]}, []],
)  # fmt: skip
def test_curves(folder: Path, metrics: Any) -> None:
    put(folder, run("select", metrics=metrics))
    with pytest.raises(DataError) as error:
        draw_curves(read_results(folder, "paper"), folder / "curves.png")
    assert str(error.value).startswith("the record of a run of ste-1 is damaged (")
    assert not (folder / "curves.png").exists()


@pytest.mark.parametrize("change", [{"bits": "!"}, {"bits": "AAAA"}, {"bits": 3}, {"shape": [100, 9, 9]}])
def test_samples(folder: Path, change: dict[str, Any]) -> None:
    content = run("final")
    put(folder, content | {"samples": content["samples"] | change})
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
