"""What the measurements on images say, one sentence or two for each finding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xorflow.report.study import POINTS, SMALL, bias_noise, distance, is_within, short, with_error
from xorflow.report.study_equal_time import equal_time_findings

Row = dict[str, Any]

_WEAK = 0.5
"""A standard error of a bias beyond this is so large that little is tested."""


def findings(table: Row) -> list[str]:
    """What the figures say, one sentence or two each."""
    rows = [row for row in table["rows"] if row["features"] > SMALL]
    return [
        *_points(table["models"], rows),
        *_unbiased(rows),
        *_straight_through(rows),
        *_biased(rows),
        *equal_time_findings(rows),
    ]


def _points(models: Row, rows: Sequence[Row]) -> list[str]:
    """What "converged" means where the model was trained for another objective than the estimators'."""
    found = []
    for model, about in models.items():
        own = [row for row in rows if row["model"] == model and " by marginal" in about["words"]]
        norms = [_norm(own, point, "special-case bound") for point in ("start", "converged")]
        beside = [_norm(own, point, None) for point in ("start", "converged")]
        if None not in norms:
            rest = (
                ""
                if None in beside
                else f" (of what it was trained on: {short(beside[0])} and {short(beside[1])})"
            )
            found.append(f"{model} {short(norms[0])} and {short(norms[1])}{rest}")
    if not found:
        return []
    return [
        "The points are of models trained by `marginal`, on the likelihood or its bound: converged is not converged for the "
        "special-case bound. The norm of its gradient on this batch, of all layers, at the start and at the end: "
        f"{'; '.join(found)}."
    ]


def _norm(rows: Sequence[Row], point: str, objective: str | None) -> float | None:
    """Of the exact gradient of all generators, by objective; by default of what `marginal` trains."""
    chosen = {
        row["layer"]: row["norm"]
        for row in rows
        if row["point"] == point
        and row["part"] == "generator"
        and (row["objective"] == objective if objective else row["estimator"].startswith("marginal"))
    }
    return math.hypot(*chosen.values()) if chosen else None


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
    exact = sum(row["bias"] == 0 and bias_noise(row) == 0 for row in claimed)
    weak = sum(bias_noise(row) > _WEAK for row in claimed)
    return [
        f"Unbiased: of {len(claimed)} gradients of estimators that claim no bias, {len(claimed) - len(outside)} are within "
        f"three standard errors of the exact one{names}. {exact} of them are exactly zero, without noise. {weak} have a "
        f"standard error of the bias above {_WEAK:g}, and test little.{_judged(claimed)}{_averaged(claimed)}{twice}{rest}"
    ]


def _averaged(rows: Sequence[Row]) -> str:
    """What bounds of several samples are compared with."""
    if not any("plain score function" in row["oracle"] for row in rows):
        return ""
    return (
        " Bounds of several samples are compared with the mean of many draws of a plain score function, which shares no "
        "control variate with `multi-sample`."
    )


def _judged(rows: Sequence[Row]) -> str:
    """What files from before there was a better error are judged by."""
    if not any(row.get("bias_noise") is None for row in rows):
        return ""
    return " The error is that of the bias itself, which grows with a bias: a mild test."


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
        cells = [f"{row['point']}, layer {row['layer']}: {distance(row)}" for row in deep]
        found.append(
            f"Straight-through at depth {deep[0]['depth']}, relative distance from the exact gradient: {'; '.join(cells)}."
        )
    return found


def _biased(rows: Sequence[Row]) -> list[str]:
    shown = [
        row
        for row in _last(rows)
        if row["claim"] == "biased" and row["bias"] is not None and not is_within(row) and row["depth"] == 1
    ]
    if not shown:
        return []
    cells = [f"`{row['estimator']}` {distance(row)}" for row in shown]
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
