"""The study of estimators, from its result files: the table as numbers and as Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research import results as records
from research.estimators.files import COMMAND
from research.estimators.maps import choose_maps
from research.results import damage_as_error, line

POINTS = ("start", "middle", "converged")
SMALL = 16
"""Features of models that only serve to be enumerated."""

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
    "control variates, of the same objective; other objectives have none."
)


@dataclass(frozen=True)
class StudyResults:
    """The plan of a study, its measurements, and its training runs, as their files hold them."""

    plan: dict[str, Any]
    parts: tuple[dict[str, Any], ...]
    training: tuple[dict[str, Any], ...]


def read_study(folder: Path) -> StudyResults:
    """What a study left in a folder."""
    plan = records.read(folder / "plan.json", COMMAND, ("settings", "models"))
    kinds = [
        tuple(records.read(path, COMMAND) for path in records.records(folder, kind))
        for kind in ("parts", "training")
    ]
    return StudyResults(plan, *kinds)


# ---- the table as numbers ----


def make_study_table(results: StudyResults) -> dict[str, Any]:
    """What `table.json` holds."""
    plan = results.plan
    rows = [row for part in results.parts for row in _rows_of(part)]
    models = list(plan["models"])
    rows.sort(key=lambda row: (models.index(row["model"]), POINTS.index(row["point"])))
    for row in rows:
        row |= _at_equal_cost(row, rows, plan["references"])
    return {
        "version": records.VERSION,
        "words": f"{plan['settings']['words']} {MEANING}",
        "settings": plan["settings"],
        "models": plan["models"],
        "rows": rows,
        "refused": plan["refused"],
        "seconds": _seconds(results.parts),
        "maps_left_out": choose_maps(results.parts, POINTS)[1],
        "training": [{key: run[key] for key in run if key != "version"} for run in results.training],
    }


def _seconds(parts: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What all draws on each device took, if every file of it says so."""
    taken: dict[str, list[float]] = {}
    for part in parts:
        taken.setdefault(part["device"], []).append(part.get("seconds", math.nan))
    return {device: round(sum(found), 1) for device, found in taken.items() if not math.isnan(sum(found))}


