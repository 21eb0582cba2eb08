"""What a person sees of a run of the recipe auto: each unit as it is made, and at the end what was reached, by column."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from xorflow import training
from xorflow.cli.runs import plain_table
from xorflow.cli.sample import write_samples
from xorflow.data import Dataset
from xorflow.training import Interrupted
from xorflow.training.auto import AutoObserver
from xorflow.training.auto_run import AutoRun

_MOST_COLUMNS = 12
"""So many columns are shown, those first where the model is better than independence by most."""
_MOST_SHOWN = 6
"""So many columns of rows."""


class AutoDisplay(Progress):
    """A line for each unit that is made and, on a terminal, a bar with the time left."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
            expand=True,
            transient=True,
            refresh_per_second=2,
        )
        self._task = self.add_task("trees and networks", total=None, left="")
        self._ends: float | None = None

    def on_ordering(self, number: int, seconds: float | None) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds
        self.update(self._task, description=f"ordering {number}")

    def on_unit(self, record: dict[str, Any]) -> None:
        self.console.print(
            f"{record['order']:>10}  {record['kind']:<20}  validation {record['validation_nll']:.3f}  "
            f"{record['seconds']:.1f} s",
            highlight=False,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.tasks and self._ends is not None:
            left, spent = max(self._ends - time.monotonic(), 0.0), self.tasks[0].elapsed or 0.0
            text = f"about {timedelta(seconds=round(left))} left"
            self.update(self._task, completed=spent, total=spent + left, left=text)
        return super().get_renderables()


def train_auto(folder: Path, begin: Callable[[AutoObserver], AutoRun | None]) -> None:
    """Make a run, or go on with it, and show what it reached; None is finished."""
    display = AutoDisplay(Console(stderr=True))
    run = begin(display)
    if run is None:
        result = training.finished_result(folder)
    else:
        show_data(Console(), run.dataset)
        result = _made(run, display)
    samples = next(iter(sorted(folder.glob("samples.*"))), None) or write_samples(folder, count=100, seed=0)
    show_auto(Console(), folder, result, samples)


def _made(run: AutoRun, display: AutoDisplay) -> dict[str, Any]:
    try:
        with display:
            return run.make()
    except (Interrupted, KeyboardInterrupt):
        folder = run.run_folder
        if os.path.exists(folder / "result.json"):
            said = f"the model is kept: xorflow evaluate {folder}"
        else:
            said = f"what is done is kept; continue with: xorflow train --out {folder} --resume"
        typer.echo(f"stopped; {said}", err=True)
        raise typer.Exit(130) from None


def show_data(console: Console, dataset: Dataset) -> None:
    """How a table was read: what each column is, and what happens to it."""
    if dataset.schema is None:
        return
    lines = [*dataset.notes, "", str(dataset.schema), ""]
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)


def show_auto(console: Console, folder: Path, result: Mapping[str, Any], samples: Path) -> None:
    """The end of a run: exact likelihoods beside simpler models, columns, and what was chosen and why."""
    part = "test" if "test" in result else "validation"
    figures, record = result[part], result["auto"]
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    stderr = "" if figures["stderr"] is None else f"± {figures['stderr']:.3f}"
    for name, nll, error in (
        ("this model", figures["nll"], stderr),
        ("Chow-Liu tree", result["chow_liu_nll"], ""),
        ("independent columns", result["independent_nll"], ""),
    ):
        if nll is not None:
            table.add_row(name, f"{nll:.3f}", error)
    console.print(
        f"Negative log-likelihood of the {part} data, exact, in nats (lower is better)", style="bold"
    )
    console.print(table, "", _columns(result["columns"]), "", _rows(result, part), "", sep="\n")
    kinds = ", ".join(f"{kind} by {weight:.2f}" for kind, weight in record["kinds"].items())
    orders = ", ".join(f"{order} {weight:.2f}" for order, weight in record["weights"].items())
    lines = [
        f"logits     {kinds}",
        f"orderings  {orders}; {record['ends']}",
        *(f"because    {reason}" for reason in record["reasons"]),
        f"time       {result['seconds']:.1f} s on {result['device']}",
        f"again      --set orderings={record['orderings']} makes the same model",
        f"run        {folder}",
        f"samples    {samples}",
    ]
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)


def _columns(columns: list[Mapping[str, Any]]) -> Table:
    """Bits by column, the greatest gain first."""
    table = plain_table("column", "bits given those before it", "alone", "gain")
    ranked = sorted(columns, key=lambda column: column["bits"] - column["independent_bits"])
    for column in ranked[:_MOST_COLUMNS]:
        gain = column["independent_bits"] - column["bits"]
        table.add_row(
            column["column"], f"{column['bits']:.3f}", f"{column['independent_bits']:.3f}", f"{gain:+.3f}"
        )
    if len(ranked) > _MOST_COLUMNS:
        table.add_row(f"{len(ranked) - _MOST_COLUMNS} more in result.json", "", "", "")
    return table


def _rows(result: Mapping[str, Any], part: str) -> Table:
    """Rows of samples beside rows of data, of the first columns."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rows")
    for column in result["columns"][:_MOST_SHOWN]:
        table.add_column(column["column"], overflow="ellipsis", no_wrap=True)
    for name, rows in result["rows"].items():
        for number, row in enumerate(rows):
            label = {"data": f"{part} data", "samples": "samples"}[name]
            table.add_row("" if number else label, *map(Text, row[:_MOST_SHOWN]))
    return table
