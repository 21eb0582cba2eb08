"""What an experiment is: its rows, what they are worth, its table; and what the command line asks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research import results
from research.budgets import BUDGETS, Budget, Phase
from research.results import Record
from research.rows import ComputedRow, Row, TrainedRow
from xorflow import LatentFlow, Mixture
from xorflow.data import Dataset, Split
from xorflow.training import Options


@dataclass(frozen=True)
class Trained:
    """A trained run, for whoever says what it is worth.

    Attributes:
        row: what it was trained for.
        flow: the model.
        split: the part of its data that it is evaluated on.
        train: the data that it was trained on.
        known: what the run itself reports of that part, as `result.json` has it.
        budget: how many samples, of how many rows.
        phase: of the run; a final one is what is reported.
    """

    row: Any
    flow: LatentFlow | Mixture
    split: Split
    train: Split
    known: Record
    budget: Budget
    phase: Phase = "final"

    @property
    def components(self) -> list[LatentFlow]:
        """Those of a mixture, or the flow itself."""
        return self.flow.latent_components() if isinstance(self.flow, Mixture) else [self.flow]


@dataclass(frozen=True)
class Experiment:
    """In what one experiment differs from another.

    Attributes:
        name: by which the command line knows it.
        summary: what the command does, in a sentence.
        examples: of the command.
        rows: all of them.
        planned: what `plan.json` holds of a row.
        about: what it holds besides, for a budget.
        score: the figures of a run.
        compute: the record of a row that is not trained; None as long as something that it needs is missing.
        write: makes table and pictures in a folder of results.
        columns: of the table on a terminal.
        cells: those of a row.
        levels: rows that are computed whatever rows are chosen.
        budgets: to choose from.
        selects: whether a seed is selected by itself; otherwise the first one is for all.
        build: the model of a row that no options describe, for options and data; None for the others.
    """

    name: str
    summary: str
    examples: Sequence[str]
    rows: Sequence[Row]
    planned: Callable[[Any], Record]
    about: Callable[[Budget], Record]
    score: Callable[[Trained], Record]
    compute: Callable[[Any, Request, Dataset], Record | None]
    write: Callable[[Path], Record]
    columns: str
    cells: Callable[[Record], Sequence[str]]
    levels: Sequence[ComputedRow] = ()
    budgets: Sequence[Budget] = BUDGETS
    selects: bool = True
    build: Callable[[Any, Options, Dataset], LatentFlow | None] | None = None

    def plan(self, budget: Budget) -> Record:
        """What `plan.json` holds: all that a table must know about the rows."""
        about = {"version": results.VERSION, "budget": budget.name, "description": budget.description}
        return about | self.about(budget) | {"rows": [self.planned(row) for row in self.rows]}


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        experiment: what the rows are about.
        rows: those to train or to compute.
        budget: how much work each is.
        out: the folder of results.
        work: the folder of the runs themselves.
        seeds: how many seeds, from 0; None for as many as the rows say.
        device: where to train and evaluate.
        workers: how many runs at once.
    """

    experiment: Experiment
    rows: Sequence[Row]
    budget: Budget
    out: Path
    work: Path
    seeds: int | None = None
    device: str = "auto"
    workers: int = 1

    def seeds_of(self, row: TrainedRow) -> range:
        """The seeds that a row is trained with."""
        return range(min(row.seeds, self.budget.seeds) if self.seeds is None else self.seeds)
