"""What the runs of the training comparison reached, and what the variance that was measured says of it: tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from research.estimators.names import POINTS
from research.results import Record
from research.tables import fixed, kind_of, markdown_table, short

SMALL = 16
"""Features of models that only serve to be enumerated."""

LIKELIHOOD = "log-likelihood, or its bound with the last layer summed out"
_SHORT = {
    LIKELIHOOD: "likelihood",
    "evidence lower bound": "ELBO",
    "special-case bound": "special case",
    "bound of several samples from the generator": "samples of p",
    "bound of several samples from the posterior": "samples of q",
}
FEWEST = 4
"""Runs of one objective whose ranks are compared, and which have a panel of their own."""


def measurements(table: Record, run: Record) -> list[Record]:
    """The rows of a run's estimator at the run's depth."""
    kind = (run["estimator"], run["depth"])
    return [row for row in table["rows"] if (row["estimator"], row["depth"]) == kind]


def _on_images(table: Record, run: Record) -> list[Record]:
    return [row for row in measurements(table, run) if row["features"] > SMALL]


def objective_of_run(table: Record, run: Record) -> str | None:
    """What a run maximised, as the measurements of its estimator say; None if there are none."""
    return next((row["objective"] for row in measurements(table, run)), None)


def measured_variance(table: Record, run: Record, point: str | None = None) -> float | None:
    """Of the whole gradient at a point: by default the start, which all runs have in common.

    Where the start was not measured, the next point that was stands for it.
    """
    rows = _on_images(table, run)
    if point is None:
        point = min((row["point"] for row in rows), key=POINTS.index, default=None)
    chosen = [row for row in rows if row["point"] == point]
    scale = sum(row["norm"] ** 2 for row in chosen)
    return sum(row["trace"] for row in chosen) / scale if scale > 0 else None


def training_table(table: Record) -> str:
    """What each estimator reaches in the same steps, in Markdown; the lower of two bounds is the better."""
    runs = sorted(table["training"], key=lambda run: (run["depth"], run.get("nll") or math.inf))
    return markdown_table(
        ">depth | estimator | objective | >greedy NLL | >NLL | which is | >ELBO | >seconds | >ms",
        ([str(run["depth"]), f"`{run['estimator']}`", *_reached(table, run)] for run in runs),
    )


def _reached(table: Record, run: Record) -> list[str]:
    if run.get("error"):
        return [run["error"], *["–"] * 6]
    milliseconds = next((row["milliseconds"] for row in _on_images(table, run)), None)
    return [
        *(
            objective_of_run(table, run) or "–",
            fixed(run["greedy_nll"], 2),
            fixed(run["nll"], 2),
            kind_of(run),
        ),
        *(fixed(run.get("elbo_nll"), 2), fixed(run["seconds"]), short(milliseconds)),
    ]


# ---- runs of one objective ----


@dataclass(frozen=True)
class Group:
    """The finished runs of one depth and objective, the best first."""

    depth: int
    objective: str
    runs: tuple[Record, ...]

    @property
    def short(self) -> str:
        """The objective in a word or two."""
        return _SHORT.get(self.objective, self.objective)

    @property
    def nlls(self) -> list[float]:
        return [run["nll"] for run in self.runs]

    def measured(self, table: Record, point: str | None = None) -> list[tuple[str, float, float]]:
        """The estimators whose variance was measured, it, and the NLL of their runs; see `measured_variance`."""
        return [
            (run["estimator"], variance, run["nll"])
            for run in self.runs
            if (variance := measured_variance(table, run, point)) is not None
        ]


def training_groups(table: Record) -> list[Group]:
    """All finished runs by depth and objective, the best objective of each depth first."""
    by_objective: dict[tuple[int, str], list[Record]] = {}
    for run in sorted(table["training"], key=lambda run: run.get("nll") or math.inf):
        objective = None if run.get("error") else objective_of_run(table, run)
        if objective is not None:
            by_objective.setdefault((run["depth"], _family(objective)), []).append(run)
    groups = [Group(*name, tuple(runs)) for name, runs in by_objective.items()]
    return sorted(groups, key=lambda group: (group.depth, group.nlls[0]))


def _family(objective: str) -> str:
    if objective == "log-likelihood" or objective.endswith("last layer summed out"):
        return LIKELIHOOD
    if objective.startswith("bound of "):
        return f"bound of several samples from the {'posterior' if 'posterior' in objective else 'generator'}"
    return objective


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Of the first and the second of each pair; None of too few pairs, or if one of them never changes.

    >>> rank_correlation([(1, 10), (2, 30), (3, 20), (4, 40)])
    0.8
    """
    if len(pairs) < FEWEST:
        return None
    first, second = (ranks([pair[index] for pair in pairs]) for index in (0, 1))
    if len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return round(statistics.correlation(first, second), 6)


def ranks(values: Sequence[float]) -> list[float]:
    """From 0 on; equal values share the mean of their ranks."""
    order = sorted(values)
    return [(order.index(value) + len(order) - 1 - order[::-1].index(value)) / 2 for value in values]


def objective_table(table: Record) -> str:
    """What each objective reaches, and how far variance tells its estimators' likelihoods, in Markdown."""
    lines = []
    for group in training_groups(table):
        told = [rank_correlation([spot[1:] for spot in group.measured(table, point)]) for point in POINTS]
        lines.append(
            [
                *(str(group.depth), group.objective, str(len(group.runs))),
                f"{group.nlls[0]:.1f} (`{group.runs[0]['estimator']}`)",
                *(fixed(statistics.median(group.nlls)), fixed(group.nlls[-1])),
                *(fixed(value, 2) for value in told),
            ]
        )
    return markdown_table(
        ">depth | objective | >runs | best NLL | >median | >worst | >start | >middle | >converged", lines
    )
