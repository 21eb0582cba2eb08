"""What a person sees while work goes on: one bar for the whole, one for each run under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from xorflow.training import Outcome, read_metrics

_POLL_SECONDS = 0.5
_MOST_SHOWN = 8
_LINE_SECONDS = 30.0
"""Without a terminal, how long at least there is between two lines: what takes seconds says nothing."""
_COARSE_SECONDS = 2.0
"""Clocks of file systems lag behind, by milliseconds or, on some, by up to two seconds."""
_SPEED_SECONDS = 900.0
"""How far back the estimate of the time left looks: a run may be minutes between two epochs."""


@dataclass(frozen=True)
class Planned:
    """Work that is still to be done.

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


class Display:
    """Progress by what is said to be done, and by what runs write into their folders, however they are run.

    Without a terminal, a line now and then.
    """

    def __init__(self, console: Console, planned: Sequence[Planned]) -> None:
        self._console, self._planned = console, planned
        self._done: set[str] = set()
        self._began = time.time() - _COARSE_SECONDS
        self._ended = threading.Event()
        self._shown: dict[str, TaskID] = {}
        self._bar = _bars(console)
        self._total = sum(work.cost for work in planned)
        self._whole = self._bar.add_task(self._count(), total=max(self._total, 1.0), news="")
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

    def on_outcome(self, outcome: Outcome, done: int = 0, total: int = 0) -> None:
        del done, total
        name = next((work.name for work in self._planned if work.place == outcome.job.out), outcome.job.name)
        self.on_done(name, "failed" if outcome.error else "done")

    def on_done(self, name: str, how: str = "done") -> None:
        """Something that was planned has come to its end."""
        self._done.add(name)
        self._bar.update(self._whole, description=self._count(), news=f"{name} {how}")
        if self._bar.disable and time.monotonic() - self._said >= _LINE_SECONDS:
            self._said = time.monotonic()
            line = f"{self._count()}: {name} {how}{self._left()}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def on_stop(self) -> None:
        self._bar.update(self._whole, news="stopping and saving")

    def refresh(self) -> None:
        """Look into the folders."""
        self._bar.update(self._whole, completed=self._progress())
        under_way = {work.name: work for work in self._planned if self._is_under_way(work)}
        for name in self._shown.keys() - under_way.keys():
            self._bar.remove_task(self._shown.pop(name))
        for name, work in [*under_way.items()][:_MOST_SHOWN]:
            epochs, news = _last_record(work.place)
            if name not in self._shown:
                self._shown[name] = self._bar.add_task(f"  {name}", total=work.epochs, news="")
            self._bar.update(self._shown[name], completed=epochs, news=news)

    def _follow(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            self.refresh()

    def _count(self) -> str:
        return f"{len(self._done)} of {len(self._planned)}"

    def _left(self) -> str:
        """How long it still takes, from what was done since this display began."""
        progress = self._progress()
        done = progress - self._before
        if done <= 0 or progress >= self._total:
            return ""
        seconds = round((self._total - progress) / done * (time.monotonic() - self._start))
        return f", about {timedelta(seconds=seconds)} left"

    def _is_under_way(self, work: Planned) -> bool:
        """Whether somebody has been writing since this display began."""
        try:
            touched = (work.place / "metrics.jsonl").stat().st_mtime
        except OSError:
            return False
        return work.name not in self._done and touched >= self._began

    def _progress(self) -> float:
        return sum(
            work.cost * (1.0 if work.name in self._done else _share_done(work)) for work in self._planned
        )


def _bars(console: Console) -> Progress:
    """A name, a bar, time taken and left, and the latest; silent without a terminal."""

    def text(field: str, width: int) -> TextColumn:
        column = Column(no_wrap=True, overflow="ellipsis", max_width=width)
        return TextColumn(f"{{task.{field}}}", markup=False, table_column=column)

    return Progress(
        text("description", 38),
        BarColumn(bar_width=None),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        text("fields[news]", 24),
        console=console,
        disable=not console.is_terminal,
        expand=True,
        transient=True,
        speed_estimate_period=_SPEED_SECONDS,
    )


def _share_done(work: Planned) -> float:
    """How much of a run is done; its evaluation counts as one epoch."""
    epochs = work.epochs if (work.place / "result.json").exists() else _last_record(work.place)[0]
    return epochs / (work.epochs + 1)


def _last_record(folder: Path) -> tuple[int, str]:
    """The last epoch that a run has recorded, and its likelihood."""
    try:
        last = read_metrics(folder / "metrics.jsonl")[-1]
    except (OSError, IndexError):
        return 0, ""
    kind = "validation" if "validation_nll" in last else "train"
    nll = last.get(f"{kind}_nll")
    return last["epoch"], f"{kind} {nll:.2f}" if isinstance(nll, int | float) else ""
