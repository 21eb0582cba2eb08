"""What the runs of the training comparison reached, against the variance that was measured: a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from research.estimators.table import POINTS, objective_of_run, rows_of_run
from research.results import line

Row = dict[str, Any]

LIKELIHOOD = "log-likelihood, or its bound with the last layer summed out"
_SHORT = {
    LIKELIHOOD: "likelihood",
    "evidence lower bound": "ELBO",
    "special-case bound": "special case",
    "bound of several samples from the generator": "samples of p",
    "bound of several samples from the posterior": "samples of q",
}
_FEWEST = 4
"""Runs that ranks are compared of."""


def measured_variance(
    table: Row, run: Row, point: str | None = None, layer: int | None = None
) -> float | None:
    """Of the whole gradient or of one layer's generator, at a point: by default the start, which all runs have in common.

    Where the start was not measured, the next point that was stands for it.
    """
    rows = rows_of_run(table, run)
    if layer is not None:
        rows = [row for row in rows if (row["part"], row["layer"]) == ("generator", layer)]
    if point is None:
        point = min((row["point"] for row in rows), key=POINTS.index, default=None)
    chosen = [row for row in rows if row["point"] == point]
    scale = sum(row["norm"] ** 2 for row in chosen)
    return sum(row["trace"] for row in chosen) / scale if scale > 0 else None


# ---- runs of one objective ----


@dataclass(frozen=True)
class Group:
    """The finished runs of one depth and objective, the best first."""

    depth: int
    objective: str
    runs: tuple[Row, ...]

    @property
    def short(self) -> str:
        """The objective in a word or two."""
        return _SHORT.get(self.objective, self.objective)

    @property
    def nlls(self) -> list[float]:
        return [run["nll"] for run in self.runs]

    def correlation(self, measure: Callable[[Row], float | None]) -> float | None:
        """Of the ranks of some figure and of the NLL; None if too few runs have the figure, or all have the same."""
        pairs = [(value, run["nll"]) for run in self.runs if (value := measure(run)) is not None]
        return rank_correlation(pairs)


def training_groups(table: Row) -> list[Group]:
    """All finished runs by depth and objective, the best objective of each depth first."""
    found: dict[tuple[int, str], list[Row]] = {}
    for run in table["training"]:
        objective = None if run.get("error") else objective_of_run(table, run)
        if objective is not None:
            found.setdefault((run["depth"], _family(objective)), []).append(run)
    groups = [
        Group(depth, objective, tuple(sorted(runs, key=lambda run: run["nll"])))
        for (depth, objective), runs in found.items()
    ]
    return sorted(groups, key=lambda group: (group.depth, group.nlls[0]))


def _family(objective: str) -> str:
    if objective == "log-likelihood" or objective.endswith("last layer summed out"):
        return LIKELIHOOD
    if objective.startswith("bound of "):
        return f"bound of several samples from the {'posterior' if 'posterior' in objective else 'generator'}"
    return objective


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Of the first and the second of each pair; None of too few, or if one of them never changes.

    >>> rank_correlation([(1, 10), (2, 30), (3, 20), (4, 40)])
    0.8
    """
    if len(pairs) < _FEWEST:
        return None
    first, second = (ranks([pair[index] for pair in pairs]) for index in (0, 1))
    if len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return round(statistics.correlation(first, second), 6)


def ranks(values: Sequence[float]) -> list[float]:
    """From 0 on; equal values share the mean of their ranks."""
    order = sorted(values)
    return [(order.index(value) + len(order) - 1 - order[::-1].index(value)) / 2 for value in values]


# ---- the table ----


def objective_table(table: Row) -> str:
    """What each objective reaches, and how far variance tells its estimators' likelihoods, in Markdown."""
    lines = [
        "| depth | objective | runs | best NLL | median | worst | start | middle | converged |",
        "|---:|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for group in training_groups(table):
        best = f"{group.nlls[0]:.1f} (`{group.runs[0]['estimator']}`)"
        told = [
            group.correlation(lambda run, at=point: measured_variance(table, run, at)) for point in POINTS
        ]
        cells = [
            *(str(group.depth), group.objective, str(len(group.runs)), best),
            *(f"{statistics.median(group.nlls):.1f}", f"{group.nlls[-1]:.1f}"),
            *("–" if value is None else f"{value:.2f}" for value in told),
        ]
        lines.append(line(cells))
    return "\n".join(lines)
