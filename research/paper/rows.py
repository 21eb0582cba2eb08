"""What the paper reports, how we train it, and how to do better; `rows.toml` has the rows, as data."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from research.results import Record
from research.rows import VARIANTS, ComputedRow, Recipe, TrainedRow, Variant


@dataclass(frozen=True)
class PaperRow:
    """One row: `nll` is exact for straight-through rows and a 1,000-sample bound otherwise."""

    id: str
    title: str
    depth: int
    nll: float
    greedy: float | None = None


PAPER_TABLE = tuple(
    PaperRow(**row) for row in json.loads(Path(__file__).with_name("paper.json").read_text("utf-8"))
)
"""The table of Hesselink & Aziz (2020), in nats on stochastically binarised MNIST, base fixed at 0.9 / 0.1, best of three."""

NOTHING: Record = {"nll": None, "greedy": None}


@dataclass(frozen=True)
class Row(TrainedRow):
    """A row of the paper's table, `ours` as the paper describes it, and `improved`, with a changed objective.

    Attributes:
        family: how it is trained, which decides what its likelihood is.
        improvement: what is changed, as tables name it.
        attempts: what else was tried, if the row falls short of the paper.
    """

    family: Literal["straight-through", "full posterior", "special case", "maximum likelihood"]
    improvement: str = ""
    attempts: tuple[str, ...] = ()

    @property
    def paper(self) -> Record:
        """What the paper's table says; None where it says nothing."""
        figures = {row.id: {"nll": row.nll, "greedy": row.greedy} for row in PAPER_TABLE}
        return figures.get(self.id, NOTHING)


@dataclass(frozen=True)
class Reference(ComputedRow):
    """What the rows are to be measured by; `description` says what it is."""

    description: str


def _row(entry: Record, like: Mapping[str, Recipe]) -> Row:
    shared, attempts = entry.pop("shared"), tuple(entry.pop("attempts", ()))
    recipes: dict[Variant, Recipe] = {}
    for variant in VARIANTS:
        if recipe := entry.pop(variant, None):
            recipes[variant] = {**like["all"], **shared, **like[recipe.pop("like")], **recipe}
    return Row(recipes=recipes, attempts=attempts, seeds=3, **entry)


_CONTENT = tomllib.loads(Path(__file__).with_name("rows.toml").read_text("utf-8"))

ROWS = tuple(_row(entry, _CONTENT["like"]) for entry in _CONTENT["rows"])
"""The paper's table, the depths that its text speaks of, and the exact objective that it takes for intractable."""

REFERENCES = tuple(Reference(**entry) for entry in _CONTENT["references"])
"""What the rows are to be measured by."""
