"""Estimators of several samples or arms against the paper's best control variate, at equal measured time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xorflow.report.study import cost, same_gradient, short

Row = dict[str, Any]

_CHANCE = 3.0
_SEVERAL = ("leave-one-out", "multi-sample", "disarm", "arms", "double-cv")
"""Estimators of several samples or arms."""


def best_of_several(rows: Sequence[Row]) -> list[Row]:
    """For each gradient of a generator that has a reference: the best estimator of several samples or arms, at equal time."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if _is_comparable(row):
            key = _gradient(row)
            if key not in found or (cost(row) or 0.0) < (cost(found[key]) or 0.0):
                found[key] = row
    return list(found.values())


def _gradient(row: Row) -> tuple[str, str, int]:
    return row["model"], row["point"], row["layer"]


def _is_comparable(row: Row) -> bool:
    """Whether it draws several, and estimates the same gradient of a generator as the reference."""
    several = row["part"] == "generator" and row["estimator"].startswith(_SEVERAL) and row["draws"] > 1
    return several and row["objective"] == "special-case bound" and row["variance_at_equal_cost"] is not None


def _reference(row: Row, rows: Sequence[Row]) -> Row:
    return next(other for other in same_gradient(row, rows) if other["estimator"] == row["reference"])


def is_told(row: Row, reference: Row) -> bool:
    """Whether variance times time is less than the reference's by more than three standard errors."""
    error = math.hypot(*(r["variance_stderr"] * r["milliseconds"] for r in (row, reference)))
    return (cost(reference) or 0.0) - (cost(row) or 0.0) > _CHANCE * error


def equal_time_findings(rows: Sequence[Row]) -> list[str]:
    """In how many gradients one of them has less variance, and in how many that is no chance."""
    best = best_of_several(rows)
    if not best:
        return []
    below = [row for row in best if row["variance_at_equal_cost"] < 1]
    told = sum(is_told(row, _reference(row, rows)) for row in below)
    rest = "" if len(below) == len(best) else "; in the others none has"
    return [
        "At equal measured time an estimator of several samples or arms has less variance than the paper's best control "
        f"variate in {len(below)} of {len(best)} gradients{rest}. In {told} the difference is more than three standard errors."
    ]


def equal_time_tables(rows: Sequence[Row]) -> str:
    """The best beside the paper's, and all of them, in Markdown."""
    return f"{_best(rows)}\n\n{_WORDS}\n\n{_all(rows)}"


_WORDS = (
    "Where the standard error of a variance is near the variance itself, a few draws carry most of it, and which estimator is "
    "the best is not told.\n\n"
    "All of them: variance times time, relative to the same product of the paper's best control variate. Bold: below 1 by more "
    "than three standard errors."
)


def _best(rows: Sequence[Row]) -> str:
    lines = [
        "| gradient | the paper's best control variate | variance | ms | best of several samples or arms | variance | ms | at "
        "equal time |",
        "|---|---|---:|---:|---|---:|---:|---:|",
    ]
    for row in best_of_several(rows):
        cells = [f"{row['model']}, {row['point']}, layer {row['layer']}"]
        for shown in (_reference(row, rows), row):
            spread = f"{shown['variance']:.2g} ± {shown['variance_stderr']:.1g}"
            cells += [f"`{shown['estimator']}`", spread, short(shown["milliseconds"])]
        lines.append(f"| {' | '.join(cells)} | {row['variance_at_equal_cost']:.2g} |")
    return "\n".join(lines)


def _all(rows: Sequence[Row]) -> str:
    own = [row for row in rows if _is_comparable(row)]
    gradients = list(dict.fromkeys(map(_gradient, own)))
    heads = [f"{model}, {point}, layer {layer}" for model, point, layer in gradients]
    lines = [f"| estimator | {' | '.join(heads)} |", f"|---|{'---:|' * len(gradients)}"]
    for name in dict.fromkeys(row["estimator"] for row in own):
        cells = []
        for gradient in gradients:
            row = next((r for r in own if r["estimator"] == name and _gradient(r) == gradient), None)
            text = "–" if row is None else f"{row['variance_at_equal_cost']:.2g}"
            told = row is not None and is_told(row, _reference(row, rows))
            cells.append(f"**{text}**" if told else text)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)
