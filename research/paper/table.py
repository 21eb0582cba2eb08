"""The reproduction of the paper's table, from its result files: numbers and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research.files import VARIANTS
from research.results import Results, assembled, line, share_of_seconds, write_table
from xorflow.training import spread

_FIGURES = ("nll", "greedy", "exact", "elbo", "kind", "stderr", "mean", "spread")
"""What every row has of ours; None where a row that is not trained has no such figure."""

# ---- the table as numbers ----


def make_table(results: Results) -> dict[str, Any]:
    """What `table.json` holds: a row for everything that is finished, in the order of the plan."""
    return assembled(results, _row)


def _row(results: Results, planned: dict[str, Any]) -> dict[str, Any] | None:
    name = planned["id"]
    shared = {"id": name, "title": planned["title"], "family": planned["family"], "paper": planned["paper"]}
    if planned["family"] == "reference":
        found = next((run for run in results.runs if run["row"] == name), None)
        if found is None:
            return None
        none = dict.fromkeys(("improved", "improvement", "config", "epochs")) | {"seeds": [], "seconds": 0.0}
        ours = dict.fromkeys(_FIGURES) | found["evaluation"] | {"exact": found["evaluation"]["nll"]}
        return shared | {"ours": ours} | none | {"words": planned["words"]}
    figures = {variant: _variant(results, name, variant) for variant in VARIANTS}
    if not any(figures.values()):
        return None
    runs = [run for run in results.runs if run["row"] == name]
    chosen = {variant: results.selected(name, variant) for variant in VARIANTS}
    configs = {variant: run["config"] for variant, run in chosen.items() if run is not None}
    return (
        shared
        | figures
        | {
            "seeds": sorted({run["seed"] for run in runs if run["phase"] == "final"}),
            "config": configs,
            "epochs": next(found["epochs"] for found in figures.values() if found),
            "seconds": round(sum(share_of_seconds(run) for run in runs), 1),
            "depth": planned["depth"],
            "metric": planned["metric"],
            "choices": planned["choices"],
            "improvement": planned["improvement"],
            "attempts": planned["attempts"],
        }
    )


def _variant(results: Results, row: str, variant: str) -> dict[str, Any] | None:
    """The figures of the selected seed, and their mean and spread over all seeds."""
    selected, finals = results.selected(row, variant), results.of(row, variant, "final")
    if selected is None:
        return None
    nll = _spread([run["evaluation"]["nll"] for run in finals])
    greedy = _spread([run["evaluation"]["greedy"] for run in finals])
    return selected["evaluation"] | {
        "seed": selected["seed"],
        "mean": nll.pop("mean"),
        "spread": nll,
        "greedy_mean": greedy.pop("mean"),
        "greedy_spread": greedy,
        "by_seed": [
            {"seed": run["seed"], "nll": run["evaluation"]["nll"], "greedy": run["evaluation"]["greedy"]}
            for run in sorted(finals, key=lambda run: run["seed"])
        ],
        "epochs": selected["epochs"],
        "last_change": _last_change(results, row, variant),
        "validations": _validations(results.selection(row, variant)),
        "parameters": selected["parameters"],
        "seconds": round(sum(share_of_seconds(run) for run in results.runs if _is(run, row, variant)), 1),
        "device": selected["device_name"],
    }


def _last_change(results: Results, row: str, variant: str) -> float | None:
    """How much the validation likelihood fell at most, of all seeds, between the last two validations, in nats.

    None where the learning rate falls to zero: such a run comes to rest by itself, converged or not.
    """
    runs = results.of(row, variant, "select")
    if not runs or any(run["config"]["schedule"] != "constant" for run in runs):
        return None
    curves = [values for run in runs if len(values := _validations(run)) > 1]
    return round(min(values[-1][1] - values[-2][1] for values in curves), 2) if curves else None


def _validations(run: dict[str, Any] | None) -> list[list[Any]]:
    """Epochs and the likelihood of validation data after them, by which weights are chosen."""
    if run is None:
        return []
    metrics = run["metrics"]
    pairs = zip(metrics["epoch"], metrics["validation_nll"], strict=True)
    return [[epoch, value] for epoch, value in pairs if value is not None]


def _is(run: dict[str, Any], row: str, variant: str) -> bool:
    return run["row"] == row and run.get("variant") == variant


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return spread(values) or {}


# ---- the table as text ----


def markdown(table: dict[str, Any]) -> str:
    """What `table.md` holds: the table, the spread over seeds, and the layers, in Markdown."""
    parts = [main_table(table), spread_table(table), layer_table(table), posterior_table(table)]
    return "\n\n".join(part for part in parts if part)


def main_table(table: dict[str, Any]) -> str:
    """Ours beside the paper's."""
    lines = [
        "| row | paper: NLL | greedy | ours: NLL | which is | exact | greedy | improved | NLL | which is | exact | greedy |",
        "|---|---:|---:|---:|---|---:|---:|---|---:|---|---:|---:|",
    ]
    for row in table["rows"]:
        paper = row["paper"]
        cells = [row["title"], _one(paper["nll"]), _one(paper["greedy"])]
        cells += [*_cells(row["ours"]), row["improvement"] or "–", *_cells(row["improved"])]
        lines.append(line(cells))
    return "\n".join(lines)


