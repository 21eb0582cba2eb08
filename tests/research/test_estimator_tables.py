"""The study's tables and pictures, from small result files made for the purpose."""

import json
from pathlib import Path
from typing import Any

import pytest

from research.estimators.figures import choose_maps
from research.estimators.table import (
    StudyResults,
    best_of_several,
    best_table,
    make_study_table,
    read_study,
    study_markdown,
    write_study,
)
from research.estimators.training_table import (
    measured_variance,
    objective_table,
    training_groups,
    training_table,
)
from xorflow import UserError

PAPER = ["score-function", "score-function:baseline=greedy"]
PLAN = {
    "version": 1,
    "settings": {
        "budget": "full",
        "description": "Full study.",
        "draws": 400,
        "batch": 64,
        "seed": 0,
        "device": "a device",
    },
    "references": {"generator": PAPER, "posterior": ["score-function:objective=elbo"]},
    "models": {
        "depth-1": {"title": "depth 1", "estimator": "score-function", "epochs": 20},
        "depth-2": {"title": "depth 2", "estimator": "disarm", "epochs": 10},
    },
    "refused": [{"model": "depth-2", "estimator": "analytic", "reason": "needs one layer"}],
}


def row(layer: int = 1, **changes: Any) -> dict[str, Any]:
    usual = {
        "part": "generator", "layer": layer, "claim": "unbiased", "objective": "special-case bound",
        "oracle": "closed form", "norm": 1.0, "trace": 1.0, "bias": 0.001, "bias_stderr": 0.002, "distance": 0.03,
        "cosine": 0.5, "cosine_of_mean": 0.9, "variance": 1.0, "variance_stderr": 0.1, "snr": 1.0, "draws": 400,
        "groups": 16, "batch": 64, "warm_up": 0, "passes": 1.0, "backward_passes": 1.0, "milliseconds": 2.0,
        "step": "eager",
    }  # fmt: skip
    follows = {"trace": changes.get("variance", 1.0), "bias_noise": changes.get("bias_stderr", 0.002)}
    return usual | follows | changes


def part(model: str, estimator: str, *rows: dict[str, Any], point: str = "middle") -> dict[str, Any]:
    depth = int(model[-1])
    return {
        "version": 1, "model": model, "point": point, "estimator": estimator, "depth": depth, "features": 64,
        "shape": [8, 8], "weights": "", "batch_sha256": "", "rows": list(rows), "device": "cpu", "seconds": 0.5,
        "variance_by_feature": [0.1 * (i % 7) for i in range(64)], "versions": {},
    }  # fmt: skip


def run(depth: int, estimator: str, greedy: float, **changes: Any) -> dict[str, Any]:
    usual = {
        "version": 1, "id": f"training.depth-{depth}.{estimator}", "depth": depth, "estimator": estimator,
        "posterior": "none", "greedy_nll": greedy, "nll": greedy - 10, "kind": "exact", "samples": None, "seconds": 3.0,
        "epochs": 5, "hidden": [1024], "batch_size": 128, "lr": 1e-3, "jobs": 2, "stderr": 0.5,
    }  # fmt: skip
    return usual | changes


