"""The study's table, sentences and pictures, from small result files made for the purpose."""

import json
from pathlib import Path
from typing import Any

import pytest

from research.estimators.advice import advice, advice_block
from research.estimators.equal_time import best_of_several, equal_time_findings, equal_time_tables
from research.estimators.findings import findings
from research.estimators.maps import choose_maps
from research.estimators.page import NOT_RUN, study_block
from research.estimators.table import (
    StudyResults,
    distance,
    is_within,
    make_study_table,
    read_study,
    study_markdown,
    training_table,
    write_study,
)
from research.estimators.training_table import (
    measured_variance,
    objective_table,
    training_findings,
    training_groups,
)
from xorflow.errors import DataError

PAPER = ["special-case", "special-case:baseline=greedy"]
PLAN = {
    "version": 1,
    "settings": {
        "budget": "full",
        "words": "Full study.",
        "draws": 400,
        "batch": 64,
        "seed": 0,
        "device": "a device",
    },
    "references": {"generator": PAPER, "posterior": ["full-posterior"]},
    "models": {
        "depth-1": {"title": "depth 1", "words": "trained so"},
        "depth-2": {"title": "depth 2", "words": "too"},
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
    part("depth-1", "special-case", row(milliseconds=2.0, variance=1.0)),
    part("depth-1", "special-case:baseline=greedy", row(milliseconds=4.0, variance=0.8)),
    part("depth-1", "disarm", row(milliseconds=1.0, variance=0.5)),
    part("depth-1", "arms:samples=4", row(milliseconds=8.0, variance=0.4)),
    part("depth-1", "straight-through", row(**EXACT)),
    part("depth-1", "concrete", row(claim="biased", bias=0.04, distance=0.2)),
    part(
        "depth-1",
        "multi-sample:samples=4",
        row(oracle=None, bias=None, bias_stderr=None, distance=None, cosine=None),
    ),
    part("depth-2", "special-case", row(1, variance=0.1), row(2)),
    part("depth-2", "leave-one-out:samples=2", row(1, bias=0.5, draws=1600, earlier=[EARLIER]), row(2)),
    part("depth-2", "straight-through", *(row(layer, claim="biased", bias=0.1 * layer) for layer in (1, 2))),
]
RUNS = [
    run(1, "special-case", 110.0),
    run(1, "disarm", 90.0),
    run(1, "arms:samples=4", 120.0),
    run(1, "straight-through", 80.0),
    run(2, "disarm", 100.0, kind="lower bound", samples=1000),
    run(2, "analytic", 0.0, error="not defined: needs one layer"),
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder of results, with a study in it."""
    study = tmp_path / "study"
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
    table = make_study_table(read_study(results / "study"))
    assert of(table, "depth-1", "special-case")["variance_at_equal_cost"] == 1.0
    assert of(table, "depth-1", "special-case:baseline=greedy")["variance_at_equal_cost"] == 1.6
    disarm = of(table, "depth-1", "disarm")
    assert (disarm["variance_at_equal_cost"], disarm["reference"]) == (0.25, "special-case")
    assert of(table, "depth-1", "straight-through")["variance_at_equal_cost"] == 0.0
    best = {(r["model"], r["layer"]): r["estimator"] for r in best_of_several(table["rows"])}
    assert best == {
        ("depth-1", 1): "disarm",
        ("depth-2", 1): "leave-one-out:samples=2",
        ("depth-2", 2): "leave-one-out:samples=2",
    }


def test_findings_follow_from_the_figures(results: Path) -> None:
    found = findings(make_study_table(read_study(results / "study")))
    text = "\n".join(found)
    assert "of 9 gradients of estimators that claim no bias, 8 are within three standard errors" in text
    assert (
        "depth-2, middle, generator of layer 1, `leave-one-out:samples=2` is not, with 0.5 ± 0.002 of 1,600 draws (before: "
        "0.4 ± 0.1 of 400 draws)" in text
    )
    assert "Measured more than once: 1." in text
    assert (
        "Straight-through at depth 1 against the special-case bound: bias exactly zero, to rounding." in text
    )
    assert (
        "Straight-through at depth 2, relative distance from the exact gradient: middle, layer 1: 0.32 ± 0.003; middle, "
        "layer 2: 0.45 ± 0.002." in text
    )
    assert "`concrete` 0.2 ± 0.005." in text
    assert "1 of them are exactly zero, without noise. 0 have a standard error of the bias above 0.5" in text
    assert "in 1 of 3 gradients of generators under the special-case bound, in 1 of them one or more" in text
    assert (
        "(but 10 times as much in depth-2, middle, layer 1, 1 times as much in depth-2, middle, layer 2)"
        in text
    )


def test_a_bias_is_judged_by_the_error_without_a_bias() -> None:
    claimed = row(bias=0.05, bias_stderr=0.02, bias_noise=0.01)
    assert not is_within(claimed)
    assert distance(claimed) == "0.22 ± 0.04"
    assert distance(row(bias=-0.05, bias_stderr=0.001)) == "not told from zero, at most 0.05"
    assert distance(row(**EXACT)) == "0"


def test_what_converged_means_is_said_of_models_trained_for_another_objective() -> None:
    points = [
        part("depth-1", name, row(norm=norm, **also), point=point)
        for name, norms, also in (
            ("disarm", (3.0, 12.0), {}),
            ("marginal", (2.0, 1.0), {"objective": "log-likelihood"}),
        )
        for point, norm in zip(("start", "converged"), norms, strict=True)
    ]
    words = {"depth-1": {"title": "depth 1", "words": "trained for 20 epochs by marginal, on a fixed base"}}
    table = make_study_table(StudyResults(PLAN | {"models": words}, tuple(points), ()))
    assert findings(table)[0].endswith("depth-1 3 and 12 (of what it was trained on: 2 and 1).")


def test_only_rows_of_the_references_objective_have_a_reference() -> None:
    bounds = {"objective": "bound of 4 samples from the generator"}
    posterior = {"part": "posterior", "objective": "evidence lower bound"}
    parts = [
        part("depth-1", "special-case", row()),
        part("depth-1", "multi-sample:samples=4", row(**bounds)),
        part("depth-1", "marginal", row(**EXACT, objective="log-likelihood")),
        part("depth-1", "full-posterior", row(**posterior)),
        part("depth-1", "leave-one-out:samples=4,proposal=q", row(**posterior, variance=4.0)),
    ]
    table = trained(parts=parts)
    found = {row["estimator"]: row["variance_at_equal_cost"] for row in table["rows"]}
    assert found == {
        "special-case": 1.0,
        "multi-sample:samples=4": None,
        "marginal": None,
        "full-posterior": 1.0,
        "leave-one-out:samples=4,proposal=q": 4.0,
    }
    assert {row["device"] for row in table["rows"]} == {"cpu"}
    text = "\n".join(findings(table))
    assert "0 of 1 gradients of posteriors under the evidence lower bound" in text
    assert "(but 4 times as much in depth-1, middle, posterior of layer 1)" in text


def test_a_variance_that_a_few_draws_carry_is_marked_and_wins_nothing() -> None:
    """Far below the reference, but known to no more than a half."""
    parts = [
        part("depth-1", "special-case", row(variance=1.0, variance_stderr=0.01)),
        part("depth-1", "disarm", row(variance=0.01, variance_stderr=0.005)),
    ]
    rows = trained(parts=parts)["rows"]
    text = equal_time_tables(rows)
    assert "| `disarm` † | 0.01 ± 0.005 † | 2 | 0.01 |" in text
    assert "| `disarm` | 0.01 † |" in text
    assert (
        "in 1 of 1 gradients of generators under the special-case bound, in 0 of them"
        in equal_time_findings(rows)[0]
    )


def test_what_is_not_drawn_pixel_by_pixel_is_named_with_the_reason(results: Path) -> None:
    still = part("depth-1", "analytic", row(**EXACT)) | {"variance_by_feature": [0.0] * 64}
    far = part("depth-1", "special-case:rewards=all", row())
    many = [part("depth-1", f"leave-one-out:samples={k}", row()) for k in range(2, 18)]
    shown, left = choose_maps([still, far, *many], ("start", "middle", "converged"))
    assert len(shown) == 15
    assert sorted(name for names in left.values() for name in names) == [
        "analytic",
        "leave-one-out:samples=17",
        "special-case:rewards=all",
    ]
    assert choose_maps([], ("start",)) == ([], {})
    write_study(results / "study")
    assert "Left out of this picture" not in study_block(results)
    (results / "study/parts/99.json").write_text(json.dumps(still), encoding="utf-8")
    write_study(results / "study")
    assert "Left out of this picture: `analytic` (they have no variance)." in study_block(results)


def test_equal_time_shows_both_sides_and_every_estimator(results: Path) -> None:
    text = equal_time_tables(make_study_table(read_study(results / "study"))["rows"])
    first = "| depth-1, middle, layer 1 | `special-case` | 1 ± 0.1 | 2 | `disarm` | 0.5 ± 0.1 | 1 | 0.25 |"
    assert first in text
    assert "| estimator | depth-1, middle, layer 1 |\n" in text
    assert "| `disarm` | **0.25** |\n" in text
    assert "| `arms:samples=4` | 1.6 |\n" in text
    assert "| estimator | depth-2, middle, layer 1 | depth-2, middle, layer 2 |\n" in text


# ---- training ----


def trained(*runs: dict[str, Any], parts: list[dict[str, Any]] = PARTS) -> dict[str, Any]:
    return make_study_table(StudyResults(PLAN, tuple(parts), runs))


def test_runs_are_ranked_among_those_of_the_same_objective() -> None:
    marginal = part("depth-1", "marginal", row(**EXACT, objective="log-likelihood"))
    table = trained(*RUNS, run(1, "marginal", 50.0), parts=[*PARTS, marginal])
    groups = [(group.depth, group.short, len(group.runs)) for group in training_groups(table)]
    assert groups == [
        (1, "likelihood", 1),
        (1, "special case", 4),
    ]  # nothing was measured of disarm at depth 2
    text = objective_table(table)
    assert "| 1 | special-case bound | 4 | 70.0 (`straight-through`) | 90.0 | 110.0 | – | 0.40 | – |" in text
    found = training_findings(table)
    assert found[0].startswith("Depth 1, the objective comes first: the worst run for the likelihood")
    assert "ends with 40.0 nats, the best of all others with 70.0 (`straight-through`)" in found[0]
    assert "variance hardly tells the likelihood." in found[1]
    assert "have correlation 0.40 (4 runs; ± 0.58 if there were no relation)" in found[1]
    assert "says: `arms:samples=4` (worse than it says: variance 0.4, NLL 110.0)" in found[1]


def test_noise_that_ends_better_than_the_exact_gradient_is_named() -> None:
    """Here more noise is better, throughout, and leaves more entropy."""
    names = ["straight-through", *(f"leave-one-out:samples={k}" for k in range(2, 9))]
    parts = [part("depth-1", names[0], row(**EXACT))]
    parts += [part("depth-1", name, row(variance=float(k))) for k, name in enumerate(names) if k]
    runs = [run(1, name, 100.0 - k, layers=[{"entropy": 1.0 + k}]) for k, name in enumerate(names)]
    wild = part("depth-1", "special-case", row(variance=1e4))
    (found,) = training_findings(trained(*runs, run(1, "special-case", 200.0), parts=[*parts, wild]))
    assert "Without the 1 whose variance is beyond 100, it is -1.00, of 8 runs." in found
    assert "`straight-through`, ends with 90.0 (greedy 100.0), and 7 with noise end better" in found
    assert "first of all `leave-one-out:samples=8` with 83.0 (greedy 93.0) at a variance of 7." in found
    assert "with correlation -1.00: 8.0 nats an image for the best, 1.0 for the exact gradient" in found


def test_variance_is_that_of_the_start_if_it_was_measured() -> None:
    later = part("depth-2", "disarm", row(1, variance=4.0), row(2, variance=8.0))
    start = part("depth-2", "disarm", row(1, variance=1.0), row(2, variance=2.0), point="start")
    table, own = trained(parts=[later, start]), run(2, "disarm", 100.0)
    assert measured_variance(table, own) == 1.5
    assert measured_variance(table, own, "middle") == 6.0
    assert measured_variance(table, own, layer=2) == 2.0
    assert measured_variance(table, run(1, "disarm", 100.0)) is None


def test_runs_that_are_the_same_are_said_to_be() -> None:
    (found,) = training_findings(trained(run(1, "disarm", 90.0), run(1, "arms:samples=4", 90.0)))
    assert found.endswith("to the last digit: `disarm`, `arms:samples=4` (depth 1).")


def test_advice_has_the_figures_that_there_are(results: Path) -> None:
    assert all("NLL" not in line for line in advice({"rows": [], "training": []}))
    more = [
        run(2, "disarm:sum_last=true", 95.0), run(1, "special-case:rewards=all", 300.0),
        run(1, "marginal", 60.0), run(1, "analytic", 80.0),
    ]  # fmt: skip
    wild = part("depth-1", "special-case:rewards=all", row(variance=800.0))
    text = "\n".join(advice(trained(*RUNS, *more, parts=[*PARTS, wild])))
    assert "After training: `marginal` 50.0, `analytic` 70.0." in text
    assert "without → with: `disarm` 90.0 → 85.0; better in 1 of 1." in text
    assert "depth 1: variance at the start 1 and 800, NLL `special-case` 100.0" in text
    assert advice_block(results).startswith("- **Choose the objective before the estimator.**")


def test_a_block_of_a_full_study_has_tables_and_pictures_that_exist(results: Path) -> None:
    assert study_block(results) == NOT_RUN
    write_study(results / "study")
    block = study_block(results)
    assert block.startswith("Measured on a device: 400 draws of every estimator on one batch of 64 images.")
    assert "### Depth 2, middle: generator of layer 2" in block
    assert "| `multi-sample:samples=4` | unbiased | no oracle |" in block
    assert (
        "Every run: 5 epochs on all training images in batches of 128, learning rate 0.001 falling to 0"
        in block
    )
    assert "2 runs at once: seconds are of shared time" in block
    assert "these are not converged runs" in block
    assert "Its standard error over images is 0.5 to 0.5." in block
    assert "All draws took" not in block
    for name in ("variance_cost", "bias_variance", "variance_pixels", "training"):
        assert f"](../results/study/{name}.png)" in block
        assert (results / f"study/{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "nan" not in block


def test_models_with_posteriors_have_pictures_of_their_own(results: Path) -> None:
    content = part("depth-2", "full-posterior", row(), row(part="posterior"))
    (results / "study/parts/99.json").write_text(json.dumps(content), encoding="utf-8")
    write_study(results / "study")
    block = study_block(results)
    for name in ("variance_cost", "bias_variance", "variance_cost_posteriors", "bias_variance_posteriors"):
        assert f"](../results/study/{name}.png)" in block


def test_a_smaller_budget_is_not_for_documents(results: Path) -> None:
    table = write_study(results / "study")
    table["settings"]["budget"] = "smoke"
    (results / "study/table.json").write_text(json.dumps(table), encoding="utf-8")
    assert study_block(results) == NOT_RUN
    assert study_block(results / "nothing") == NOT_RUN


def test_the_markdown_has_every_gradient_and_what_was_refused(results: Path) -> None:
    text = study_markdown(make_study_table(read_study(results / "study")))
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == [
        "## depth 1",
        "### Middle: generator of layer 1",
        "## depth 2",
        "### Middle: generator of layer 1",
        "### Middle: generator of layer 2",
        "## Training",
        "## Not defined",
    ]
    assert "- depth-2, analytic: needs one layer" in text
    assert "| 1 | `disarm` | special-case bound | 90.00 | 80.00 | exact | – | 3.0 | 1 |" in text
    assert "| 2 | `disarm` | – | 100.00 | 90.00 | bound, 1,000 samples | – | 3.0 | – |" in text
    assert "| 2 | `analytic` | not defined: needs one layer | – |" in text
    posterior = run(1, "full-posterior", 95.0, elbo_nll=87.5)
    assert "| 95.00 | 85.00 | exact | 87.50 | 3.0 |" in training_table({"rows": [], "training": [posterior]})


def test_one_row_is_one_line_of_the_table(results: Path) -> None:
    table = write_study(results / "study")
    text = (results / "study/table.json").read_text(encoding="utf-8")
    assert json.loads(text) == table
    assert sum(line.startswith('    {"id": "depth-') for line in text.splitlines()) == len(table["rows"])


@pytest.mark.parametrize("name", ["plan.json", "parts/00.json"])
def test_a_damaged_file_is_named(results: Path, name: str) -> None:
    path = results / "study" / name
    path.write_text('{"version": 1}', encoding="utf-8")
    with pytest.raises(DataError, match="is damaged"):
        write_study(results / "study")
    path.write_text('{"version": 9}', encoding="utf-8")
    with pytest.raises(DataError, match="has version 9"):
        write_study(results / "study")


def test_seconds_are_those_of_devices_whose_files_all_have_them() -> None:
    parts = [part("depth-1", name, row()) for name in ("disarm", "special-case")]
    other = part("depth-2", "disarm", row()) | {"device": "another"}
    table = make_study_table(StudyResults(PLAN, (*parts, other), ()))
    assert table["seconds"] == {"cpu": 1.0, "another": 0.5}
    del other["seconds"]
    assert make_study_table(StudyResults(PLAN, (*parts, other), ()))["seconds"] == {"cpu": 1.0}
