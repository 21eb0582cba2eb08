"""The reproduction of the paper's table, from its result files: numbers and Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from research.paper.figures import draw_best, draw_curves
from research.results import Record, Results, assembled, read_results, share_of_seconds, write_table
from research.rows import VARIANTS
from research.tables import fixed, markdown_table
from xorflow.training import spread

_FIGURES = ("nll", "greedy", "exact", "elbo", "kind", "stderr", "mean", "spread")
"""What every row has of ours; None where a row that is not trained has no such figure."""

# ---- the table as numbers ----


def make_table(results: Results) -> Record:
    """What `table.json` holds: a row for everything that is finished, in the order of the plan."""
    return assembled(results, _row)


def _row(results: Results, planned: Record) -> Record | None:
    name = planned["id"]
    shared = {key: planned[key] for key in ("id", "title", "family", "paper")}
    if planned["family"] == "reference":
        run = results.computed(name)
        if run is None:
            return None
        none = dict.fromkeys(("improved", "improvement", "config", "epochs")) | {"seeds": [], "seconds": 0.0}
        ours = dict.fromkeys(_FIGURES) | run["evaluation"] | {"exact": run["evaluation"]["nll"]}
        return shared | {"ours": ours} | none | {"description": planned["description"]}
    figures = {variant: _variant(results, name, variant) for variant in VARIANTS}
    if not any(figures.values()):
        return None
    runs = [run for run in results.runs if run["row"] == name]
    chosen = {variant: results.selected(name, variant) for variant in VARIANTS}
    return (
        shared
        | figures
        | {
            "seeds": sorted({run["seed"] for run in runs if run["phase"] == "final"}),
            "config": {variant: run["config"] for variant, run in chosen.items() if run is not None},
            "epochs": next(of_variant["epochs"] for of_variant in figures.values() if of_variant),
            "seconds": round(sum(map(share_of_seconds, runs)), 1),
            **{key: planned[key] for key in ("depth", "metric", "improvement", "attempts")},
        }
    )


def _variant(results: Results, row: str, variant: str) -> Record | None:
    """The figures of the selected seed, and their mean and spread over all seeds."""
    selected, finals = results.selected(row, variant), results.of(row, "final", variant)
    if selected is None:
        return None
    keys = ("nll", "greedy")
    nll, greedy = (spread([run["evaluation"][key] for run in finals]) or {} for key in keys)
    runs = [run for run in results.runs if (run["row"], run.get("variant")) == (row, variant)]
    return selected["evaluation"] | {
        "seed": selected["seed"],
        "mean": nll.pop("mean"),
        "spread": nll,
        "greedy_mean": greedy.pop("mean"),
        "greedy_spread": greedy,
        "by_seed": [{"seed": run["seed"], **{key: run["evaluation"][key] for key in keys}} for run in finals],
        "epochs": selected["epochs"],
        "last_change": _last_change(results, row, variant),
        "validations": _validations(results.selection(row, variant)),
        "parameters": selected["parameters"],
        "seconds": round(sum(map(share_of_seconds, runs)), 1),
        "device": selected["device_name"],
    }


def _last_change(results: Results, row: str, variant: str) -> float | None:
    """How much the validation likelihood fell at most, of all seeds, between the last two validations, in nats.

    None where the learning rate falls to zero: such a run comes to rest by itself, converged or not.
    """
    runs = results.of(row, "select", variant)
    if any(run["config"]["schedule"] != "constant" for run in runs):
        return None
    curves = [values for run in runs if len(values := _validations(run)) > 1]
    return round(min(values[-1][1] - values[-2][1] for values in curves), 2) if curves else None


def _validations(run: Record | None) -> list[list[Any]]:
    """Epochs and the likelihood of validation data after them, by which weights are chosen."""
    if run is None:
        return []
    pairs = zip(run["metrics"]["epoch"], run["metrics"]["validation_nll"], strict=True)
    return [[epoch, value] for epoch, value in pairs if value is not None]


# ---- the table as text ----


def markdown(table: Record) -> str:
    """What `table.md` holds: the table, the spread over seeds, and the layers, in Markdown."""
    tables = (main_table, spread_table, layer_table, posterior_table)
    return "\n\n".join([table["description"], *(text for make in tables if (text := make(table)))])


def main_table(table: Record) -> str:
    """Ours beside the paper's."""
    return markdown_table(
        "row | >paper: NLL | >greedy | >ours: NLL | >exact | >greedy | improved | >NLL | >exact | >greedy",
        (
            [
                *(row["title"], fixed(row["paper"]["nll"]), fixed(row["paper"]["greedy"])),
                *(*_cells(row["ours"]), row["improvement"] or "–", *_cells(row["improved"])),
            ]
            for row in table["rows"]
        ),
    )


