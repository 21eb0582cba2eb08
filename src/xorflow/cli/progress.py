"""What a person sees while work goes on: a bar with the time so far and the time left, and what was done last."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from xorflow import training
from xorflow._files import read_bytes
from xorflow.training import Outcome

__all__ = ["AutoDisplay", "Bar", "Display", "Planned", "TrainingDisplay", "times"]


class Bar(Progress):
    """A description and a bar, with columns after it, as wide as the terminal until the work is done; else nothing."""

    def __init__(self, console: Console, *columns: ProgressColumn, **settings: Any) -> None:
        super().__init__(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            *columns,
            console=console,
            disable=not console.is_terminal,
            expand=True,
            transient=True,
            **settings,
        )


def times() -> tuple[ProgressColumn, ...]:
    """Columns of a bar: the time so far, and the time left."""
    return TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()


# ---- one run ----


class TrainingDisplay(Bar):
    """How far a run is, with its latest likelihoods."""

    def __init__(self, console: Console) -> None:
        percentage = TextColumn("{task.percentage:>3.0f}%")
        super().__init__(console, percentage, *times(), TextColumn("{task.fields[status]}"))

    def on_start(self, total_steps: int, progress: training.Progress) -> None:
        self._task = self.add_task("training", total=total_steps, completed=progress.step, status="")

    def on_step(self, step: int) -> None:
        self.update(self._task, completed=step)

    def on_epoch(self, record: dict[str, Any]) -> None:
        status = f"train {record['train_nll']:.2f}"
        if "validation_nll" in record:
            status += f" validation {record['validation_nll']:.2f}"
        description = f"epoch {record['epoch']}"
        self.update(self._task, completed=record["step"], description=description, status=status)


class AutoDisplay(Bar):
    """Of the recipe auto, a line for each unit that is made and, on a terminal, a bar with the time left."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            console, TimeElapsedColumn(), TextColumn("{task.fields[left]}"), refresh_per_second=2
        )
        self._ends: float | None = None

    def on_ordering(self, number: int, seconds: float | None) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds
        if not self.tasks:
            self._task = self.add_task("", total=None, left="")
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


# ---- much work ----

_LINE_SECONDS = 30.0
"""Without a terminal, how long at least there is between two lines: what takes seconds says nothing."""
SPEED_SECONDS = 900.0
"""How far back the estimate of the time left goes: a run may be minutes between two epochs."""


@dataclass(frozen=True)
class Planned:
    """Work that is to be done.

    Attributes:
        name: of its own.
        place: the folder of a run, which writes there how far it is; or whatever file tells that it is done.
        cost: in any unit that is that of all.
        epochs: of a run.
    """

    name: str
    place: Path
    cost: float = 1.0
    epochs: int = 0


class Display(Bar):
    """Progress by what is said to be done, and by what runs write into their folders, however they are run.

    Without a terminal, a line now and then.
    """

    def __init__(self, console: Console, planned: Sequence[Planned]) -> None:
        self._planned, self._said = planned, time.monotonic()
        self._done: set[str] = set()
        self.outcomes: list[Outcome] = []
        self.stopping = False
        last = Column(no_wrap=True, overflow="ellipsis", max_width=40)
        news = TextColumn("{task.fields[news]}", markup=False, table_column=last)
        super().__init__(console, *times(), news, refresh_per_second=2, speed_estimate_period=SPEED_SECONDS)
        total = sum(work.cost for work in planned)
        self._bar = self.add_task(self._count(), total=max(total, 1.0), news="")
        # the speed is counted from the first change on: from here, with what was done before left out
        self.update(self._bar, completed=self.cost_done() + 1e-9)

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.tasks:
            self.update(self._bar, completed=self.cost_done())
        return super().get_renderables()

    def on_outcome(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        name = next((work.name for work in self._planned if work.place == outcome.job.out), outcome.job.name)
        self.on_done(name, _headline(outcome))

    def on_done(self, name: str, how: str = "done") -> None:
        """Something that was planned has come to its end."""
        self._done.add(name)
        news = f"{how} {name}"
        self.update(self._bar, completed=self.cost_done(), description=self._count(), news=news)
        if self.disable and time.monotonic() - self._said >= _LINE_SECONDS:
            self._said, seconds = time.monotonic(), self.tasks[self._bar].time_remaining
            left = f", about {timedelta(seconds=seconds)} left" if seconds else ""
            self.console.print(
                f"{self._count()}: {news}{left}", highlight=False, markup=False, soft_wrap=True
            )

    def on_stop(self) -> None:
        self.stopping = True
        self.update(self._bar, news="stopping and saving")

    def cost_done(self) -> float:
        """What is done, runs under way in part."""
        return sum(
            work.cost * (1.0 if work.name in self._done else _share_done(work)) for work in self._planned
        )

    def _count(self) -> str:
        return f"{len(self._done)} of {len(self._planned)}"


def _share_done(work: Planned) -> float:
    """How much of a run is done, by the epochs in its metrics; its evaluation counts as one."""
    try:
        epochs = read_bytes(work.place / "metrics.jsonl").count(b"\n")
    except OSError:
        return 0.0
    return epochs / (work.epochs + 1)


def _headline(outcome: Outcome) -> str:
    """The likelihood of a run on test data, if there is one."""
    if outcome.result is None:
        return "failed"
    part = outcome.result.get("test") or outcome.result.get("validation")
    return f"{part['nll']:.2f}" if part else "done"
