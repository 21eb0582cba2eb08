"""The tables about the paper in documents, from committed records."""

from __future__ import annotations

import json
import math
from pathlib import Path

from research import results
from research.files import VARIANTS
from research.paper.published import PAPER_TABLE
from research.paper.table import essence_table, layer_table, main_table, posterior_table, spread_table
from research.results import full_table, line

_PIXELS, _P0 = 784, 0.9


def essence_block(folder: Path) -> str:
    """The likelihoods side by side."""
    return essence_table(full_table(folder, "paper"))


def table_block(folder: Path) -> str:
    """Ours beside the paper's."""
    return main_table(full_table(folder, "paper"))


def spread_block(folder: Path) -> str:
    """Mean and spread over seeds."""
    return spread_table(full_table(folder, "paper"))


def layers_block(folder: Path) -> str:
    """What each layer does."""
    return layer_table(full_table(folder, "paper"))


def posterior_block(folder: Path) -> str:
    """The score that explains the paper's greedy column."""
    return posterior_table(full_table(folder, "paper"))


def meaning_block(folder: Path) -> str:
    """The paper's own figures, against pixels that know nothing of each other."""
    level = json.loads((folder / "demo/result.json").read_text("utf-8"))["independent_nll"]
    floor, error = -_PIXELS * math.log(_P0), math.log(_P0 / (1 - _P0))
    lines = [
        f"| the paper's row | NLL | against independent pixels ({level:.1f}) | wrong pixels in an image |",
        "|---|---:|---:|---:|",
    ]
    for row in PAPER_TABLE:
        depth = f", depth {row.depth}" if row.words == "straight-through" else ""
        wrong = (row.nll - floor) / error
        lines.append(line([f"{row.words}{depth}", f"{row.nll}", f"{row.nll - level:+.1f}", f"{wrong:.1f}"]))
    return "\n".join(lines)


def recipes_block(folder: Path) -> str:
    """What the paper leaves open, and the recipe of each row settles."""
    return "\n".join(
        f"- {row['id']}, {variant}{_cure(row, variant)}: {row['choices'][variant]}"
        for row in full_table(folder, "paper")["rows"]
        for variant in VARIANTS
        if row[variant] and "choices" in row
    )


def _cure(row: results.Record, variant: str) -> str:
    return f" ({row['cure']})" if variant == "cured" and row["cure"] else ""


def retrained_block(folder: Path) -> str:
    """Runs of the table made once more, each by itself."""
    study = folder / "paper"
    lines = ["| run | NLL alone | in the table | greedy alone | in the table |", "|---|---:|---:|---:|---:|"]
    for path in results.records(study, "retrained"):
        alone, table = (
            results.read(file, "paper")["evaluation"] for file in (path, study / "runs" / path.name)
        )
        figures = [f"{part[key]:.2f}" for key in ("nll", "greedy") for part in (alone, table)]
        lines.append(line([path.name.removesuffix(".final.json").replace(".", ", "), *figures]))
    return "\n".join(lines)


def tuning_block(folder: Path) -> str:
    """The runs by which the recipes were chosen."""
    lines = [
        "| row | estimator | hidden units | batch | epochs | learning rate | decay of weights | NLL | greedy |",
        "|---|---|---|---:|---:|---|---|---:|---:|",
    ]
    for run in results.read(folder / "paper/tuning/tuning.json", "paper")["runs"]:
        estimator = f"`{run['estimator']}`" + (f", posterior {run['posterior']}" if run["posterior"] else "")
        decay = f"{run['weight_decay']:g}" + (" (AdamW)" if run["optimiser"] == "adamw" else "")
        found = run["validation"]
        bound = "" if found["kind"] == "exact" else "*"
        cells = [run["row"], estimator, run["hidden"], run["batch_size"], run["epochs"], run["schedule"]]
        cells += [
            decay if run["weight_decay"] else "none",
            f"{found['nll']:.1f}{bound}",
            f"{found['greedy']:.1f}",
        ]
        lines.append(line([str(cell) for cell in cells]))
    return "\n".join(lines)