def _rows_of(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file, each with all that tells it from others."""
    name = {key: part[key] for key in ("model", "point", "estimator")}
    about = {key: part[key] for key in ("depth", "features", "device")}
    return [{"id": ".".join([*name.values(), _layer_name(row)])} | name | row | about for row in part["rows"]]


def _layer_name(row: dict[str, Any]) -> str:
    return row["part"] if row["layer"] is None else f"{row['part']}{row['layer']}"


def cost(row: dict[str, Any]) -> float | None:
    """Variance times time."""
    return None if row["variance"] is None else row["variance"] * row["milliseconds"]


def _at_equal_cost(
    row: dict[str, Any], rows: Sequence[dict[str, Any]], references: dict[str, list[str]]
) -> dict[str, Any]:
    """Beside the best reference of the same objective: the variance of another gradient says nothing about this one."""
    drawn = "posterior" if row["objective"].startswith("evidence") else "generator"
    beside = [
        other
        for other in same_gradient(row, rows)
        if other["objective"] == row["objective"] and other["estimator"] in references[drawn] and cost(other)
    ]
    best = min(beside, key=lambda r: cost(r) or math.inf, default=None)
    own = cost(row)
    if best is None or own is None:
        return {"variance_at_equal_cost": None, "reference": None}
    ratio = float(f"{own / (cost(best) or math.inf):.6g}")
    return {"variance_at_equal_cost": ratio, "reference": best["estimator"]}


CHANCE = 3.0
"""A bias of at most so many standard errors is not told from zero."""


def same_gradient(row: dict[str, Any], rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of all estimators for the same model, point and layer."""
    keys = ("model", "point", "part", "layer")
    return [other for other in rows if all(other[key] == row[key] for key in keys)]


# ---- the table as text ----


def study_markdown(table: dict[str, Any]) -> str:
    """What `table.md` holds: a table for each model, point and layer."""
    parts = [MEANING]
    for model, about in table["models"].items():
        rows = [row for row in table["rows"] if row["model"] == model]
        if rows:
            parts.append(f"## {about['title']}\n\n{about['words'][:1].upper()}{about['words'][1:]}.")
        for first in _first_of_each(rows):
            heading = f"### {_where(first)}"
            parts.append(f"{heading}\n\n{estimator_table(same_gradient(first, rows))}")
    if table["training"]:
        parts.append(f"## Training\n\n{training_table(table)}")
    if table["refused"]:
        refused = [f"- {r['model']}, {r['estimator']}: {r['reason']}" for r in table["refused"]]
        parts.append("## Not defined\n\n" + "\n".join(refused))
    return "\n\n".join(parts)


def _first_of_each(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = (POINTS.index(row["point"]), row["part"] != "generator", row["part"], row["layer"] or 0)
        found.setdefault(key, row)
    return [found[key] for key in sorted(found)]


def _where(row: dict[str, Any]) -> str:
    layer = row["part"] if row["layer"] is None else f"{row['part']} of layer {row['layer']}"
    return f"{row['point'].capitalize()}: {layer}"


_HEAD = (
    "| estimator | claim | bias | variance | SNR | cosine | passes | ms | at equal cost | objective | oracle |",
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---|---|",
)


def estimator_table(rows: Sequence[dict[str, Any]]) -> str:
    """All estimators of one gradient, in Markdown."""
    lines: list[str] = [*_HEAD]
    for row in rows:
        cells = (
            f"`{row['estimator']}`",
            row["claim"],
            with_error(row["bias"], row["bias_stderr"]),
            short(row["variance"]),
            short(row["snr"]),
            short(row["cosine"]),
            short(row["passes"]),
            short(row["milliseconds"]),
            short(row["variance_at_equal_cost"]),
            row["objective"],
            row["oracle"] or "none",
        )
        lines.append(line([*cells]))
    return "\n".join(lines)


def training_table(table: dict[str, Any]) -> str:
    """What each estimator reaches in the same steps, in Markdown; the lower of two bounds is the better."""
    lines = [
        "| depth | estimator | objective | greedy NLL | NLL | which is | ELBO | seconds | ms |",
        "|---:|---|---|---:|---:|---|---:|---:|---:|",
    ]
    for run in sorted(table["training"], key=lambda run: (run["depth"], run.get("nll") or math.inf)):
        name = (str(run["depth"]), f"`{run['estimator']}`")
        if run.get("error"):
            cells = [*name, run["error"], *["–"] * 6]
        else:
            kind = "exact" if run["kind"] == "exact" else f"bound, {run['samples']:,} samples"
            elbo = run.get("elbo_nll")
            cells = [
                *(*name, objective_of_run(table, run) or "–", f"{run['greedy_nll']:.2f}"),
                *(f"{run['nll']:.2f}", kind, "–" if elbo is None else f"{elbo:.2f}"),
                *(f"{run['seconds']:.1f}", short(_milliseconds(table, run))),
            ]
        lines.append(line([*cells]))
    return "\n".join(lines)


def objective_of_run(table: dict[str, Any], run: dict[str, Any]) -> str | None:
    """What a run of the comparison maximised, as the measurements of its estimator say; None if there are none."""
    return next((row["objective"] for row in table["rows"] if _is_of(row, run)), None)


def rows_of_run(table: dict[str, Any], run: dict[str, Any], *, small: bool = False) -> list[dict[str, Any]]:
    """The measurements of a run's estimator at the run's depth: on images, or also on a few pixels."""
    return [row for row in table["rows"] if _is_of(row, run) and (small or row["features"] > SMALL)]


def _is_of(row: dict[str, Any], run: dict[str, Any]) -> bool:
    return (row["estimator"], row["depth"]) == (run["estimator"], run["depth"])


def _milliseconds(table: dict[str, Any], run: dict[str, Any]) -> float | None:
    """Of one gradient, alone on the device."""
    return next((row["milliseconds"] for row in rows_of_run(table, run)), None)


def short(value: float | None) -> str:
    """Three digits, or a dash."""
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.3g}"


def with_error(value: float | None, stderr: float | None) -> str:
    if value is None or stderr is None:
        return "–"
    return short(value) if stderr == 0 else f"{value:.2g} ± {stderr:.1g}"


# ---- files ----


def _lines(table: dict[str, Any]) -> str:
    """JSON with one line for each row: short, and its changes can be read row by row."""
    entries = []
    for key, value in table.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
        entries.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def write_study(folder: Path) -> dict[str, Any]:
    """Write `table.json`, `table.md` and the pictures from the result files in a folder; returns the table."""
    from research.estimators.figures import draw_study  # half a second of imports

    results = read_study(folder)
    with damage_as_error(f"a record in {folder}"):
        table = make_study_table(results)
        text = f"{table['settings']['words']}\n\n{study_markdown(table)}\n"
    records.write_bytes(folder / "table.json", _lines(table).encode())
    records.write_bytes(folder / "table.md", text.encode())
    draw_study(results, table, folder)
    return table
