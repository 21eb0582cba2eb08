"""What the runs of the training comparison reached, against the variance that was measured: a table, and sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xorflow.report.study import POINTS, objective_of_run, rows_of_run, short

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
_CALM = 100.0
"""A variance beyond this many squared norms of the gradient is of another order than all others."""
_TOLD = 2.0
"""A correlation of fewer standard deviations of chance is none."""


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

    def calm(self, table: Row) -> Group:
        """Without the runs whose variance is of another order."""
        kept = tuple(run for run in self.runs if (measured_variance(table, run) or 0.0) <= _CALM)
        return Group(self.depth, self.objective, kept)


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


def _chance(count: int) -> float:
    """The standard deviation of a rank correlation where there is no relation."""
    return 1 / math.sqrt(count - 1)


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
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- sentences ----


def training_findings(table: Row) -> list[str]:
    """What decides the likelihood after training, and what the variance tells of it, one paragraph each."""
    groups = training_groups(table)
    found = [line for depth in sorted({g.depth for g in groups}) for line in _of_objectives(groups, depth)]
    for group in groups:
        found += _of_variance(table, group)
    return found + _same(table)


def _of_objectives(groups: Sequence[Group], depth: int) -> list[str]:
    own = [group for group in groups if group.depth == depth]
    if len(own) < 2 or own[0].nlls[-1] >= own[1].nlls[0]:
        return []
    return [
        f"Depth {depth}, the objective comes first: the worst run for the {own[0].short} ends with "
        f"{own[0].nlls[-1]:.1f} nats, the best of all others with {own[1].nlls[0]:.1f} (`{own[1].runs[0]['estimator']}`)."
    ]


def _of_variance(table: Row, group: Group) -> list[str]:
    told = group.correlation(lambda run: measured_variance(table, run))
    if told is None:
        return []
    count = sum(measured_variance(table, run) is not None for run in group.runs)
    chance = _chance(count)
    words = (
        "less variance went with a better likelihood"
        if told > _TOLD * chance
        else "variance hardly tells the likelihood"
    )
    parts = [
        f"Depth {group.depth}, {group.objective}: {words}. The ranks of the variance at the start and of the NLL have "
        f"correlation {told:.2f} ({count} runs; ± {chance:.2f} if there were no relation)",
        *_by_layer(table, group),
    ]
    lines = [f"{', '.join(parts)}.", *_without_wild(table, group), *_beside_exact(table, group)]
    return [" ".join([*lines, *_later(table, group), *_exceptions(table, group)])]


def _by_layer(table: Row, group: Group) -> list[str]:
    if group.depth == 1:
        return []
    layers = [
        (layer, group.correlation(lambda run, at=layer: measured_variance(table, run, layer=at)))
        for layer in range(1, group.depth + 1)
    ]
    cells = [f"{value:.2f} with that of layer {layer} alone" for layer, value in layers if value is not None]
    return [" and ".join(cells)] if cells else []


def _without_wild(table: Row, group: Group) -> list[str]:
    """Whether the correlation is more than that of a few whose variance is of another order."""
    calm = group.calm(table)
    told = calm.correlation(lambda run: measured_variance(table, run))
    if told is None or len(calm.runs) == len(group.runs):
        return []
    return [
        f"Without the {len(group.runs) - len(calm.runs)} whose variance is beyond {_CALM:g}, it is {told:.2f}, of "
        f"{len(calm.runs)} runs."
    ]


def _beside_exact(table: Row, group: Group) -> list[str]:
    """Runs that ended better than the exact gradient of the same objective."""
    calm = group.calm(table)
    exact = next((run for run in calm.runs if _is_exact(table, run)), None)
    better = [run for run in calm.runs if exact is not None and run["nll"] < exact["nll"]]
    if exact is None or not better:
        return []
    best = better[0]
    lines = [
        f"The exact gradient, `{exact['estimator']}`, ends with {_both(exact)}, and {len(better)} with noise end better, first "
        f"of all `{best['estimator']}` with {_both(best)} at a variance of {_variance(table, best)}."
    ]
    told = calm.correlation(lambda run: sum(layer["entropy"] for layer in run.get("layers", ())))
    if told is not None and told < -_TOLD * _chance(len(calm.runs)):
        lines.append(
            f"What goes with a low NLL here is the entropy that choices keep, with correlation {told:.2f}: "
            f"{_entropy(best):.1f} nats an image for the best, {_entropy(exact):.1f} for the exact gradient. This bound draws "
            "all choices to where nothing is left to chance, and there its gradient ends; noise may be what delays that. This "
            "is a reading of one seed, and no proof."
        )
    return lines


def _is_exact(table: Row, run: Row) -> bool:
    rows = rows_of_run(table, run)
    return bool(rows) and all(row["variance"] == 0 and row["claim"] == "unbiased" for row in rows)


def _both(run: Row) -> str:
    return f"{run['nll']:.1f} (greedy {run['greedy_nll']:.1f})"


def _entropy(run: Row) -> float:
    return sum(layer["entropy"] for layer in run["layers"])


def _later(table: Row, group: Group) -> list[str]:
    """Why the points after the start tell less, where they do: weights that no run of this objective comes to."""
    at = {point: group.correlation(lambda run, p=point: measured_variance(table, run, p)) for point in POINTS}
    start, last = at["start"], at["converged"]
    rows = [
        row
        for run in group.runs[:1]
        for row in rows_of_run(table, run)
        if row["point"] == "converged" and row["part"] == "generator"
    ]
    if start is None or last is None or last >= start - 0.1 or len(rows) < 2:
        return []
    norms = " and ".join(f"{short(row['norm'])} in layer {row['layer']}" for row in rows)
    words = table["models"][rows[0]["model"]]["words"].partition(",")[0]
    return [
        f"At the end it is {last:.2f}: those are the weights of a model {words}, where the gradient has the norms {norms}; no "
        "run of this objective comes there."
    ]


def _exceptions(table: Row, group: Group) -> list[str]:
    """The runs whose ranks are furthest apart."""
    known = [(run, value) for run in group.runs if (value := measured_variance(table, run)) is not None]
    by_variance = ranks([value for _, value in known])
    by_nll = ranks([run["nll"] for run, _ in known])
    apart = sorted(range(len(known)), key=lambda i: -abs(by_variance[i] - by_nll[i]))[:3]
    cells = [
        f"`{known[i][0]['estimator']}` ({'better' if by_nll[i] < by_variance[i] else 'worse'} than it says: variance "
        f"{_variance(table, known[i][0])}, NLL {known[i][0]['nll']:.1f})"
        for i in apart
        if by_nll[i] != by_variance[i]
    ]
    return [f"Furthest from what variance says: {', '.join(cells)}."] if cells else []


def _same(table: Row) -> list[str]:
    """Runs that are equal to the last digit: their estimators are the same there."""
    found: dict[tuple[int, float, float], list[str]] = {}
    for run in table["training"]:
        if not run.get("error"):
            key = (run["depth"], run["nll"], run["greedy_nll"])
            found.setdefault(key, []).append(f"`{run['estimator']}`")
    cells = [f"{', '.join(names)} (depth {key[0]})" for key, names in found.items() if len(names) > 1]
    return (
        [f"The same gradients, and so the same runs to the last digit: {'; '.join(cells)}."] if cells else []
    )


def _variance(table: Row, run: Row) -> str:
    value = measured_variance(table, run)
    return "–" if value is None else f"{value:.2g}"
