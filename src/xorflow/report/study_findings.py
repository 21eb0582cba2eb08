"""What the measurements on images say, one sentence or two for each finding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xorflow.report.study import POINTS, SMALL, distance, is_within, short, with_error
from xorflow.report.study_equal_time import equal_time_findings, is_steady

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
    again = sum("earlier" in row for row in claimed)
    names = "".join(
        f"; {_place(row)}, `{row['estimator']}` is not, with {with_error(row['bias'], row['bias_noise'])}{_before(row)}"
        for row in outside
    )
    twice = f" Measured more than once: {again}." if again else ""
    blind = {row["estimator"] for row in rows if row["claim"] == "unbiased" and row["bias"] is None}
    names_of_blind = ", ".join(f"`{name}`" for name in sorted(blind))
    rest = (
        f" Without an oracle at this size, and so proved on small models only: {names_of_blind}."
        if blind
        else ""
    )
    exact = sum(row["bias"] == 0 and row["bias_noise"] == 0 for row in claimed)
    weak = sum(row["bias_noise"] > _WEAK for row in claimed)
    return [
        f"Unbiased: of {len(claimed)} gradients of estimators that claim no bias, {len(claimed) - len(outside)} are within "
        f"three standard errors of the exact one{names}. {exact} of them are exactly zero, without noise. {weak} have a "
        f"standard error of the bias above {_WEAK:g}, and test little.{_averaged(claimed)}{twice}{rest}"
    ]


def _before(row: Row) -> str:
    """What was found at first where a bias was measured more than once, and whether its errors can be trusted."""
    cells = [
        f"{with_error(at['bias'], at['bias_noise'])} of {at['draws']:,} draws"
        for at in row.get("earlier", ())
    ]
    before = f" (before: {'; '.join(cells)})" if cells else ""
    tail = "" if is_steady(row) else ", where a few draws carry most of the variance and errors say little"
    return f" of {row['draws']:,} draws{before}{tail}"


def _averaged(rows: Sequence[Row]) -> str:
    """What bounds of several samples are compared with."""
    if not any("plain score function" in row["oracle"] for row in rows):
        return ""
    return (
        " Bounds of several samples are compared with the mean of many draws of a plain score function, which shares no "
        "control variate with `multi-sample`."
    )


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
