"""Estimators of several samples or arms against the paper's best control variate, at equal measured time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xorflow.report.study import cost, same_gradient, short

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


# ---- sentences ----


def equal_time_findings(rows: Sequence[Row]) -> list[str]:
    """In how many gradients one of them has less variance, and in how many that is no chance, by objective."""
    best = best_of_several(rows)
    told = [
        _of_kind([row for row in best if row["part"] == part], rows, f"{part}s under the {objective}")
        for part, objective in _KINDS.items()
        if any(row["part"] == part for row in best)
    ]
    if not told:
        return []
    return [
        "At equal measured time an estimator of several samples or arms has less variance than the paper's best control "
        f"variate {'; '.join(told)}."
    ]


def _of_kind(best: Sequence[Row], rows: Sequence[Row], words: str) -> str:
    below = [row for row in best if row["variance_at_equal_cost"] < 1]
    sure = {_gradient(row) for row in rows if _is_comparable(row) and is_told(row, _reference(row, rows))}
    told = sum(
        _gradient(row) in sure for row in best
    )  # by any of them: the best may be the one that is least sure
    lost = [
        f"{row['variance_at_equal_cost']:.2g} times as much in {_name(_gradient(row))}"
        for row in best
        if row not in below
    ]
    rest = f" (but {', '.join(lost)})" if lost else ""
    return f"in {len(below)} of {len(best)} gradients of {words}, in {told} of them one or more by three standard errors{rest}"


# ---- tables ----


def equal_time_tables(rows: Sequence[Row]) -> str:
    """The best beside the paper's, and all of them, in Markdown."""
    return f"{_best(rows)}\n\n{_WORDS}\n\n{_all(rows)}"


_WORDS = (
    f"Layers are those of generators under the special-case bound, posteriors those under the evidence lower bound.{_MARK}: "
    f"the standard error of a variance is more than {_UNSTEADY:g} of it. A few draws carry most of it then, and no winner is "
    "named: the one shown is the least that was found.\n\n"
    "All of them: variance times time, relative to the same product of the paper's best control variate. Bold: below 1 by more "
    f"than three standard errors, without{_MARK}."
)


def _best(rows: Sequence[Row]) -> str:
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


def _all(rows: Sequence[Row]) -> str:
    """A table for each model."""
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
