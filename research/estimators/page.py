"""The tables about estimators in documents, from the committed table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research.estimators.equal_time import all_tables, best_table
from research.estimators.table import POINTS, SMALL, same_gradient, short, training_table, with_error
from research.estimators.training_table import objective_table
from research.results import full_table, line

Row = dict[str, Any]


def best_block(folder: Path) -> str:
    """Estimators of several samples or arms beside the paper's best control variate."""
    return best_table(_on_images(folder))


def equal_time_block(folder: Path) -> str:
    """All of them, relative to it."""
    return all_tables(_on_images(folder))


def objectives_block(folder: Path) -> str:
    """What training with each objective reaches."""
    return objective_table(full_table(folder, "estimators"))


def training_block(folder: Path) -> str:
    """What training with each estimator reaches."""
    return training_table(full_table(folder, "estimators"))


def _on_images(folder: Path) -> list[Row]:
    return [row for row in full_table(folder, "estimators")["rows"] if row["features"] > SMALL]


def measured_block(folder: Path) -> str:
    """For each layer of the models on images, all estimators in the middle of training."""
    table = full_table(folder, "estimators")
    rows = [row for row in table["rows"] if row["features"] > SMALL and row["part"] != "base"]
    parts, seen = [], set()
    for row in rows:
        key = (row["model"], row["part"], row["layer"])
        points = [r["point"] for r in rows if r["model"] == row["model"]]
        if key in seen or row["point"] != ("middle" if "middle" in points else max(points, key=POINTS.index)):
            continue
        seen.add(key)
        title = table["models"][row["model"]]["title"]
        of = f"{row['part']} of layer {row['layer']}"
        heading = f"### {title[:1].upper()}{title[1:]}, {row['point']}: {of}"
        parts.append(f"{heading}\n\n{_essence(same_gradient(row, rows))}")
    return "\n\n".join(parts)


def _essence(rows: Sequence[Row]) -> str:
    lines = [
        "| estimator | claim | bias | variance | cosine | passes | ms | variance at equal cost |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: (row["variance"] is None, row["variance"] or 0.0)):
        cells = [
            f"`{row['estimator']}`",
            row["claim"],
            with_error(row["bias"], row["bias_stderr"]) if row["oracle"] else "no oracle",
            *(short(row[key]) for key in ("variance", "cosine", "passes", "milliseconds")),
            short(row["variance_at_equal_cost"]),
        ]
        lines.append(line(cells))
    return "\n".join(lines)
