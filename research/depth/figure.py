"""The picture of likelihood against depth, with the paper's own curve in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from research.results import Record
from research.samples import save_figure

_ORDERED, _COUPLED = (1, 2, 4, 8), (2, 4, 8, 16)
"""The depths of the two families."""
_MARKERS = ("o", "^", "D")
_WORST = 15.0
"""Rows that are so much worse than the best, in nats, would leave no room for the others in the panel that shows those."""


def part(rows: Sequence[Record], family: str, base: str) -> list[Record]:
    """The rows of a family on a base."""
    return [r for r in rows if (r["family"], r["base"]) == (family, base)]


def draw_depths(table: Record, path: Path) -> None:
    """Three panels: orderings beside the paper's curve; latent flows alone; couplings. A line for each series of rows.

    Filled points are of the latent flow, hollow ones of the deterministic one: greedy on the fixed base, refitted elsewhere.
    """
    figure = Figure(figsize=(18, 7), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    fixed = part(table["rows"], "autoregressive", "fixed")
    _draw_beside_the_paper(left, fixed, table["paper"])
    _draw_latent(middle, [r for r in fixed if r["flow"] == "latent"])
    _draw_couplings(right, table)
    for axes, title, depths in (
        (left, "orderings on the fixed base, and the paper", _ORDERED),
        (middle, "the same: latent flows", _ORDERED),
        (right, "couplings on a learned base", _COUPLED),
    ):
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.set_xlim(depths[0] / 1.15, depths[-1] * 1.15)
        axes.set_xticks(depths, [str(depth) for depth in depths])
        axes.minorticks_off()
        axes.set_xlabel("depth")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    left.set_ylabel("negative log-likelihood of test data, nats")
    save_figure(figure, path)


def _draw_beside_the_paper(axes: Axes, rows: Sequence[Record], paper: Sequence[Record]) -> None:
    """The paper's curve, our bijections, and the best latent flow of each depth."""
    depths = [row["depth"] for row in paper]
    axes.plot(
        depths, [row["nll"] for row in paper], "s--", color="black", label="the paper: straight-through"
    )
    _draw_series(axes, [r for r in rows if r["flow"] == "deterministic"], "greedy")
    best = {
        depth: min(bounds)
        for depth in _ORDERED
        if (bounds := [r["bound"] for r in rows if r["depth"] == depth])  # bounds of bijections, too
    }
    if best:
        axes.plot(list(best), list(best.values()), "o-", color="black", label="the best latent flow")


def _draw_latent(axes: Axes, rows: Sequence[Record]) -> None:
    one = min((r["bound"] for r in rows if r["depth"] == 1), default=None)
    best = min((r["bound"] for r in rows), default=0.0)
    if any(r["bound"] > best + _WORST for r in rows):
        axes.set_ylim(best - 1, best + _WORST)
    _draw_series(axes, rows, "bound")
    if one is not None:
        axes.axhline(one, color="grey", linestyle=":", label="the best of depth 1")


def _draw_couplings(axes: Axes, table: Record) -> None:
    rows = [r for r in table["rows"] if r["family"] == "coupling"]
    _draw_series(axes, rows, "refit")
    if rows and table["independent"] is not None:
        axes.axhline(table["independent"], color="grey", linestyle="--", label="independent pixels")
    ordered = part(table["rows"], "autoregressive", "learned")
    if rows and ordered:
        best = min(r["bound"] for r in ordered)
        axes.axhline(best, color="grey", linestyle=":", label="the best in orderings")


def _draw_series(axes: Axes, rows: Sequence[Record], deterministic: str) -> None:
    """A line for each series: of the flow, latent or deterministic, that it was trained for."""
    for number, series in enumerate(dict.fromkeys(r["series"] for r in rows)):
        points = sorted((r for r in rows if r["series"] == series), key=lambda r: r["depth"])
        latent = points[0]["flow"] == "latent"
        key = "bound" if latent else deterministic
        axes.plot(
            [r["depth"] for r in points],
            [r[key] for r in points],
            marker=_MARKERS[number // 10 % len(_MARKERS)],
            color=f"C{number % 10}",
            markerfacecolor=f"C{number % 10}" if latent else "none",
            label=series if latent else f"{series} ({'refitted' if key == 'refit' else 'greedy'})",
        )
