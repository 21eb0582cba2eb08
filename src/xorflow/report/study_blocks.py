"""What the study amounts to, in words and tables for a document: every sentence follows from the committed figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xorflow.report.study import POINTS, cost, same_gradient, short, training_table, with_error
from xorflow.report.study_figures import measured_variance
from xorflow.training.storage import read_json

NOT_RUN = (
    "The full study has not been run yet, so there are no figures here. `xorflow study` and `xorflow study --training` make "
    "them, and `make docs` writes them into this page."
)

_SMALL = 16
"""Features of models that only serve to be enumerated."""

_CHANCE = 3.0
_SEVERAL = ("leave-one-out", "multi-sample", "disarm", "arms", "double-cv")
"""Estimators of several samples or arms."""

_PICTURES = (
    (
        "variance_cost.png",
        "Variance against the time of a gradient; on the dotted line, estimators without any",
    ),
    (
        "bias_variance.png",
        "Bias against variance; open markers are three standard errors of a bias not told from zero",
    ),
    ("variance_pixels.png", "Variance of the gradient in the output bias of each pixel, at depth 1"),
    ("training.png", "Greedy likelihood after training against the measured variance"),
)

Row = dict[str, Any]


def study_block(results: Path) -> str:
    """For the page on estimators: findings, tables, pictures; or that the study has not been run."""
    path = results / "study/table.json"
    table = read_json(path, "the table of the study") if path.exists() else None
    if table is None or table["settings"]["budget"] != "full" or not (table["rows"] or table["training"]):
        return NOT_RUN
    parts = [_settings(table)] if table["rows"] else []
    parts += ["\n".join(f"- {line}" for line in findings(table))]
    images = [row for row in table["rows"] if row["features"] > _SMALL]
    if best_of_several(images):
        parts.append(f"### At equal time\n\n{_equal_time_table(images)}")
    parts += _tables(table)
    if table["training"]:
        parts.append(f"### Training with them\n\n{_recipe(table)}\n\n{training_table(table['training'])}")
    parts += [
        f"![{words}](../results/study/{name})" for name, words in _PICTURES if (path.parent / name).exists()
    ]
    if table["rows"]:
        parts.append("All layers, points and models are in [the whole table](../results/study/table.md).")
    return "\n\n".join(parts)


def _settings(table: Row) -> str:
    held = table["settings"]
    draws = f"{held['draws']:,} draws of every estimator on one batch of {held['batch']} images"
    where = held["device"] or "the CPU"
    return (
        f"Measured on {where}: {draws}. Bias is the squared distance of their mean from the exact gradient, estimated without "
        "bias of its own, so that it may be negative. It and the variance are divided by the squared norm of that gradient."
    )


def _recipe(table: Row) -> str:
    """How the runs of the training comparison were made, all in the same way."""
    run = next((run for run in table["training"] if not run.get("error")), None)
    if run is None:
        return "No run has come to its end."
    widths = ", ".join(f"{width:,}" for width in run["hidden"])
    beside = "" if run["jobs"] == 1 else f", {run['jobs']} at once, so that seconds are of shared time"
    return (
        f"Every run: {run['epochs']} epochs on all training images in batches of {run['batch_size']}, learning rate "
        f"{run['lr']:g} falling to 0, networks of {widths} hidden units on the fixed base, from the same start{beside}. "
        "The weights are those of the last epoch."
    )


# ---- findings ----


def findings(table: Row) -> list[str]:
    """What the figures say, one sentence or two each."""
    rows = [row for row in table["rows"] if row["features"] > _SMALL]
    found = [*_unbiased(rows), *_straight_through(rows), *_biased(rows), *_at_equal_time(rows)]
    return found + [line for depth in (1, 2) for line in _training(table, depth)]


def is_within(row: Row) -> bool:
    """Whether a bias is not told from zero."""
    return abs(row["bias"]) <= _CHANCE * row["bias_stderr"]


def _unbiased(rows: Sequence[Row]) -> list[str]:
    claimed = [row for row in rows if row["claim"] == "unbiased" and row["bias"] is not None]
    if not claimed:
        return []
    outside = [row for row in claimed if not is_within(row)]
    again = sum("first" in row for row in claimed)
    names = "".join(
        f"; {_place(row)}, `{row['estimator']}` is not, with {with_error(row['bias'], row['bias_stderr'])}"
        for row in outside
    )
    twice = f" Measured a second time: {again}." if again else ""
    blind = {row["estimator"] for row in rows if row["claim"] == "unbiased" and row["bias"] is None}
    names_of_blind = ", ".join(f"`{name}`" for name in sorted(blind))
    rest = (
        f" Without an oracle at this size, and so proved on small models only: {names_of_blind}."
        if blind
        else ""
    )
    return [
        f"Unbiased: of {len(claimed)} gradients of estimators that claim no bias, {len(claimed) - len(outside)} are within "
        f"three standard errors of the exact one{names}.{twice}{rest}"
    ]


def _straight_through(rows: Sequence[Row]) -> list[str]:
    own = [row for row in rows if row["estimator"] == "straight-through" and row["bias"] is not None]
    found = []
    exact = [row for row in own if row["depth"] == 1]
    if exact:
        zero = all(row["bias"] == 0 for row in exact)
        words = "exactly zero, to rounding" if zero else ", ".join(short(row["bias"]) for row in exact)
        found.append(f"Straight-through at depth 1 against the special-case bound: bias {words}.")
    deep = [row for row in own if row["depth"] > 1]
    if deep:
        cells = [
            f"{row['point']}, layer {row['layer']}: {with_error(row['bias'], row['bias_stderr'])}"
            for row in deep
        ]
        found.append(f"Straight-through at depth {deep[0]['depth']}: bias {'; '.join(cells)}.")
    return found


def _biased(rows: Sequence[Row]) -> list[str]:
    shown = [
        row
        for row in _last(rows)
        if row["claim"] == "biased" and row["bias"] is not None and not is_within(row) and row["depth"] == 1
    ]
    if not shown:
        return []
    cells = [f"`{row['estimator']}` {row['distance']:.2f}" for row in shown]
    return [
        f"Relative distance of the biased ones from the exact gradient, depth 1, converged: {', '.join(cells)}."
    ]


def _last(rows: Sequence[Row]) -> list[Row]:
    """The rows of each model's last point."""
    latest: dict[str, int] = {}
    for row in rows:
        latest[row["model"]] = max(latest.get(row["model"], 0), POINTS.index(row["point"]))
    return [row for row in rows if POINTS.index(row["point"]) == latest[row["model"]]]


