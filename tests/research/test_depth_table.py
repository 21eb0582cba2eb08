"""The table of depths: what it holds, its Markdown, its picture."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from research.depth.figure import draw_depths
from research.depth.score import packed
from research.depth.table import _headline_pair, _paired, depth_markdown
from research.results import Results


def row(name: str, depth: int, bound: float, **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "id": name, "title": name, "family": "autoregressive", "series": name, "base": "fixed", "depth": depth,
        "estimator": "maximum-likelihood", "bound": bound, "validation": bound + 1,
        "kind": "exact" if depth == 1 else "lower bound", "stderr": 0.1,
        "samples": None if depth == 1 else 1000, "greedy": bound + 17, "refit": bound - 25,
        "validation_greedy": bound + 18, "validation_refit": bound - 24,
        "flip_rates": [0.1] * depth, "greedy_flip_rates": [0.02] * depth, "entropy": [40.0] * depth,
        "effective_depth": depth, "parameters": 12_000_000, "seconds": 20.0, "seeds": [0],
        "spread": {"nll": {"std": None}}, "sampling_passes": 784 * depth, "sampling_seconds": 0.1, "flow": "latent",
    }  # fmt: skip
    return usual | changes


def coupling(depth: int, bound: float, estimator: str = "score-function:objective=elbo") -> dict[str, Any]:
    return row(
        f"c-{depth}-{estimator}",
        depth,
        bound,
        family="coupling",
        base="learned",
        estimator=estimator,
        series=estimator,
        sampling_passes=depth,
        refit=bound + 30,
        validation_refit=bound + 31,
    )


def table(*rows: dict[str, Any], paired: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "paired": paired,
        "version": 1, "budget": "full", "description": "Full.", "rows": list(rows), "missing": ["x"], "independent": 205.8,
        "paper": [{"depth": 1, "nll": 222.1}, {"depth": 2, "nll": 211.2}],
    }  # fmt: skip


def pair(*rows: dict[str, Any]) -> list[str] | None:
    found = _headline_pair(rows)
    return None if found is None else [row["id"] for row in found]


def test_what_is_compared_is_best_on_validation_data() -> None:
    one = row("one", 1, 145.0)
    assert pair(one, row("two", 2, 143.0)) == ["one", "two"]
    lucky = row("lucky", 2, 140.0, validation=150.0)
    assert pair(one, row("two", 2, 143.0), lucky) == ["one", "two"]
    idle = row("idle", 2, 140.0, effective_depth=1)  # a layer that does nothing is no depth
    assert pair(one, idle, row("two", 2, 144.0)) == ["one", "two"]
    assert pair(one, idle) is None
    assert pair(row("two", 2, 144.0), coupling(2, 120.0)) is None


def test_rows_of_fewer_seeds_do_not_decide_for_depth() -> None:
    seeds = {"seeds": [0, 1, 2]}
    assert pair(row("one", 1, 145.0, **seeds), row("two", 2, 143.0, **seeds), row("four", 4, 142.0)) == [
        "one",
        "two",
    ]


def test_the_picture(tmp_path: Path) -> None:
    for name, rows in {
        "some": [row("one", 1, 145.0), row("two", 2, 143.0), coupling(2, 120.0)],
        "none": [],
    }.items():
        draw_depths(table(*rows), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_three_parts() -> None:
    text = depth_markdown(table(row("a", 1, 1.0), row("b", 1, 1.0, base="learned"), coupling(2, 1.0)))
    assert text.count("| row | depth |") == 3
    assert "| `c-2-score-function:objective=elbo` | 10.00, 10.00 | 2.00, 2.00 | 40.0, 40.0 |" in text


def test_rows_are_compared_image_by_image() -> None:
    generator = np.random.default_rng(0)
    hard = generator.normal(140, 20, 500)  # what all models find hard or easy
    nlls = {"one": [hard, hard + 0.2], "two": [hard - 2 + generator.normal(0, 1, 500)] * 2}
    runs = tuple(
        {
            "row": name, "variant": "ours", "phase": "final", "seed": seed,
            "evaluation": {"values": packed(torch.from_numpy(-values))},
        }
        for name, seeds in nlls.items()
        for seed, values in enumerate(seeds)
    )  # fmt: skip
    found = _paired(Results({}, runs), [row("one", 1, 145.0), row("two", 2, 143.0)])
    assert found is not None
    gain = nlls["one"][0] + 0.1 - nlls["two"][0]
    assert found["rows"] == ["one", "two"]
    assert found["gain"] == pytest.approx(gain.mean(), abs=1e-3)
    assert found["stderr"] == pytest.approx(gain.std(ddof=1) / 500**0.5, abs=1e-4)
    assert found["stderr"] < 0.1 * hard.std() / 500**0.5
