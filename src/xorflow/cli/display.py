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
    """A progress bar with the time left and the current validation likelihood; silent where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}"),
            console=console,
            disable=not console.is_terminal,
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
        validation = record.get("validation_nll")
        words = f"epoch {record['epoch']}  training {record['train_nll']:.2f}"
        if validation is not None:
            words += f"  validation {validation:.2f} nats"
        self._bar.update(self._task, completed=record["step"], words=words)


def show_summary(console: Console, folder: Path, result: dict[str, Any], samples: Path) -> None:
    """The end of a run: what was reached, beside what it is to be measured by, and what each number is."""
    part = "test" if "test" in result else "validation"
    if part not in result:
        console.print(f"trained for {result['seconds']:.0f} s; no data were held out, so there is no likelihood to report")
        console.print(f"run: {folder}   samples: {samples}", highlight=False)
        return
    table = Table(box=None, pad_edge=False, show_header=True, header_style="bold")
    table.add_column(f"negative log-likelihood ({part})")
    table.add_column("nats", justify="right")
    table.add_column("what it is")
    for words, value, meaning in summary_rows(result, part):
        table.add_row(words, value, meaning)
    console.print(table)
    console.print(
        f"{result['parameters']:,} weights, {result['epochs']} epochs, {result['seconds']:.0f} s on {result['device']}; "
        f"run: {folder}   samples: {samples}",
        soft_wrap=True,
        highlight=False,
    )


def summary_rows(result: dict[str, Any], part: str) -> list[tuple[str, str, str]]:
    """Name, value and meaning of each figure."""
    found = result[part]
    kind = {
        "exact": "exact: every transformation summed out in one pass",
        "lower bound": f"an upper bound, by {found.get('samples')} importance samples of the transformation",
    }[found["kind"]]
    stderr = "" if found["stderr"] is None else f" ± {found['stderr']:.2f}"
    rows = [
        ("this flow, latent", f"{found['nll']:.2f}{stderr}", kind),
        ("this flow, deterministic", f"{found['refit_nll']:.2f}", "exact: the most probable bijection, base refitted on training data"),
        ("independent features", f"{result['independent_nll']:.2f}", "exact: each feature's training frequency, nothing learned between them"),
    ]
    if result["data"]["name"] == "mnist":
        paper = best_of_paper()
        rows.append(("the paper's best", f"{paper.nll:.1f}", f"a bound: {paper.words}, depth {paper.depth}, base fixed at 0.9 / 0.1"))
    return rows
