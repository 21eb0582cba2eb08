"""What a person sees while runs go on: one bar for the whole, one for each run under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from research.runner import Planned
from xorflow.training import Outcome, read_metrics

_POLL_SECONDS = 0.5
_MOST_SHOWN = 8
_LINE_SECONDS = 30.0
"""Without a terminal, how long at least there is between two lines: what takes seconds says nothing."""
_COARSE_SECONDS = 2.0
"""Clocks of file systems lag behind, by milliseconds or, on some, by up to two seconds."""


_SPEED_SECONDS = 900.0
"""How far back the estimate of the time left looks: a run may be minutes between two epochs."""


def progress_bars(console: Console, name_width: int) -> Progress:
    """A name, a bar, time taken and left, and words; silent without a terminal."""

    def text(field: str, width: int) -> TextColumn:
        column = Column(no_wrap=True, overflow="ellipsis", max_width=width)
        return TextColumn(f"{{task.{field}}}", markup=False, table_column=column)

    return Progress(
        text("description", name_width),
        BarColumn(bar_width=None),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        text("fields[words]", 24),
        console=console,
        disable=not console.is_terminal,
        expand=True,
        transient=True,
        speed_estimate_period=_SPEED_SECONDS,
    )


class RunsDisplay:
    """Progress by what the runs write into their folders, however they are run; without a terminal, a line now and then."""

    def __init__(self, console: Console, planned: Sequence[Planned]) -> None:
        self.stopping = False
        self._console, self._planned = console, planned
        self._done: set[Path] = set()
        self._began = time.time() - _COARSE_SECONDS
        self._ended = threading.Event()
        self._shown: dict[Path, TaskID] = {}
        self._bar = progress_bars(console, 38)
        total = sum(run.cost for run in planned)
        self._whole = self._bar.add_task(self._count(), total=max(total, 1.0), words="")
        # the speed is counted from the first change on: from here, with what was done before left out
        self._before, self._start = self._progress(), time.monotonic()
        self._said = self._start
        self._bar.update(self._whole, completed=self._before + 1e-9)
        self._watch = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        self._bar.start()
        if not self._bar.disable:
            self._watch.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._ended.set()
        self._bar.stop()

    def on_outcome(self, outcome: Outcome, done: int, total: int) -> None:
        del done, total
        self._done.add(outcome.job.out)
        name = next((run.name for run in self._planned if run.folder == outcome.job.out), outcome.job.name)
        words = f"{name} {'failed' if outcome.error else 'done'}"
        self._bar.update(self._whole, description=self._count(), words=words)
        if self._bar.disable and time.monotonic() - self._said >= _LINE_SECONDS:
            self._said = time.monotonic()
            line = f"{self._count()}: {words}{self._left()}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _left(self) -> str:
        """In words, from what was done since this display began."""
        progress, total = self._progress(), sum(run.cost for run in self._planned)
        done = progress - self._before
        if done <= 0 or progress >= total:
            return ""
        seconds = round((total - progress) / done * (time.monotonic() - self._start))
        return f", about {timedelta(seconds=seconds)} left"

    def on_stop(self) -> None:
        self.stopping = True
        self._bar.update(self._whole, words="stopping and saving")

    def _count(self) -> str:
        return f"runs {len(self._done)}/{len(self._planned)}"

    def _follow(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            self.refresh()

    def refresh(self) -> None:
        """Look into the folders."""
        self._bar.update(self._whole, completed=self._progress())
        under_way = [run for run in self._planned if self._is_under_way(run)][:_MOST_SHOWN]
        for folder in set(self._shown) - {run.folder for run in under_way}:
            self._bar.remove_task(self._shown.pop(folder))
        for run in under_way:
            epochs, words = _last_record(run.folder)
            if run.folder not in self._shown:
                self._shown[run.folder] = self._bar.add_task(f"  {run.name}", total=run.epochs, words="")
            self._bar.update(self._shown[run.folder], completed=epochs, words=words)

    def _is_under_way(self, run: Planned) -> bool:
        """Whether somebody has been writing since this display began."""
        try:
            touched = (run.folder / "metrics.jsonl").stat().st_mtime
        except OSError:
            return False
        return run.folder not in self._done and touched >= self._began

    def _progress(self) -> float:
        return sum(run.cost * (1.0 if run.folder in self._done else _part(run)) for run in self._planned)


def _part(run: Planned) -> float:
    """How much of a run is done; its evaluation counts as one epoch."""
    epochs = run.epochs if (run.folder / "result.json").exists() else _last_record(run.folder)[0]
    return epochs / (run.epochs + 1)


def _last_record(folder: Path) -> tuple[int, str]:
    """The last epoch that a run has recorded, and its likelihood."""
    try:
        records = read_metrics(folder / "metrics.jsonl")
    except OSError:
        return 0, ""
    if not records:
        return 0, ""
    last = records[-1]
    kind = "validation" if "validation_nll" in last else "train"
    nll = last.get(f"{kind}_nll")
    return last["epoch"], f"{kind} {nll:.2f}" if isinstance(nll, int | float) else ""
