"""Estimators of several samples or arms against the paper's best control variate, at equal measured time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from research.estimators.table import cost, same_gradient, short

Row = dict[str, Any]

_UNSTEADY = 0.3
"""A standard error beyond this part of the variance: a few draws carry most of it, and no winner is named."""
_MARK = " †"
_SEVERAL = ("leave-one-out", "vimco", "disarm", "arms", "double-cv")
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


def _mark(row: Row) -> str:
    return "" if is_steady(row) else _MARK
