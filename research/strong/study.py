"""Strong conditioners as an experiment: their rows, what they are worth, and what a person sees of it."""

from __future__ import annotations

from research.experiment import Experiment
from research.results import Record
from research.rows import TrainedRow
from research.strong.rows import MIXED_ROWS, STRONG_BUDGETS, STRONG_ROWS, MixedRow
from research.strong.score import mix, score
from research.strong.table import write_strong
from research.tables import fixed


def _planned(row: TrainedRow | MixedRow) -> Record:
    """All that a table must know about a row."""
    about = {"id": row.id, "title": row.title}
    if isinstance(row, MixedRow):
        return about | {"recipe": row.recipe, "part": row.part.id, "family": "mixed"}
    return about | {"recipe": row.options().recipe, "part": None, "family": "trained"}


def _cells(row: Record) -> list[str]:
    """Its likelihoods, and the minutes of its training."""
    figures = (row["nll"], row["train_nll"], row["refit"], row["seconds"] / 60)
    return [row["id"], *(fixed(value, 2) for value in figures)]


STRONG = Experiment(
    name="strong",
    summary="Train the recipes with strong conditioners, and report their exact likelihoods.",
    examples=(
        "strong --budget smoke --out runs/smoke-strong",
        "strong --rows recurrent,made-strong --device cuda",
    ),
    rows=(*STRONG_ROWS, *MIXED_ROWS),
    planned=_planned,
    about=lambda budget: {"experiment": "strong"},  # noqa: ARG005
    score=score,
    compute=mix,
    write=write_strong,
    columns="row | >NLL | >training | >refitted | >minutes",
    cells=_cells,
    budgets=STRONG_BUDGETS,
    selects=False,
)
"""What strong conditioners reach."""