def _cells(figures: Record | None) -> list[str]:
    """The NLL, with ≤ if it is a bound, and the other likelihoods of a variant."""
    if figures is None:
        return ["–"] * 3
    error = "" if figures["stderr"] is None else f" ± {figures['stderr']:.1f}"
    exact, greedy = (fixed(figures.get(key)) for key in ("exact", "greedy"))
    bound = "" if figures["kind"] == "exact" else "≤ "
    return [f"{bound}{fixed(figures['nll'])}{error}", exact, greedy]


def _trained(table: Record) -> Iterator[tuple[Record, str, Record]]:
    """Rows, what their trained variants are called, and their figures."""
    for row in table["rows"]:
        for variant in VARIANTS:
            if row[variant] is not None and row[variant]["mean"] is not None:
                yield row, row["improvement"] if variant == "improved" else variant, row[variant]


def spread_table(table: Record) -> str:
    """Mean and spread over the seeds of each variant."""
    return markdown_table(
        "row | variant | >seeds | >NLL: mean | >std | >least to greatest | >greedy: mean | >std | >refitted | "
        ">epochs | >seconds",
        (
            [
                *(row["title"], variant, str(len(row["seeds"]))),
                *(fixed(figures["mean"]), fixed(nll["std"], 2), f"{nll['min']:.1f} to {nll['max']:.1f}"),
                *(fixed(figures["greedy_mean"]), fixed(figures["greedy_spread"]["std"], 2)),
                *(fixed(figures["refit"]), str(figures["epochs"]), fixed(figures["seconds"], 0)),
            ]
            for row, variant, figures in _trained(table)
            for nll in [figures["spread"]]
        ),
    )


def layer_table(table: Record) -> str:
    """What each layer of the deeper rows does."""
    return markdown_table(
        "row | variant | >layer | >entropy of its choices | >drawn flips | >greedy flips",
        (
            [
                *(row["title"], variant, str(number), f"{layer['entropy']:.2f} nats"),
                *(f"{100 * layer[key]:.2f} %" for key in ("flip_rate", "greedy_flip_rate")),
            ]
            for row, variant, figures in _trained(table)
            if len(figures["layers"]) > 1
            for number, layer in enumerate(figures["layers"], 1)
        ),
    )


def posterior_table(table: Record) -> str:
    """The score that explains the paper's greedy column; it is no likelihood, and says so."""
    return markdown_table(
        "row | variant | >paper's greedy | >argmax of the posterior (not a likelihood) | >greedy through the generator",
        (
            [row["title"], variant, *map(fixed, (row["paper"]["greedy"], score["value"], figures["greedy"]))]
            for row, variant, figures in _trained(table)
            if (score := figures["argmax_posterior"]) is not None
        ),
    )


# ---- files ----


def write_paper(folder: Path) -> Record:
    """Write `table.json`, `table.md` and the pictures from the result files in a folder; returns the table."""
    results = read_results(folder, "paper")
    table = write_table(folder, lambda: make_table(results), markdown)
    draw_curves(results, folder / "curves.png")
    draw_best(results, folder / "samples.png")
    return table
