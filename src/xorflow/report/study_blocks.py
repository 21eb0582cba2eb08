"""What the study amounts to, in words and tables for a document: every sentence follows from the committed figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xorflow.report.study import POINTS, SMALL, same_gradient, short, training_table, with_error
from xorflow.report.study_equal_time import best_of_several, equal_time_tables
from xorflow.report.study_findings import findings
from xorflow.report.study_training import objective_table, training_findings
from xorflow.training.storage import read_json

NOT_RUN = (
    "The full study has not been run yet, so there are no figures here. `xorflow study` and `xorflow study --training` make "
    "them, and `make docs` writes them into this page."
)

_COST = "Variance against the time of a gradient; dotted: none; dashed: as the paper's best control variate at equal time"
_BIAS = "Bias against variance; open markers are three standard errors of a bias not told from zero"
_PICTURES = (
    ("variance_cost.png", _COST),
    ("bias_variance.png", _BIAS),
    ("variance_cost_posteriors.png", f"Models with posteriors. {_COST}"),
    ("bias_variance_posteriors.png", f"Models with posteriors. {_BIAS}"),
    ("variance_pixels.png", "Variance of the gradient in the output bias of each pixel, at depth 1"),
)
_TRAINING_PICTURE = (
    "training.png",
    "NLL after training, by objective and against the variance at the start; an arrow is a figure off the scale",
)

Row = dict[str, Any]


def study_block(results: Path) -> str:
    """For the page on estimators: findings, tables, pictures; or that the study has not been run."""
    table = full_study(results)
    if table is None:
        return NOT_RUN
    parts = [_settings(table)] if table["rows"] else []
    parts += ["\n".join(f"- {line}" for line in findings(table))]
    images = [row for row in table["rows"] if row["features"] > SMALL]
    if best_of_several(images):
        parts.append(f"### At equal time\n\n{equal_time_tables(images)}")
    parts += [*_shown(results, *_PICTURES), *_left_out(table)]
    if table["training"]:
        parts += [f"### Training with them\n\n{_recipe(table)}", *_told(table)]
        parts += [*_shown(results, _TRAINING_PICTURE), training_table(table)]
    parts += _tables(table)
    if table["rows"]:
        parts.append("All layers, points and models are in [the whole table](../results/study/table.md).")
    return "\n\n".join(parts)


def full_study(results: Path) -> Row | None:
    """The committed table; None if there is none, or it is of a smaller budget."""
    path = results / "study/table.json"
    if not path.exists():
        return None
    table = read_json(path, "the table of the study")
    is_full = table["settings"]["budget"] == "full" and (table["rows"] or table["training"])
    return table if is_full else None


def _shown(results: Path, *pictures: tuple[str, str]) -> list[str]:
    there = [(name, words) for name, words in pictures if (results / "study" / name).exists()]
    return [f"![{words}](../results/study/{name})" for name, words in there]


def _left_out(table: Row) -> list[str]:
    """The rest of the caption of the last picture."""
    reasons = [
        f"{', '.join(f'`{name}`' for name in names)} ({why})"
        for why, names in table.get("maps_left_out", {}).items()
    ]
    return [f"Left out of this picture: {'; '.join(reasons)}."] if reasons else []


def _settings(table: Row) -> str:
    held = table["settings"]
    draws = f"{held['draws']:,} draws of every estimator on one batch of {held['batch']} images"
    where = held["device"] or "the CPU"
    seconds = table["seconds"].get(held["device"])
    took = (
        ""
        if seconds is None
        else f" All draws on {where} took {seconds:,.0f} s, the models' training not counted."
    )
    return (
        f"Measured on {where}: {draws}. Bias is the squared distance of their mean from the exact gradient, estimated without "
        "bias of its own, so that it may be negative. It and the variance are divided by the squared norm of that gradient. "
        f"The relative distance is the root of the bias.{took}"
    )


def _recipe(table: Row) -> str:
    """How the runs of the training comparison were made, all in the same way."""
    run = next((run for run in table["training"] if not run.get("error")), None)
    if run is None:
        return "No run has come to its end."
    widths = ", ".join(f"{width:,}" for width in run["hidden"])
    beside = (
        ""
        if run["jobs"] == 1
        else f" {run['jobs']} runs at once: seconds are of shared time, and what is beside a costly run waits with it."
    )
    return (
        f"Every run: {run['epochs']} epochs on all training images in batches of {run['batch_size']}, learning rate "
        f"{run['lr']:g} falling to 0, networks of {widths} hidden units on the fixed base, from the same start, with one seed. "
        f"The weights are those of the last epoch. {run['epochs']} epochs are few: these are not converged runs, and what is "
        f"close together may change places with another seed.{beside} Milliseconds are of one gradient, alone on the device."
    )


_MEANING = (
    "All figures are of test images, in nats, and lower is better. Greedy NLL is exact, the likelihood of the deterministic "
    "reading: another model with the same weights. NLL is exact at depth 1. At depth 2 it is a bound from importance samples, "
    "on average above the model's NLL. So is the ELBO, of runs with a posterior."
)
_RANKS = (
    "What each objective reaches, and the correlation of the ranks of NLL and variance of its estimators, at each point of the "
    "study where the variance was measured:"
)


def _told(table: Row) -> list[str]:
    """What the runs say, before all of them are listed."""
    errors = [run["stderr"] for run in table["training"] if not run.get("error") and "stderr" in run]
    spread = f" Its standard error over images is {min(errors):.1f} to {max(errors):.1f}." if errors else ""
    found = training_findings(table)
    if not found:
        return [f"{_MEANING}{spread}"]
    return [
        f"{_MEANING}{spread}",
        _RANKS,
        objective_table(table),
        "\n".join(f"- {line}" for line in found),
    ]


# ---- tables ----


def _tables(table: Row) -> list[str]:
    """For each layer of the models on images, all estimators in the middle of training."""
    rows = [row for row in table["rows"] if row["features"] > SMALL and row["part"] != "base"]
    parts, seen = [], set()
    for row in rows:
        key = (row["model"], row["part"], row["layer"])
        points = [r["point"] for r in rows if r["model"] == row["model"]]
        if key in seen or row["point"] != ("middle" if "middle" in points else max(points, key=POINTS.index)):
            continue
        seen.add(key)
        title = table["models"][row["model"]]["title"]
        of = f"{row['part']} of layer {row['layer']}"
        heading = f"### {title[:1].upper()}{title[1:]}, {row['point']}: {of}"
        parts.append(f"{heading}\n\n{_essence(same_gradient(row, rows))}")
    return parts


def _essence(rows: Sequence[Row]) -> str:
    lines = [
        "| estimator | claim | bias | variance | cosine | passes | ms | variance at equal cost |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: (row["variance"] is None, row["variance"] or 0.0)):
        cells = [
            f"`{row['estimator']}`",
            row["claim"],
            with_error(row["bias"], row["bias_stderr"]) if row["oracle"] else "no oracle",
            *(short(row[key]) for key in ("variance", "cosine", "passes", "milliseconds")),
            short(row["variance_at_equal_cost"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