def _cells(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["–"] * 4
    nll = _one(found["nll"]) + (f" ± {found['stderr']:.1f}" if found["stderr"] is not None else "")
    kind = "exact" if found["kind"] == "exact" else f"bound, {found['samples']:,} samples"
    return [nll, kind, _one(found.get("exact")), _one(found.get("greedy"))]


def spread_table(table: dict[str, Any]) -> str:
    """Mean and spread over the seeds of each variant."""
    lines = [
        "| row | variant | seeds | NLL: mean | std | least to greatest | greedy: mean | std | refitted | epochs | seconds |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table["rows"]:
        for variant in VARIANTS:
            found = row[variant]
            if found is None or found["mean"] is None:
                continue
            nll, greedy = found["spread"], found["greedy_spread"]
            cells = [
                *(row["title"], _label(row, variant), str(len(row["seeds"]))),
                *(_one(found["mean"]), _two(nll["std"]), f"{nll['min']:.1f} to {nll['max']:.1f}"),
                *(_one(found["greedy_mean"]), _two(greedy["std"]), _one(found["refit"])),
                *(str(found["epochs"]), f"{found['seconds']:.0f}"),
            ]
            lines.append(line(cells))
    return "\n".join(lines) if len(lines) > 2 else ""


def layer_table(table: dict[str, Any]) -> str:
    """What each layer of the deeper rows does."""
    lines = [
        "| row | variant | layer | entropy of its choices | drawn flips | greedy flips |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in table["rows"]:
        for variant in VARIANTS:
            layers = (row[variant] or {}).get("layers") or []
            if len(layers) < 2:
                continue
            for number, layer in enumerate(layers, 1):
                rates = [f"{100 * layer[key]:.2f} %" for key in ("flip_rate", "greedy_flip_rate")]
                about = [row["title"], _label(row, variant), str(number)]
                lines.append(line([*about, f"{layer['entropy']:.2f} nats", *rates]))
    return "\n".join(lines) if len(lines) > 2 else ""


def posterior_table(table: dict[str, Any]) -> str:
    """The score that explains the paper's greedy column; it is no likelihood, and says so."""
    lines = [
        "| row | variant | paper's greedy | argmax of the posterior (not a likelihood) | greedy through the generator |",
        "|---|---|---:|---:|---:|",
    ]
    for row in table["rows"]:
        for variant in VARIANTS:
            score = (row[variant] or {}).get("argmax_posterior")
            if score is not None:
                values = (row["paper"]["greedy"], score["value"], row[variant]["greedy"])
                lines.append(line([row["title"], _label(row, variant), *map(_one, values)]))
    return "\n".join(lines) if len(lines) > 2 else ""


def _label(row: dict[str, Any], variant: str) -> str:
    return row["improvement"] if variant == "improved" else variant


def _one(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


# ---- files ----


def write_paper(folder: Path) -> dict[str, Any]:
    """Write `table.json`, `table.md` and the pictures from the result files in a folder; returns the table."""
    from research.paper.figures import draw_best, draw_curves  # half a second of imports

    results, table = write_table(folder, "paper", make_table, markdown)
    draw_curves(results, folder / "curves.png")
    draw_best(results, folder / "samples.png")
    return table
