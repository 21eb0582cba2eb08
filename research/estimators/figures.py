"""The pictures of the study: variance against cost, bias against variance, variance by pixel, training against variance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import (
    LogFormatterSciNotation,
    LogLocator,
    MaxNLocator,
    NullLocator,
    StrMethodFormatter,
)

from research.estimators.markers import PRINTED, Markers, legend_height
from research.estimators.names import POINTS
from research.estimators.statistics import CHANCE
from research.estimators.training_table import FEWEST, SMALL, Group, training_groups
from research.results import Record
from research.samples import save_figure

Place = Callable[[Record], tuple[float, float] | None]


def draw_study(table: Record, maps: Sequence[Record], folder: Path) -> None:
    """Draw whatever the results allow."""
    for suffix, rows in _pictures_of(_to_compare(table["rows"])).items():
        draw_cost(rows, folder / f"variance_cost{suffix}.png")
        draw_bias(rows, folder / f"bias_variance{suffix}.png")
    if maps:
        draw_maps(maps, folder / "variance_pixels.png")
    draw_training(table, folder / "training.png")


def _to_compare(rows: Sequence[Record]) -> list[Record]:
    """The gradients of networks; of models on images alone, if there are any."""
    known = [row for row in rows if row["variance"] is not None and row["part"] != "base"]
    return [row for row in known if row["features"] > SMALL] or known


def _pictures_of(rows: Sequence[Record]) -> dict[str, list[Record]]:
    """By the end of a picture's name: models with posteriors have one of their own, if there are others."""
    with_posteriors = {row["model"] for row in rows if row["part"] == "posterior"}
    plain = [row for row in rows if row["model"] not in with_posteriors]
    others = [row for row in rows if row["model"] in with_posteriors]
    if not plain or not others:
        return {"": [*rows]} if rows else {}
    return {"": plain, "_posteriors": others}


# ---- rows against each other ----


def _panels(rows: Sequence[Record]) -> list[list[list[Record]]]:
    """A line of panels for each model and layer, one for each point."""
    keys = sorted({(row["model"], row["part"], row["layer"]) for row in rows})
    points = [point for point in POINTS if any(row["point"] == point for row in rows)]
    return [
        [
            [row for row in rows if (row["model"], row["part"], row["layer"], row["point"]) == (*key, point)]
            for point in points
        ]
        for key in keys
    ]


def draw_cost(rows: Sequence[Record], path: Path) -> None:
    """Variance against the time of a gradient: what is below and to the left is better; at the bottom, what has none.

    On the dashed line, variance times time is that of the paper's best control variate.
    """
    _draw_grid(
        rows,
        path,
        lambda row: (row["milliseconds"], row["variance"]),
        ("milliseconds of a gradient", "variance / |gradient|²"),
        under=_draw_reference,
    )


def _draw_reference(axes: Axes, rows: Sequence[Record]) -> None:
    held = next((row for row in rows if row["estimator"] == row["reference"]), None)
    if held is None:
        return
    axes.autoscale(False)
    at = np.geomspace(*axes.get_xlim(), 50)
    axes.plot(
        at,
        held["variance"] * held["milliseconds"] / at,
        color="tab:blue",
        linewidth=0.8,
        linestyle="--",
        zorder=0,
    )


def draw_bias(rows: Sequence[Record], path: Path) -> None:
    """Bias against variance; an open marker is a bias that is not told from zero, at three standard errors."""
    known = [row for row in rows if row["bias"] is not None]
    if known:
        _draw_grid(
            known,
            path,
            lambda row: (row["variance"], max(row["bias"], CHANCE * row["bias_noise"])),
            ("variance / |gradient|²", "|bias|² / |gradient|²"),
            is_filled=lambda row: row["bias"] > CHANCE * row["bias_noise"],
        )


def _draw_grid(
    rows: Sequence[Record],
    path: Path,
    place: Place,
    labels: tuple[str, str],
    *,
    is_filled: Callable[[Record], bool] = bool,
    under: Callable[[Axes, Sequence[Record]], None] | None = None,
) -> None:
    lines = _panels(rows)
    markers = Markers(row["estimator"] for row in rows)
    width, height = 3.6 * len(lines[0]), 3.2 * len(lines) + legend_height(len(markers.names) + 1)
    figure = Figure(figsize=(max(width, 8.0), height), layout="constrained")
    grid = figure.subplots(len(lines), len(lines[0]), squeeze=False)
    for axes_of_line, panels in zip(grid, lines, strict=True):
        for axes, panel in zip(axes_of_line, panels, strict=True):
            _scatter(axes, panel, place, markers, is_filled)
            if under is not None and panel:
                under(axes, panel)
            axes.set_xlabel(labels[0] if panels is lines[-1] else "")
        axes_of_line[0].set_ylabel(labels[1])
    markers.add_legend(figure)
    save_figure(figure, path, PRINTED)


