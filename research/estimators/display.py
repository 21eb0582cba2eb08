"""What a person sees while a study goes on: one bar for the whole, and one for a model that is being trained."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.progress import TaskID

from research.display import progress_bars
from xorflow.training import Observer, Outcome, Progress


class StudyDisplay:
    """Progress with the time left; silent where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self.stopping = False
        self._bar = progress_bars(console, 44)
        self._whole = self._bar.add_task("study", total=1.0, words="")
        self.training: Observer | None = _Training(self)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._bar.stop()

    def on_piece(self, name: str, done: float, total: float) -> None:
        """A piece begins; so much of the whole is done."""
        self._bar.update(self._whole, description=name or "study", total=max(total, 1.0), completed=done)

    def on_outcome(self, outcome: Outcome, done: int, total: int) -> None:
        words = f"{'failed' if outcome.error else 'done'}"
        self._bar.update(
            self._whole, description=outcome.job.name, total=float(total), completed=done, words=words
        )

    def on_stop(self) -> None:
        self.stopping = True
        self._bar.update(self._whole, words="stopping and saving")

    def add(self, name: str, total: float) -> TaskID:
        return self._bar.add_task(name, total=total, words="")

    def update(self, task: TaskID, **changes: Any) -> None:
        self._bar.update(task, **changes)

    def remove(self, task: TaskID) -> None:
        self._bar.remove_task(task)


class _Training:
    """The bar of a model that is being trained, there only as long as it is."""

    def __init__(self, display: StudyDisplay) -> None:
        self._display, self._task, self._total = display, None, 0

    def on_start(self, total_steps: int, progress: Progress) -> None:
        self._total = total_steps
        self._task: TaskID | None = self._display.add("  training", float(total_steps))
        self._display.update(self._task, completed=progress.step)

    def on_step(self, step: int) -> None:
        if self._task is not None:
            self._display.update(self._task, completed=step)

    def on_epoch(self, record: dict[str, Any]) -> None:
        if self._task is None:
            return
        self._display.update(self._task, words=f"train {record['train_nll']:.2f}")
        if record["step"] >= self._total:
            self._display.remove(self._task)
            self._task = None
