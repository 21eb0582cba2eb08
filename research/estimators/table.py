"""The study of estimators, from its result files: the table as numbers and as Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research import results as records
from research.estimators.figures import choose_maps, draw_study
from research.estimators.names import POINTS
from research.estimators.study import COMMAND
from research.estimators.training_table import SMALL, training_table
from research.results import Record
from research.tables import markdown_table, short, with_error

MEANING = (
    "Every row is one estimator's gradient in the parameters of one layer, for one batch of data. Bias is the squared "
    "distance between the mean of the draws and the exact gradient of the row's objective, variance the trace of the "
    "covariance of one draw, both divided by the squared norm of the exact gradient. Bias is estimated without bias of its "
    "own, as the mean of the products of independent groups' mean errors: for an unbiased estimator it is centred at zero "
    "and may be negative; its standard error comes from the same products. `bias_noise` is the standard error that it would "
    "have without a bias, which a bias is told from zero by, since the other grows with a bias. A bias of more than three such "
    "errors where none is claimed is measured again, with fresh noise and more draws (four times, then sixteen times; `draws` "
    "says how far that went); what "
    "was found before is kept beside it, as `earlier`. The distance is the root of the bias. The "
    "signal-to-noise ratio is the norm of the estimator's own mean over the root of its variance. "
    "Gradients are in float64, and a bias below 1e-24 is rounding, written as 0. A pass is one evaluation of one layer's "
    "network on the batch. Milliseconds are of loss and gradient in float32, as in training. Variance at equal cost is "
    "variance times milliseconds, divided by that of the reference: the best, by the same product, of the paper's unbiased "
    "control variates, of the same objective; other objectives have none. Models of our own have a fixed base and MADEs, of "
    "1,024 hidden units in the full study, of 16 on 3 or 4 pixels; the middle of their training is a quarter of its epochs."
)

SEVERAL_MEANING = (
    "The paper's best control variate beside the best estimator of several samples or arms, on images. At equal time: the "
    "ratio of variance times time; below 1, several samples win. †: the standard error is more than 0.3 of the variance, and "
    "the winner is not certain. Generators are under the special-case bound, posteriors under the ELBO."
)
TRAINING_MEANING = (
    "NLL is the latent likelihood, greedy NLL the deterministic one, exact at any depth. `ms` is the time of one gradient, "
    "measured alone; several runs may have shared the device during `seconds`."
)


@dataclass(frozen=True)
class StudyResults:
    """The plan of a study, its measurements, and its training runs, as their files hold them."""

    plan: Record
    measurements: tuple[Record, ...]
    training: tuple[Record, ...]


def read_study(folder: Path) -> StudyResults:
    """What a study left in a folder."""
    plan = records.read(folder / "plan.json", COMMAND, ("settings", "models"))
    return StudyResults(plan, *(records.read_all(folder, kind, COMMAND) for kind in ("parts", "training")))


# ---- the table as numbers ----


def make_study_table(results: StudyResults) -> Record:
    """What `table.json` holds."""
    plan = results.plan
    rows = [row for measurement in results.measurements for row in _rows_of(measurement)]
    models = list(plan["models"])
    rows.sort(key=lambda row: (models.index(row["model"]), POINTS.index(row["point"])))
    for row in rows:
        row |= _at_equal_cost(row, rows, plan["references"])
    return {
        "version": records.VERSION,
        "description": f"{plan['settings']['description']} {MEANING}",
        "settings": plan["settings"],
        "models": plan["models"],
        "rows": rows,
        "refused": plan["refused"],
        "seconds": _seconds(results.measurements),
        "maps_left_out": choose_maps(results.measurements)[1],
        "training": [{key: run[key] for key in run if key != "version"} for run in results.training],
    }


def _seconds(measurements: Sequence[Record]) -> dict[str, float]:
    """What all draws on each device took."""
    taken: dict[str, float] = {}
    for measurement in measurements:
        taken[measurement["device"]] = taken.get(measurement["device"], 0.0) + measurement["seconds"]
    return {device: round(seconds, 1) for device, seconds in taken.items()}


def _rows_of(measurement: Record) -> list[Record]:
    """The rows of a file, each with all that tells it from others."""
    name = {key: measurement[key] for key in ("model", "point", "estimator")}
    about = {key: measurement[key] for key in ("depth", "features", "device")}
    return [
        {"id": ".".join([*name.values(), f"{row['part']}{row['layer'] or ''}"])} | name | row | about
        for row in measurement["rows"]
    ]


def cost(row: Record) -> float | None:
    """Variance times time."""
    return None if row["variance"] is None else row["variance"] * row["milliseconds"]


def _at_equal_cost(row: Record, rows: Sequence[Record], references: dict[str, list[str]]) -> Record:
    """Beside the best reference of the same objective: the variance of another gradient says nothing about this one."""
    drawn = "posterior" if row["objective"].startswith("evidence") else "generator"
    beside = [
        other
        for other in same_gradient(row, rows)
        if other["objective"] == row["objective"] and other["estimator"] in references[drawn] and cost(other)
    ]
    best = min(beside, key=lambda r: cost(r) or math.inf, default=None)
    of_row = cost(row)
    if best is None or of_row is None:
        return {"variance_at_equal_cost": None, "reference": None}
    ratio = float(f"{of_row / (cost(best) or math.inf):.6g}")
    return {"variance_at_equal_cost": ratio, "reference": best["estimator"]}


def same_gradient(row: Record, rows: Iterable[Record]) -> list[Record]:
    """The rows of all estimators for the same model, point and layer."""
    return [other for other in rows if _gradient(other) == _gradient(row)]


def _gradient(row: Record) -> tuple[Any, ...]:
    return row["model"], row["point"], row["part"], row["layer"]


# ---- the table as text ----


def study_markdown(table: Record) -> str:
    """What `table.md` holds: a table for each model, point and layer."""
    models = markdown_table(
        "model | trained by | >epochs",
        ([m["title"], f"`{m['estimator']}`", str(m["epochs"])] for m in table["models"].values()),
    )
    sections = [table["settings"]["description"], MEANING, models]
    for model, about in table["models"].items():
        rows = [row for row in table["rows"] if row["model"] == model]
        if rows:
            sections.append(f"## {about['title']}")
        for first in _first_of_each(rows):
            heading = f"### {first['point'].capitalize()}: {layer_of(first)}"
            sections.append(f"{heading}\n\n{estimator_table(same_gradient(first, rows))}")
    if best := best_table(table):
        sections.append(f"## At equal time\n\n{SEVERAL_MEANING}\n\n{best}")
    if table["training"]:
        sections.append(f"## Training\n\n{TRAINING_MEANING}\n\n{training_table(table)}")
    if table["refused"]:
        refused = [f"- {r['model']}, {r['estimator']}: {r['reason']}" for r in table["refused"]]
        sections.append("## Not defined\n\n" + "\n".join(refused))
    return "\n\n".join(sections)


def _first_of_each(rows: Sequence[Record]) -> list[Record]:
    """A row of each gradient, generators before posteriors and the base."""
    firsts = {_gradient(row): row for row in reversed(rows)}
    return sorted(
        firsts.values(),
        key=lambda row: (
            POINTS.index(row["point"]),
            row["part"] != "generator",
            row["part"],
            row["layer"] or 0,
        ),
    )


def layer_of(row: Record) -> str:
    """Whose gradient it is."""
    return row["part"] if row["layer"] is None else f"{row['part']} of layer {row['layer']}"


def estimator_table(rows: Sequence[Record]) -> str:
    """All estimators of one gradient, in Markdown."""
    figures = ("variance", "snr", "cosine", "passes", "milliseconds", "variance_at_equal_cost")
    return markdown_table(
        "estimator | claim | >bias | >variance | >SNR | >cosine | >passes | >ms | >at equal cost | objective | oracle",
        (
            [
                *(f"`{row['estimator']}`", row["claim"], with_error(row["bias"], row["bias_stderr"])),
                *(short(row[key]) for key in figures),
                *(row["objective"], row["oracle"] or "none"),
            ]
            for row in rows
        ),
    )


# ---- estimators of several samples or arms against the paper's best control variate, at equal measured time ----

_UNSTEADY = 0.3
"""A standard error beyond this part of the variance: a few draws carry most of it, and no winner is named."""
_SEVERAL = re.compile("vimco|disarm|arms|double-cv|score-function:.*baseline=leave-one-out")
"""Estimators of several samples or arms."""
_KINDS = {"generator": "special-case bound", "posterior": "evidence lower bound"}
"""Whose gradients are compared, and under which objective: that of the paper's control variates for it."""


