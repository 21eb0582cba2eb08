"""What a person sees while a run trains, and at its end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from xorflow import training

_REFRESH_SECONDS = 0.2


class TrainingDisplay:
    """A progress bar with the time left and the latest likelihoods; within its block nothing where there is no terminal."""

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

    def __enter__(self) -> Self | None:
        self._bar.start()
        return None if self._bar.disable else self

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


# ---- the figures of a finished run ----

PAPER_NLL = 190.1
"""The best figure of Hesselink and Aziz (2020), in nats on binarised MNIST."""


@dataclass(frozen=True)
class Figure:
    """A negative log-likelihood in nats: what to call it, its text, and what it is."""

    name: str
    value: str
    meaning: str


def reported_part(result: dict[str, Any]) -> str | None:
    """The held-out part that a result is about: test data if there are any, otherwise validation data."""
    return next((part for part in ("test", "validation") if part in result), None)


def run_figures(result: dict[str, Any], part: str, paper_nll: float | None = None) -> list[Figure]:
    """The likelihoods of a `result.json`, beside what they are to be measured by.

    Args:
        result: the content of the file.
        part: `test` or `validation`.
        paper_nll: the best figure of the paper; it is shown for MNIST only.
    """
    likelihoods, data = result[part], result["data"]
    features = "pixels" if len(data.get("shape") or ()) == 2 else "features"
    figures = [
        Figure(
            "this flow, latent", _with_error(likelihoods["nll"], likelihoods["stderr"]), _latent(likelihoods)
        ),
        Figure(
            "this flow, deterministic",
            _with_error(likelihoods["refit_nll"], likelihoods.get("refit_stderr")),
            "The deterministic flow takes the most probable transformation every time; its likelihood is "
            "exact, on a base refitted to the training data.",
        ),
        Figure(
            f"independent {features}",
            f"{result['independent_nll']:.2f}",
            f"Independent {features} have the frequencies of the training data and ignore each other; this "
            "is exact, and what a flow must beat.",
        ),
    ]
    if data["name"] == "mnist" and paper_nll is not None:
        figures.append(
            Figure(
                "the paper's best",
                f"{paper_nll:.2f}",
                "The paper's best is the lowest in the NLL column of Hesselink and Aziz (2020); it is an upper "
                "bound from samples, for a flow on a fixed base.",
            )
        )
    return figures


def _latent(likelihoods: dict[str, Any]) -> str:
    opening = "The latent flow draws its transformation from a distribution; "
    if likelihoods["kind"] == "exact":
        return opening + "its likelihood is exact, with all of them summed out."
    return opening + f"this is an upper bound, on average, from {likelihoods['samples']:,} samples a row."


def _with_error(value: float, stderr: float | None) -> str:
    return f"{value:.2f}" if stderr is None else f"{value:.2f} ± {stderr:.2f}"
