"""The picture of the training comparison: what each objective reaches, and what the variance says within it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from research.estimators.markers import PRINTED, Markers, add_legend, legend_height
from research.estimators.training_table import FEWEST, Group, training_groups
from research.results import Record
from research.samples import save_figure

_FAR = 1.4
"""A likelihood beyond so many times the median is drawn at the edge, with its figure beside it."""
Spot = tuple[str, float, float]
"""An estimator, its place across, the NLL of its run."""


def draw_training(table: Record, path: Path) -> None:
    """A line for each depth: all runs by objective, and a panel for each objective of several whose variance was measured."""
    groups = training_groups(table)
    if not groups:
        return
    depths = sorted({group.depth for group in groups})
    measured = {
        depth: [
            (group.objective, spots)
            for group in groups
            if group.depth == depth and len(spots := group.measured(table)) >= FEWEST
        ]
        for depth in depths
    }
    columns = 1 + max(map(len, measured.values()))
    markers = Markers(run["estimator"] for group in groups for run in group.runs)
    size = 3.7 * columns, 3.3 * len(depths) + legend_height(len(markers.names))
    figure = Figure(figsize=(max(size[0], 8.0), size[1]), layout="constrained")
    for line, depth in enumerate(depths):
        first = 1 + line * columns
        left = figure.add_subplot(len(depths), columns, first)
        _draw_objectives(left, [group for group in groups if group.depth == depth], markers)
        for place, (objective, spots) in enumerate(measured[depth], first + 1):
            axes = figure.add_subplot(len(depths), columns, place)
            _draw_variance(axes, f"depth {depth}: {objective}", spots, markers)
    add_legend(figure, markers.handles())
    save_figure(figure, path, PRINTED)


def _draw_objectives(axes: Axes, groups: Sequence[Group], markers: Markers) -> None:
    spots: list[Spot] = []
    for place, group in enumerate(groups):
        last = max(1, len(group.runs) - 1)
        across = [place + 0.6 * (index / last - 0.5) for index in range(len(group.runs))]
        spots += [(run["estimator"], at, run["nll"]) for at, run in zip(across, group.runs, strict=True)]
    axes.set_xticks(range(len(groups)), [group.short.replace(" ", "\n", 1) for group in groups])
    axes.set_title(f"depth {groups[0].depth}: all runs, by objective", fontsize=9)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    _put(axes, spots, markers, joined=True)


def _draw_variance(axes: Axes, title: str, spots: Sequence[Spot], markers: Markers) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xscale("log")
    positive = [variance for _, variance, _ in spots if variance > 0]
    low = min(positive, default=1.0) / 10
    if len(positive) < len(spots):
        axes.axvline(low, color="grey", linewidth=0.6, linestyle=":")
    axes.set_xlabel("variance at the start / |gradient|² (dotted: none)", fontsize=8)
    _put(axes, [(name, variance or low, nll) for name, variance, nll in spots], markers)


def _put(axes: Axes, spots: Sequence[Spot], markers: Markers, *, joined: bool = False) -> None:
    """Draw runs; figures off the scale are written beside their markers, or all beside the first."""
    nlls = sorted(nll for _, _, nll in spots)
    near = [nll for nll in nlls if nll <= _FAR * nlls[len(nlls) // 2]]
    top = max(near) + 0.06 * (max(near) - min(near) + 1)
    for name, across, nll in spots:
        markers.put(axes, (across, min(nll, top)), name)
    far = sorted((across, nll) for _, across, nll in spots if nll > top)
    labels = [(across, f"{nll:.0f}") for across, nll in far]
    if joined and far:
        labels = [(far[0][0], ", ".join(text for _, text in labels))]
    for across, text in labels:
        aside = {"xytext": (-6, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
        axes.annotate(f"{text} ↑", (across, top), fontsize=7, **aside)
    axes.set_ylabel("NLL of test data, nats", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
