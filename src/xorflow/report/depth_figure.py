"""The picture of likelihood against depth, with the paper's own curve in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from xorflow.report.images import save_figure

_DEPTHS = (1, 2, 4, 8, 16)
_MARKERS = ("o", "^", "D")


def draw_depths(table: dict[str, Any], path: Path) -> None:
    """Two panels: orderings on the fixed base, couplings on a learned one; a line for each series of rows.

    Filled points are of the latent reading, hollow ones of the deterministic: greedy on the fixed base, refitted elsewhere.
    """
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    fixed = [r for r in table["rows"] if (r["family"], r["base"]) == ("autoregressive", "fixed")]
    coupled = [r for r in table["rows"] if r["family"] == "coupling"]
    paper = table["paper"]
    left.plot(
        [row["depth"] for row in paper],
        [row["nll"] for row in paper],
        "s--",
        color="black",
        label="the paper: straight-through",
    )
    _series(left, fixed, "greedy")
    one = min((r["bound"] for r in fixed if r["depth"] == 1), default=None)
    if one is not None:
        left.axhline(one, color="grey", linestyle=":", label="the best of depth 1, latent")
    _series(right, coupled, "refit")
    for axes, title in ((left, "orderings, fixed base"), (right, "couplings, learned base")):
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.set_xticks(_DEPTHS, [str(depth) for depth in _DEPTHS])
        axes.minorticks_off()
        axes.set_xlabel("depth")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, frameon=False, loc="best")
    left.set_ylabel("negative log-likelihood of test data, nats")
    save_figure(figure, path)


def _series(axes: Axes, rows: Sequence[dict[str, Any]], deterministic: str) -> None:
    """A line for each series: of the reading that it was trained for."""
    for number, series in enumerate(dict.fromkeys(r["series"] for r in rows)):
        own = sorted((r for r in rows if r["series"] == series), key=lambda r: r["depth"])
        latent = own[0]["reading"] == "latent"
        key = "bound" if latent else deterministic
        axes.plot(
            [r["depth"] for r in own],
            [r[key] for r in own],
            marker=_MARKERS[number // 10 % len(_MARKERS)],
            color=f"C{number % 10}",
            markerfacecolor=f"C{number % 10}" if latent else "none",
            label=series if latent else f"{series} ({'refitted' if key == 'refit' else 'greedy'})",
        )