def best_of_several(rows: Sequence[Record]) -> list[Record]:
    """For each gradient that has a reference: the best estimator of several samples or arms, at equal time."""
    best: dict[tuple[Any, ...], Record] = {}
    for row in rows:
        several = _SEVERAL.match(row["estimator"]) and row["draws"] > 1
        comparable = row["objective"] == _KINDS.get(row["part"]) and row["variance_at_equal_cost"] is not None
        if several and comparable:
            rival = best.get(_gradient(row), row)
            best[_gradient(row)] = min(rival, row, key=lambda r: cost(r) or 0.0)
    return sorted(best.values(), key=lambda row: list(_KINDS).index(row["part"]))


def best_table(table: Record) -> str:
    """On images: the best of several samples or arms beside the paper's best, gradient by gradient."""
    rows = [row for row in table["rows"] if row["features"] > SMALL]
    lines = []
    for row in best_of_several(rows):
        of = "posterior of " if row["part"] == "posterior" else ""
        cells = [f"{row['model']}, {row['point']}, {of}layer {row['layer']}"]
        beside = (other for other in same_gradient(row, rows) if other["estimator"] == row["reference"])
        for shown in (next(beside), row):
            mark = "" if shown["variance_stderr"] <= _UNSTEADY * shown["variance"] else " †"
            spread = f"{shown['variance']:.2g} ± {shown['variance_stderr']:.1g}{mark}"
            cells += [f"`{shown['estimator']}`{mark}", spread, short(shown["milliseconds"])]
        lines.append([*cells, f"{row['variance_at_equal_cost']:.2g}"])
    return markdown_table(
        "gradient | the paper's best control variate | >variance | >ms | best of several samples or arms | >variance | >ms | "
        ">at equal time",
        lines,
    )


# ---- files ----


def write_study(folder: Path) -> Record:
    """Write `table.json`, `table.md` and the pictures from the result files in a folder; returns the table."""
    results = read_study(folder)
    table = records.write_table(folder, lambda: make_study_table(results), study_markdown, records.by_line)
    draw_study(table, choose_maps(results.measurements)[0], folder)
    return table
