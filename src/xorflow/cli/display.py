"""What a person sees while a run trains, and at its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from xorflow import training
from xorflow.experiments import best_of_paper

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
            TextColumn("{task.fields[words]}"),
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
        self._task = self._bar.add_task("training", total=total_steps, completed=progress.step, words="")

    def on_step(self, step: int) -> None:
        now = time.monotonic()
        if self._task is not None and now - self._shown > _REFRESH_SECONDS:
            self._bar.update(self._task, completed=step)
            self._shown = now

    def on_epoch(self, record: dict[str, Any]) -> None:
        if self._task is None:
            return
        words = f"train {record['train_nll']:.2f}"
        if "validation_nll" in record:
            words += f" validation {record['validation_nll']:.2f}"
        description = f"epoch {record['epoch']}"
        self._bar.update(self._task, completed=record["step"], description=description, words=words)


def show_summary(console: Console, folder: Path, result: dict[str, Any], samples: Path) -> None:
    """The end of a run: what was reached, beside what it is to be measured by, and what each number is."""
    part = "test" if "test" in result else "validation"
    if part in result:
        console.print(f"Negative log-likelihood of the {part} data, in nats (lower is better)", style="bold")
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column()
        table.add_column(justify="right", no_wrap=True)
        table.add_column()
        for words, value, meaning in summary_rows(result, part):
            table.add_row(words, value, meaning)
        console.print(table)
    else:
        console.print("No data were held out, so there is no likelihood to report.")
    epochs = f"{result['epochs']} epoch{'s' if result['epochs'] != 1 else ''}"
    lines = (
        f"{result['parameters']:,} weights, {epochs}, {result['seconds']:.1f} s on {result['device']}",
        f"run      {folder}",
        f"samples  {samples}",
    )
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)


def summary_rows(result: dict[str, Any], part: str) -> list[tuple[str, str, str]]:
    """Name, value and meaning of each figure; the meanings fit beside the rest on 80 columns."""
    found = result[part]
    kind = {
        "exact": "exact, all transformations summed out",
        "lower bound": f"upper bound, {found.get('samples')} importance samples",
    }[found["kind"]]
    stderr = "" if found["stderr"] is None else f" ± {found['stderr']:.2f}"
    rows = [
        ("this flow, latent", f"{found['nll']:.2f}{stderr}", kind),
        (
            "this flow, deterministic",
            f"{found['refit_nll']:.2f}",
            "exact, likeliest map, base refitted",
        ),
        ("independent features", f"{result['independent_nll']:.2f}", "exact, training frequencies only"),
    ]
    if result["data"]["name"] == "mnist":
        paper = best_of_paper()
        rows.append(("the paper's best", f"{paper.nll:.2f}", "upper bound, as published"))
    return rows
