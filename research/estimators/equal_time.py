"""Estimators of several samples or arms against the paper's best control variate, at equal measured time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from research.estimators.table import cost, same_gradient, short

Row = dict[str, Any]

_CHANCE = 3.0
_UNSTEADY = 0.3
"""A standard error beyond this part of the variance: a few draws carry most of it, and no winner is named."""
_MARK = " †"
_SEVERAL = ("leave-one-out", "multi-sample", "disarm", "arms", "double-cv")
"""Estimators of several samples or arms."""
_KINDS = {"generator": "special-case bound", "posterior": "evidence lower bound"}
"""Whose gradients are compared, and under which objective: that of the paper's control variates for it."""


def best_of_several(rows: Sequence[Row]) -> list[Row]:
    """For each gradient that has a reference: the best estimator of several samples or arms, at equal time."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if _is_comparable(row):
            key = _gradient(row)
            if key not in found or (cost(row) or 0.0) < (cost(found[key]) or 0.0):
                found[key] = row
    return sorted(found.values(), key=lambda row: list(_KINDS).index(row["part"]))


def _gradient(row: Row) -> tuple[str, str, str, int]:
    return row["model"], row["point"], row["part"], row["layer"]


def _name(gradient: tuple[str, str, str, int]) -> str:
    model, point, part, layer = gradient
    return f"{model}, {point}, {'posterior of ' if part == 'posterior' else ''}layer {layer}"


def _is_comparable(row: Row) -> bool:
    """Whether it draws several, and estimates the same gradient as the reference."""
    several = row["estimator"].startswith(_SEVERAL) and row["draws"] > 1
    of = row["objective"] == _KINDS.get(row["part"])
    return several and of and row["variance_at_equal_cost"] is not None


def _reference(row: Row, rows: Sequence[Row]) -> Row:
    return next(other for other in same_gradient(row, rows) if other["estimator"] == row["reference"])


def is_steady(row: Row) -> bool:
    """Whether its variance is known well enough to be compared."""
    return row["variance_stderr"] <= _UNSTEADY * row["variance"]


def is_told(row: Row, reference: Row) -> bool:
    """Whether variance times time is less than the reference's by more than three standard errors, which can be trusted."""
    if not (is_steady(row) and is_steady(reference)):
        return False
    error = math.hypot(*(r["variance_stderr"] * r["milliseconds"] for r in (row, reference)))
    return (cost(reference) or 0.0) - (cost(row) or 0.0) > _CHANCE * error


# ---- tables ----


def best_table(rows: Sequence[Row]) -> str:
    """The best of several samples or arms beside the paper's best, gradient by gradient."""
    lines = [
        "| gradient | the paper's best control variate | variance | ms | best of several samples or arms | variance | ms | at "
        "equal time |",
        "|---|---|---:|---:|---|---:|---:|---:|",
    ]
    for row in best_of_several(rows):
        cells = [_name(_gradient(row))]
        for shown in (_reference(row, rows), row):
            spread = f"{shown['variance']:.2g} ± {shown['variance_stderr']:.1g}{_mark(shown)}"
            cells += [f"`{shown['estimator']}`{_mark(shown)}", spread, short(shown["milliseconds"])]
        lines.append(f"| {' | '.join(cells)} | {row['variance_at_equal_cost']:.2g} |")
    return "\n".join(lines)


def _mark(*rows: Row) -> str:
    return "" if all(map(is_steady, rows)) else _MARK


def all_tables(rows: Sequence[Row]) -> str:
    """A table for each model: variance times time, relative to that of the paper's best control variate."""
    models = dict.fromkeys(row["model"] for row in best_of_several(rows))
    return "\n\n".join(_of_model([row for row in rows if row["model"] == model]) for model in models)


def _of_model(rows: Sequence[Row]) -> str:
    own = [row for row in rows if _is_comparable(row)]
    gradients = [_gradient(row) for row in best_of_several(rows)]
    lines = [f"| estimator | {' | '.join(map(_name, gradients))} |", f"|---|{'---:|' * len(gradients)}"]
    for name in dict.fromkeys(row["estimator"] for row in own):
        of = {_gradient(row): row for row in own if row["estimator"] == name}
        cells = [_ratio(of[key], rows) if key in of else "–" for key in gradients]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(row: Row, rows: Sequence[Row]) -> str:
    reference = _reference(row, rows)
    text = f"{row['variance_at_equal_cost']:.2g}{_mark(row, reference)}"
    return f"**{text}**" if is_told(row, reference) else text
