"""The tables about estimators in documents, from the committed table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from research.estimators.equal_time import best_table
from research.estimators.table import SMALL, training_table
from research.estimators.training_table import objective_table
from research.results import full_table

Row = dict[str, Any]


def best_block(folder: Path) -> str:
    """Estimators of several samples or arms beside the paper's best control variate."""
    return best_table(_on_images(folder))


def objectives_block(folder: Path) -> str:
    """What training with each objective reaches."""
    return objective_table(full_table(folder, "estimators"))


def training_block(folder: Path) -> str:
    """What training with each estimator reaches."""
    return training_table(full_table(folder, "estimators"))


def _on_images(folder: Path) -> list[Row]:
    return [row for row in full_table(folder, "estimators")["rows"] if row["features"] > SMALL]
