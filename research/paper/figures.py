"""The pictures of a reproduction, from its result files: training curves, and the paper's figure of samples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from research.results import Record, Results, damage_as_error
from research.rows import VARIANTS
from research.samples import save_figure, show_samples
from research.tables import kind_of

_OURS = "as the paper describes it"
_TITLES = {"ours": _OURS, "improved": "with entropy bonus, or the last layer summed out"}


def draw_curves(results: Results, path: Path) -> None:
    """Validation likelihood by epoch while selecting: a panel for each variant, a colour for each row, a line for each seed.

    Solid lines are of the deterministic flow, dashed ones of the latent: by what the row keeps its best epoch.
    """
    rows = [row for row in results.plan["rows"] if row["family"] != "reference"]
    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    level = results.computed("independent-pixels")
    for axes, variant in zip(panels, VARIANTS, strict=True):
        for number, row in enumerate(rows):
            for run in results.of(row["id"], "select", variant):
                with damage_as_error(f"the record of a run of {run['row']}"):
                    _curve(axes, run, f"C{number}" if number < 10 else "black")
        if level is not None:
            axes.axhline(
                level["evaluation"]["nll"], color="grey", linestyle=":", label="independent pixels (test)"
            )
        axes.set_title(_TITLES[variant])
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("negative log-likelihood of validation data, nats")
    figure.legend(*_named(panels), loc="outside right center", frameon=False)
    save_figure(figure, path)


def _curve(axes: Axes, run: Record, colour: str) -> None:
    metrics, select = run["metrics"], run["config"]["select"]
    pairs = zip(metrics["epoch"], metrics["validation_nll"], strict=True)
    epochs, values = zip(*(pair for pair in pairs if pair[1] is not None), strict=True)
    axes.plot(
        epochs,
        values,
        color=colour,
        linestyle="-" if select == "greedy" else "--",
        linewidth=1.2,
        marker="." if len(epochs) < 5 else "",
        label=f"{run['row']} ({select})",
    )


def _named(panels: Iterable[Axes]) -> tuple[list[Any], list[str]]:
    """One entry in the legend for each label."""
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    return list(handles.values()), list(handles)


def draw_best(results: Results, path: Path) -> None:
    """The paper's figure: samples of the best score-function row (left) and of the best straight-through row (right)."""
    sides = [
        _best(results, ("special case", "full posterior"), "score-function"),
        _best(results, ("straight-through",), "straight-through"),
    ]
    figure = Figure(figsize=(11, 6.4))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, wspace=0.03)
    for axes, (title, run) in zip(figure.subplots(1, 2), sides, strict=True):
        show_samples(axes, title, run)
    save_figure(figure, path)


def _best(results: Results, families: tuple[str, ...], kind: str) -> tuple[str, Record | None]:
    """Of some families, the reported run whose selection has the lowest NLL on validation data, and what it is."""
    finished = [
        (selection["evaluation"]["nll"], row, variant)
        for row in results.plan["rows"]
        for variant in VARIANTS
        if row["family"] in families and (selection := results.selection(row["id"], variant)) is not None
    ]
    if not finished:
        return f"no {kind} row is finished", None
    _, row, variant = min(finished, key=lambda item: item[0])
    run = results.selected(row["id"], variant)
    assert run is not None
    evaluation, how = run["evaluation"], _OURS if variant == "ours" else row["improvement"]
    return (
        f"the best {kind} row: {row['title']}\n{how}, NLL {evaluation['nll']:.1f} ({kind_of(evaluation)})\n"
        f"drawn from the {run['samples']['flow']} flow",
        run,
    )
