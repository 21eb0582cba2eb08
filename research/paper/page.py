"""The tables about the paper in documents, from committed records."""

from __future__ import annotations

import json
import math
from pathlib import Path

from research.paper.published import PAPER_TABLE
from research.paper.table import main_table, posterior_table, spread_table
from research.results import full_table, line

_PIXELS, _P0 = 784, 0.9


def table_block(folder: Path) -> str:
    """Ours beside the paper's."""
    return main_table(full_table(folder, "paper"))


def spread_block(folder: Path) -> str:
    """Mean and spread over seeds."""
    return spread_table(full_table(folder, "paper"))


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
