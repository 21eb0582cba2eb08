"""The paper's table as an experiment: its rows, what they are worth, and what a person sees of it."""

from __future__ import annotations

from research.experiment import Experiment
from research.paper.rows import NOTHING, REFERENCES, ROWS, Reference, Row
from research.paper.score import compute, score
from research.paper.table import write_paper
from research.results import Record
from research.rows import VARIANTS
from research.tables import fixed, marked


def _planned(row: Row | Reference) -> Record:
    """All that a table must know about a row."""
    about = {"id": row.id, "title": row.title}
    if isinstance(row, Reference):
        return about | {"description": row.description, "family": "reference", "paper": NOTHING}
    return about | {
        "family": row.family,
        "depth": row.depth,
        "flow": row.flow,
        "metric": row.metric,
        "paper": row.paper,
        "improvement": row.improvement or None,
        "attempts": list(row.attempts),
    }


def _cells(row: Record) -> list[str]:
    """The paper's figures, ours and improved."""
    cells = [row["id"], fixed(row["paper"]["nll"]), fixed(row["paper"]["greedy"])]
    for figures in (row[variant] for variant in VARIANTS):
        if figures is None:
            cells += [fixed(None)] * 2
        else:
            cells += [marked(figures["nll"], figures["kind"]), fixed(figures["greedy"])]
    return cells


PAPER = Experiment(
    name="paper",
    summary="Train every row of the paper's table, and show its figures beside ours.",
    examples=("paper --budget smoke --out runs/smoke", "paper --rows ste-1,ste-2 --device cuda --jobs 6"),
    rows=(*ROWS, *REFERENCES),
    planned=_planned,
    about=lambda budget: {"samples": budget.samples},
    score=score,
    compute=compute,
    write=write_paper,
    columns="row | >paper | >greedy | >ours | >greedy | >improved | >greedy",
    cells=_cells,
)
"""The paper's table."""