EARLIER = {"bias": 0.4, "bias_stderr": 0.1, "bias_noise": 0.1, "draws": 400}
EXACT = {"variance": 0.0, "variance_stderr": 0.0, "bias": 0.0, "bias_stderr": 0.0, "snr": None, "draws": 1}
PARTS = [
    part("depth-1", "score-function", row(milliseconds=2.0, variance=1.0)),
    part("depth-1", "score-function:baseline=greedy", row(milliseconds=4.0, variance=0.8)),
    part("depth-1", "disarm", row(milliseconds=1.0, variance=0.5)),
    part("depth-1", "arms:samples=4", row(milliseconds=8.0, variance=0.4)),
    part("depth-1", "straight-through", row(**EXACT)),
    part("depth-1", "concrete", row(claim="biased", bias=0.04, distance=0.2)),
    part(
        "depth-1",
        "vimco:samples=4",
        row(oracle=None, bias=None, bias_stderr=None, distance=None, cosine=None),
    ),
    part("depth-2", "score-function", row(1, variance=0.1), row(2)),
    part(
        "depth-2",
        "score-function:baseline=leave-one-out,samples=2",
        row(1, bias=0.5, draws=1600, earlier=[EARLIER]),
        row(2),
    ),
    part("depth-2", "straight-through", *(row(layer, claim="biased", bias=0.1 * layer) for layer in (1, 2))),
]
RUNS = [
    run(1, "score-function", 110.0),
    run(1, "disarm", 90.0),
    run(1, "arms:samples=4", 120.0),
    run(1, "straight-through", 80.0),
    run(2, "disarm", 100.0, kind="lower bound", samples=1000),
    run(2, "analytic", 0.0, error="not defined: needs one layer"),
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder of results, with a study in it."""
    study = tmp_path / "estimators"
    for folder in ("parts", "training"):
        (study / folder).mkdir(parents=True)
    (study / "plan.json").write_text(json.dumps(PLAN), encoding="utf-8")
    for number, content in enumerate(PARTS):
        (study / f"parts/{number:02}.json").write_text(json.dumps(content), encoding="utf-8")
    for number, content in enumerate(RUNS):
        (study / f"training/{number:02}.json").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


def of(table: dict[str, Any], model: str, estimator: str, layer: int = 1) -> dict[str, Any]:
    return next(r for r in table["rows"] if r["id"] == f"{model}.middle.{estimator}.generator{layer}")


def test_variance_at_equal_cost_is_relative_to_the_papers_best(results: Path) -> None:
    table = make_study_table(read_study(results / "estimators"))
    assert of(table, "depth-1", "score-function")["variance_at_equal_cost"] == 1.0
    assert of(table, "depth-1", "score-function:baseline=greedy")["variance_at_equal_cost"] == 1.6
    disarm = of(table, "depth-1", "disarm")
    assert (disarm["variance_at_equal_cost"], disarm["reference"]) == (0.25, "score-function")
    assert of(table, "depth-1", "straight-through")["variance_at_equal_cost"] == 0.0
    best = {(r["model"], r["layer"]): r["estimator"] for r in best_of_several(table["rows"])}
    assert best == {
        ("depth-1", 1): "disarm",
        ("depth-2", 1): "score-function:baseline=leave-one-out,samples=2",
        ("depth-2", 2): "score-function:baseline=leave-one-out,samples=2",
    }


def test_only_rows_of_the_references_objective_have_a_reference() -> None:
    bounds = {"objective": "bound of 4 samples from the generator"}
    posterior = {"part": "posterior", "objective": "evidence lower bound"}
    parts = [
        part("depth-1", "score-function", row()),
        part("depth-1", "vimco:samples=4", row(**bounds)),
        part("depth-1", "maximum-likelihood", row(**EXACT, objective="log-likelihood")),
        part("depth-1", "score-function:objective=elbo", row(**posterior)),
        part(
            "depth-1",
            "score-function:objective=elbo,baseline=leave-one-out,samples=4",
            row(**posterior, variance=4.0),
        ),
    ]
    table = trained(parts=parts)
    found = {row["estimator"]: row["variance_at_equal_cost"] for row in table["rows"]}
    assert found == {
        "score-function": 1.0,
        "vimco:samples=4": None,
        "maximum-likelihood": None,
        "score-function:objective=elbo": 1.0,
        "score-function:objective=elbo,baseline=leave-one-out,samples=4": 4.0,
    }
    assert {row["device"] for row in table["rows"]} == {"cpu"}


def test_a_variance_that_a_few_draws_carry_is_marked() -> None:
    """Far below the reference, but known to no more than a half."""
    parts = [
        part("depth-1", "score-function", row(variance=1.0, variance_stderr=0.01)),
        part("depth-1", "disarm", row(variance=0.01, variance_stderr=0.005)),
    ]
    text = best_table(trained(parts=parts))
    assert "| `disarm` † | 0.01 ± 0.005 † | 2 | 0.01 |" in text


def test_what_is_not_drawn_pixel_by_pixel_is_named_with_the_reason(results: Path) -> None:
    still = part("depth-1", "analytic", row(**EXACT)) | {"variance_by_feature": [0.0] * 64}
    far = part("depth-1", "score-function:credit=all", row())
    many = [
        part("depth-1", f"score-function:baseline=leave-one-out,samples={k}", row()) for k in range(2, 18)
    ]
    shown, left = choose_maps([still, far, *many])
    assert len(shown) == 15
    assert sorted(name for names in left.values() for name in names) == [
        "analytic",
        "score-function:baseline=leave-one-out,samples=17",
        "score-function:credit=all",
    ]
    assert choose_maps([]) == ([], {})
    assert write_study(results / "estimators")["maps_left_out"] == {}
    (results / "estimators/parts/99.json").write_text(json.dumps(still), encoding="utf-8")
    left_out = write_study(results / "estimators")["maps_left_out"]
    assert left_out == {"they have no variance": ["analytic"]}


def test_equal_time_shows_both_sides(results: Path) -> None:
    table = make_study_table(read_study(results / "estimators"))
    first = "| depth-1, middle, layer 1 | `score-function` | 1 ± 0.1 | 2 | `disarm` | 0.5 ± 0.1 | 1 | 0.25 |"
    assert first in best_table(table)


# ---- training ----


def trained(*runs: dict[str, Any], parts: list[dict[str, Any]] = PARTS) -> dict[str, Any]:
    return make_study_table(StudyResults(PLAN, tuple(parts), runs))


def test_runs_are_ranked_among_those_of_the_same_objective() -> None:
    marginal = part("depth-1", "maximum-likelihood", row(**EXACT, objective="log-likelihood"))
    table = trained(*RUNS, run(1, "maximum-likelihood", 50.0), parts=[*PARTS, marginal])
    groups = [(group.depth, group.short, len(group.runs)) for group in training_groups(table)]
    assert groups == [
        (1, "likelihood", 1),
        (1, "special case", 4),
    ]  # nothing was measured of disarm at depth 2
    text = objective_table(table)
    assert "| 1 | special-case bound | 4 | 70.0 (`straight-through`) | 90.0 | 110.0 | – | 0.40 | – |" in text


def test_variance_is_that_of_the_start_if_it_was_measured() -> None:
    later = part("depth-2", "disarm", row(1, variance=4.0), row(2, variance=8.0))
    start = part("depth-2", "disarm", row(1, variance=1.0), row(2, variance=2.0), point="start")
    table, own = trained(parts=[later, start]), run(2, "disarm", 100.0)
    assert measured_variance(table, own) == 1.5
    assert measured_variance(table, own, "middle") == 6.0
    assert measured_variance(table, run(1, "disarm", 100.0)) is None


def test_a_full_study_has_pictures(results: Path) -> None:
    write_study(results / "estimators")
    for name in ("variance_cost", "bias_variance", "variance_pixels", "training"):
        assert (results / f"estimators/{name}.png").read_bytes().startswith(b"\x89PNG")


def test_models_with_posteriors_have_pictures_of_their_own(results: Path) -> None:
    content = part("depth-2", "score-function:objective=elbo", row(), row(part="posterior"))
    (results / "estimators/parts/99.json").write_text(json.dumps(content), encoding="utf-8")
    write_study(results / "estimators")
    for name in ("variance_cost", "bias_variance", "variance_cost_posteriors", "bias_variance_posteriors"):
        assert (results / f"estimators/{name}.png").exists()


def test_the_markdown_has_every_gradient_and_what_was_refused(results: Path) -> None:
    text = study_markdown(make_study_table(read_study(results / "estimators")))
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == [
        "## depth 1",
        "### Middle: generator of layer 1",
        "## depth 2",
        "### Middle: generator of layer 1",
        "### Middle: generator of layer 2",
        "## At equal time",
        "## Training",
        "## Not defined",
    ]
    assert "- depth-2, analytic: needs one layer" in text
    assert "| 1 | `disarm` | special-case bound | 90.00 | 80.00 | exact | – | 3.0 | 1 |" in text
    assert "| 2 | `disarm` | – | 100.00 | 90.00 | bound, 1,000 samples | – | 3.0 | – |" in text
    assert "| 2 | `analytic` | not defined: needs one layer | – |" in text
    posterior = run(1, "score-function:objective=elbo", 95.0, elbo_nll=87.5)
    assert "| 95.00 | 85.00 | exact | 87.50 | 3.0 |" in training_table({"rows": [], "training": [posterior]})


def test_one_row_is_one_line_of_the_table(results: Path) -> None:
    table = write_study(results / "estimators")
    text = (results / "estimators/table.json").read_text(encoding="utf-8")
    assert json.loads(text) == table
    assert sum(line.startswith('    {"id": "depth-') for line in text.splitlines()) == len(table["rows"])


@pytest.mark.parametrize("name", ["plan.json", "parts/00.json"])
def test_a_damaged_file_is_named(results: Path, name: str) -> None:
    path = results / "estimators" / name
    path.write_text('{"version": 1}', encoding="utf-8")
    with pytest.raises(UserError, match="is damaged"):
        write_study(results / "estimators")
    path.write_text('{"version": 9}', encoding="utf-8")
    with pytest.raises(UserError, match="has version 9"):
        write_study(results / "estimators")


def test_seconds_are_by_device() -> None:
    parts = [part("depth-1", name, row()) for name in ("disarm", "score-function")]
    other = part("depth-2", "disarm", row()) | {"device": "another"}
    table = make_study_table(StudyResults(PLAN, (*parts, other), ()))
    assert table["seconds"] == {"cpu": 1.0, "another": 0.5}
