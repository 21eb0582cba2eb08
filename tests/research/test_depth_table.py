"""What the table of depths is put into words as."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from research.depth.figure import draw_depths
from research.depth.page import NOT_RUN, depth_block, depth_headline_block, depth_in_short_block
from research.depth.score import packed
from research.depth.table import _paired, depth_markdown
from research.depth.table_words import verdict_words
from research.results import Results
from tiny_runs import read
from xorflow.training.storage import write_json


def row(name: str, depth: int, bound: float, **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "id": name, "title": name, "family": "autoregressive", "series": name, "base": "fixed", "depth": depth,
        "estimator": "marginal", "bound": bound, "validation": bound + 1,
        "kind": "exact" if depth == 1 else "lower bound", "stderr": 0.1,
        "samples": None if depth == 1 else 1000, "greedy": bound + 17, "refit": bound - 25,
        "validation_greedy": bound + 18, "validation_refit": bound - 24,
        "flip_rates": [0.1] * depth, "greedy_flip_rates": [0.02] * depth, "entropy": [40.0] * depth,
        "effective_depth": depth, "parameters": 12_000_000, "seconds": 20.0, "seeds": [0],
        "spread": {"nll": {"std": None}}, "sampling_passes": 784 * depth, "sampling_seconds": 0.1, "reading": "latent",
    }  # fmt: skip
    return usual | changes


def coupling(depth: int, bound: float, estimator: str = "full-posterior") -> dict[str, Any]:
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
        "version": 1, "budget": "full", "words": "Full.", "rows": list(rows), "missing": ["x"], "independent": 205.8,
        "paper": [{"depth": 1, "nll": 222.1}, {"depth": 2, "nll": 211.2}],
    }  # fmt: skip


def words(*rows: dict[str, Any]) -> str:
    return "\n".join(verdict_words(table(*rows)))


def test_depth_that_pays_and_depth_that_does_not() -> None:
    one = row("one", 1, 145.0)
    assert words(one, row("two", 2, 143.0)).startswith(
        "Depth pays on the fixed base, by 2.00 nats (standard error 0.14, over images and seeds)."
    )
    pair = {"rows": ["one", "two"], "gain": 2.0, "stderr": 0.03}
    in_pairs = verdict_words(table(one, row("two", 2, 143.0), paired=pair))[0]
    assert "(standard error 0.03, over images in pairs and seeds)" in in_pairs
    # what is best on test data is not what is shown
    lucky = row("lucky", 2, 140.0, validation=150.0)
    assert "by 2.00 nats" in words(one, row("two", 2, 143.0), lucky)
    assert "Depth pays little on the fixed base, 0.50 nats" in words(one, row("two", 2, 144.5))
    assert "Depth does not pay on the fixed base: the difference is 0.10 nats" in words(
        one, row("two", 2, 144.9)
    )
    assert "difference is -3.00 nats" in words(one, row("two", 2, 148.0))
    seeds = {"seeds": [0, 1, 2], "spread": {"nll": {"std": 3.0}}}
    assert "Depth does not pay" in words(row("one", 1, 145.0, **seeds), row("two", 2, 143.0, **seeds))


def test_a_layer_that_does_nothing_is_no_depth() -> None:
    idle = row("idle", 2, 140.0, effective_depth=1)
    found = words(row("one", 1, 145.0), idle, row("two", 2, 144.0))
    assert "Depth pays on the fixed base, by 1.00 nats" in found
    assert "rows with such layers: `idle` (1 of 2)" in found


def test_time_is_compared_with_flows_of_as_many_weights() -> None:
    one, deep = row("one", 1, 145.0), row("two", 2, 143.0, seconds=30.0)
    assert "No flow of depth 1 had as much time: `one` trained longest, for 20 seconds" in words(one, deep)
    long = row("long", 1, 146.0, seconds=31.0)
    assert "is `long`: 31 seconds, and 146.00 nats." in words(one, long, deep)
    small = row("small", 1, 150.0, seconds=60.0, parameters=6_000_000)
    assert "small" not in words(one, small, deep)
    quick = words(one, row("two", 2, 143.0, seconds=10.0))
    assert "12.0 and 12.0 million weights, the same, and trained for 20 and 10 seconds.\n" in quick


def test_rows_of_fewer_seeds_do_not_decide_for_depth() -> None:
    seeds = {"seeds": [0, 1, 2], "spread": {"nll": {"std": 0.1}}}
    found = words(row("one", 1, 145.0, **seeds), row("two", 2, 143.0, **seeds), row("four", 4, 142.0))
    assert "by 2.00 nats" in found
    assert "A row of fewer seeds, `four`, has at most 142.00 nats." in found


def test_bijections_of_one_layer_and_of_more() -> None:
    one = row("one", 1, 145.0, greedy=161.0, validation_greedy=161.0)
    found = words(one, row("two", 2, 143.0), row("idle", 2, 100.0, effective_depth=1))
    assert (
        "best flow of depth 2 or more has 160.0 nats (`two`), and 118.0 on a refitted base (`two`)" in found
    )
    assert "the best flow of depth 1 has 161.0 nats (`one`), and 120.0" in found


def test_one_ordering() -> None:
    shared = row("shared", 2, 146.0, series="code-shared")
    found = words(row("one", 1, 145.0), row("two", 2, 143.0), shared)
    assert "depth 2 reaches 146.00 nats (`shared`), and 143.00 in several." in found


def test_straight_through_has_the_better_of_its_readings() -> None:
    through = coupling(2, 190.0, "straight-through") | {"refit": 118.0, "validation_refit": 119.0}
    found = words(coupling(2, 120.0), through)
    assert "beats straight-through at no depth: 120.0 against 118.0 at depth 2" in found
    both = words(coupling(2, 120.0), through, coupling(4, 110.0), coupling(4, 190.0, "straight-through"))
    assert "not at every depth" in both


def test_couplings() -> None:
    found = words(coupling(2, 120.0), coupling(4, 110.0), coupling(2, 190.0, "straight-through"))
    assert "`c-4-full-posterior`, has at most 110.00 nats, and samples in 4 passes" in found
    assert "Full-posterior: 120.0 at depth 2, 110.0 at depth 4; it falls with every step." in found
    hard = [coupling(depth, 190.0, "straight-through") | {"reading": "deterministic"} for depth in (2, 4)]
    assert "Straight-through, deterministic, refitted: 220.0 at depth 2, 220.0 at depth 4" in words(*hard)
    assert (
        "at every depth: 120.0 against 190.0 at depth 2 (`c-2-full-posterior`, `c-2-straight-through`)"
        in found
    )
    assert "140.0 nats on a refitted base (`c-4-full-posterior`), 65.8 below independent pixels" in found
    assert "it does not fall with every step" in words(coupling(2, 110.0), coupling(4, 110.0))


def test_nothing_is_said_of_nothing() -> None:
    assert words() == "No row is finished."


def test_the_block_and_the_picture(tmp_path: Path) -> None:
    assert depth_block(tmp_path) == NOT_RUN
    found = table(row("one", 1, 145.0), row("two", 2, 143.0), coupling(2, 120.0))
    write_json(tmp_path / "depth/table.json", found | {"budget": "smoke"})
    for block in (depth_block, depth_in_short_block, depth_headline_block):
        assert block(tmp_path) == NOT_RUN
    write_json(tmp_path / "depth/table.json", found)
    assert depth_headline_block(tmp_path).startswith("Depth ")
    assert depth_headline_block(tmp_path).replace(
        ". The best latent", ".\n- The best latent"
    ) in depth_in_short_block(tmp_path)
    draw_depths(read(tmp_path / "depth/table.json"), tmp_path / "depth/depth.png")
    text = depth_block(tmp_path)
    assert "Depth pays on the fixed base" in text
    assert "Not run yet: `x`." in text
    assert "../results/depth/depth.png" in text
    assert "### What each layer does" in text
    assert "| `two` | 10.00, 10.00 | 2.00, 2.00 | 40.0, 40.0 |" in text
    draw_depths(table(), tmp_path / "empty.png")


def test_three_parts() -> None:
    text = depth_markdown(table(row("a", 1, 1.0), row("b", 1, 1.0, base="learned"), coupling(2, 1.0)))
    assert text.count("| row | depth |") == 3


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