def _place(row: Row) -> str:
    layer = row["part"] if row["layer"] is None else f"{row['part']} of layer {row['layer']}"
    return f"{row['model']}, {row['point']}, {layer}"


def _at_equal_time(rows: Sequence[Row]) -> list[str]:
    best = best_of_several(rows)
    if not best:
        return []
    below = sum(row["variance_at_equal_cost"] < 1 for row in best)
    return [
        "At equal measured time an estimator of several samples or arms has less variance than the paper's best control "
        f"variate in {below} of {len(best)} gradients{'' if below == len(best) else '; in the others none has'}."
    ]


def best_of_several(rows: Sequence[Row]) -> list[Row]:
    """For each gradient of a generator that has a reference: the best estimator of several samples or arms, at equal time."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["part"] != "generator" or not _is_comparable(row):
            continue
        key = (row["model"], row["point"], row["layer"])
        if key not in found or (cost(row) or 0.0) < (cost(found[key]) or 0.0):
            found[key] = row
    return list(found.values())


def _is_comparable(row: Row) -> bool:
    """Whether it draws several, and estimates the same gradient as the reference."""
    several = row["estimator"].startswith(_SEVERAL) and row["draws"] > 1
    return several and row["objective"] == "special-case bound" and row["variance_at_equal_cost"] is not None


def _equal_time_table(rows: Sequence[Row]) -> str:
    lines = [
        "| gradient | the paper's best control variate | best of several samples or arms | its variance at equal time |",
        "|---|---|---|---:|",
    ]
    for row in best_of_several(rows):
        names = f"`{row['reference']}` | `{row['estimator']}`"
        lines.append(f"| {_place(row)} | {names} | {row['variance_at_equal_cost']:.2g} |")
    return "\n".join(lines)


def _training(table: Row, depth: int) -> list[str]:
    """Whether estimators of less variance end with better likelihoods, and which do not."""
    pairs = []
    for run in table["training"]:
        variance = None if run.get("error") else measured_variance(table, run)
        if run["depth"] == depth and variance is not None:
            pairs.append((run["estimator"], variance, run["greedy_nll"]))
    if len(pairs) < 4:
        return []
    by_variance, by_nll = (_ranks([pair[index] for pair in pairs]) for index in (1, 2))
    agreement = statistics.correlation(by_variance, by_nll) if len(set(by_variance)) > 1 else 0.0
    apart = sorted(range(len(pairs)), key=lambda i: abs(by_variance[i] - by_nll[i]), reverse=True)[:3]
    names = ", ".join(
        f"`{pairs[i][0]}` ({'better' if by_nll[i] < by_variance[i] else 'worse'} than its variance says)"
        for i in apart
    )
    return [
        f"Training at depth {depth}: the ranks of measured variance and of the final greedy likelihood have correlation "
        f"{agreement:.2f}; furthest from it are {names}."
    ]


def _ranks(values: Sequence[float]) -> list[float]:
    """From 0 on; equal values share the mean of their ranks."""
    order = sorted(values)
    return [(order.index(value) + len(order) - 1 - order[::-1].index(value)) / 2 for value in values]


# ---- tables ----


def _tables(table: Row) -> list[str]:
    """For each layer of the models on images, all estimators in the middle of training."""
    rows = [row for row in table["rows"] if row["features"] > _SMALL and row["part"] != "base"]
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
