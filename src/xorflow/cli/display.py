"""What a person sees while a run trains, and at its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from xorflow import training
from xorflow.cli.summary import PAPER_NLL, Figure, reported_part, run_figures

_REFRESH_SECONDS = 0.2


class TrainingDisplay:
    """A progress bar with the time left and the latest likelihoods; silent where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
            expand=True,
            transient=True,
        )
        self._task: TaskID | None = None
        self._shown = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._bar.stop()

    def on_start(self, total_steps: int, progress: training.Progress) -> None:
        self._task = self._bar.add_task("training", total=total_steps, completed=progress.step, status="")

    def on_step(self, step: int) -> None:
        now = time.monotonic()
        if self._task is not None and now - self._shown > _REFRESH_SECONDS:
            self._bar.update(self._task, completed=step)
            self._shown = now

    def on_epoch(self, record: dict[str, Any]) -> None:
        if self._task is None:
            return
        status = f"train {record['train_nll']:.2f}"
        if "validation_nll" in record:
            status += f" validation {record['validation_nll']:.2f}"
        description = f"epoch {record['epoch']}"
        self._bar.update(self._task, completed=record["step"], description=description, status=status)


def show_summary(console: Console, folder: Path, result: dict[str, Any], samples: Path) -> None:
    """The end of a run: what was reached, beside what it is to be measured by, and what each number is."""
    part = reported_part(result)
    if part is None:
        console.print("No data were held out, so there is no likelihood to report.")
    else:
        _show_figures(console, part, run_figures(result, part, PAPER_NLL))
    if "warning" in result:
        line = Text.assemble(("warning: ", "bold yellow"), result["warning"])
        console.print(line, "", sep="\n", soft_wrap=True, highlight=False)
    epochs = f"{result['epochs']} epoch{'s' if result['epochs'] != 1 else ''}"
    lines = (
        f"{result['parameters']:,} weights, {epochs}, {result['seconds']:.1f} s on {result['device']}",
        f"run      {folder}",
        f"samples  {samples}",
    )
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)


def _show_figures(console: Console, part: str, figures: list[Figure]) -> None:
    """The figures one below the other, and below them what each is, wrapped to the width of the console."""
    console.print(f"Negative log-likelihood of the {part} data, in nats (lower is better)", style="bold")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    widest = max(figure.value.index(".") for figure in figures)
    for figure in figures:
        table.add_row(figure.name, " " * (widest - figure.value.index(".")) + figure.value)  # points aligned
    sentences = Table.grid(padding=(0, 1))
    for figure in figures:
        sentences.add_row("-", figure.meaning)
    console.print(table, "", sentences, "", sep="\n")