def _scatter(
    axes: Axes, rows: Sequence[Record], place: Place, markers: Markers, is_filled: Callable[[Record], bool]
) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    if not rows:
        axes.set_axis_off()
        return
    first = rows[0]
    of = "posterior of layer" if first["part"] == "posterior" else "layer"
    axes.set_title(f"{first['model']}, {of} {first['layer']}, {first['point']}", fontsize=9)
    spots = [(row, spot) for row in rows if (spot := place(row)) is not None]
    least = [_below(spot[axis] for _, spot in spots) for axis in (0, 1)]
    for row, spot in spots:
        at = [value if value > 0 else low for value, low in zip(spot, least, strict=True)]
        markers.put(axes, at, row["estimator"], filled=is_filled(row))
    _label_decades(axes)
    for axis, line in enumerate((axes.axvline, axes.axhline)):
        if any(spot[axis] <= 0 for _, spot in spots):
            line(least[axis], color="grey", linewidth=0.6, linestyle=":")


def _label_decades(axes: Axes) -> None:
    """Tick labels that do not run into each other: powers of ten, or within two of them also twice and five times as much."""
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        narrow = high / low < 200
        # within a factor of three there may be no such tick at all
        within = MaxNLocator(4) if high / low < 3 else LogLocator(subs=(1.0, 2.0, 5.0), numticks=8)
        axis.set_major_locator(within if narrow else LogLocator(subs=(1.0,), numticks=6))
        axis.set_major_formatter(StrMethodFormatter("{x:g}") if narrow else LogFormatterSciNotation())
        axis.set_minor_locator(NullLocator())


def _below(values: Iterable[float]) -> float:
    """Where zeros are drawn on a logarithmic axis: below all else."""
    return min((value for value in values if value > 0), default=1.0) / 10


# ---- maps ----

MOST_MAPS = 15
_FAR_OFF = ("proposal-prefix", "score-function:credit=all")
"""Estimators whose variance is of another order, so that it would leave one colour to all the others."""


def choose_maps(records: Sequence[Record]) -> tuple[list[Record], dict[str, list[str]]]:
    """The files of one model of depth 1 at its last point, the most noisy first; and the names of all others, by reason."""
    images = [record for record in records if record["shape"] is not None and record["depth"] == 1]
    of_model = [record for record in images if record["model"] == images[0]["model"]]
    last = max((record["point"] for record in of_model), key=POINTS.index, default=None)
    at_last = [record for record in of_model if record["point"] == last]
    noisy = [record for record in at_last if any(record["variance_by_feature"])]
    near = [record for record in noisy if not record["estimator"].startswith(_FAR_OFF)] or noisy
    near.sort(key=lambda record: -sum(record["variance_by_feature"]))
    left_out = {
        "they have no variance": [record for record in at_last if record not in noisy],
        "their variance is of another order, and would leave one colour to all others": [
            record for record in noisy if record not in near
        ],
        f"{MOST_MAPS} are shown, and these have the least variance": near[MOST_MAPS:],
    }
    names = {why: sorted(record["estimator"] for record in of) for why, of in left_out.items() if of}
    return near[:MOST_MAPS], names


def draw_maps(records: Sequence[Record], path: Path) -> None:
    """For each estimator an image of the variance of its gradient in each pixel's output bias, all on one scale."""
    images = [np.array(record["variance_by_feature"]).reshape(record["shape"]) for record in records]
    highest = max(float(image.max()) for image in images)
    lowest = max(
        highest * 1e-6, min(float(image[image > 0].min()) for image in images)
    )  # fainter pixels look alike
    columns = min(5, len(records))
    lines = -(-len(records) // columns)
    figure = Figure(figsize=(2.6 * columns + 1.2, 2.9 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    shown = None
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, record, image in zip(grid.flat, records, images, strict=False):
        shown = axes.imshow(
            np.maximum(image, lowest), norm=LogNorm(lowest, highest), cmap="viridis", interpolation="nearest"
        )
        axes.set_title(record["estimator"].replace(":", "\n").replace(",baseline", "\nbaseline"), fontsize=7)
    assert shown is not None
    first = records[0]
    figure.suptitle(
        f"variance of the gradient in each pixel's output bias: {first['model']}, {first['point']}",
        fontsize=9,
    )
    figure.colorbar(shown, ax=grid, shrink=0.7)
    save_figure(figure, path, PRINTED)


# ---- what each objective reaches in training, and what the variance says within it ----


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
    markers.add_legend(figure)
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
    _put_runs(axes, spots, markers, joined=True)


def _draw_variance(axes: Axes, title: str, spots: Sequence[Spot], markers: Markers) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xscale("log")
    positive = [variance for _, variance, _ in spots if variance > 0]
    low = min(positive, default=1.0) / 10
    if len(positive) < len(spots):
        axes.axvline(low, color="grey", linewidth=0.6, linestyle=":")
    axes.set_xlabel("variance at the start / |gradient|² (dotted: none)", fontsize=8)
    _put_runs(axes, [(name, variance or low, nll) for name, variance, nll in spots], markers)


def _put_runs(axes: Axes, spots: Sequence[Spot], markers: Markers, *, joined: bool = False) -> None:
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
