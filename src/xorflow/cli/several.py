"""`xorflow train` with --seeds or a table of runs: many runs by one command, and what became of them."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import typer
from rich.console import Console
from rich.progress import TextColumn
from rich.table import Table
from rich.text import Text

from xorflow import training
from xorflow.cli.display import progress_of_runs
from xorflow.cli.sample import write_samples
from xorflow.errors import ConfigError
from xorflow.training import Interrupted, Job, Options, Outcome
from xorflow.training.folder import holds_several, require_free
from xorflow.training.storage import write_json

_MOST_SEEDS = 10_000
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Plan:
    """What the command line asks for: entries by name, each once or for every seed, into one folder."""

    out: Path
    entries: Mapping[str, Options]
    seeds: Sequence[int] | None
    model: dict[str, Any] | None
    workers: int
    resume: bool


def train(plan: Plan, *, again: str) -> None:
    """Make all runs of a plan, show what became of them, and leave it in `summary.json`; `again` continues them."""
    _check_folder(plan.out, plan.resume)
    jobs = training.plan(plan.out, plan.entries, plan.seeds, model=plan.model)
    display = Display(Console(stderr=True), plan.out, jobs)
    try:
        with display:
            training.run_jobs(jobs, plan.workers, display, finish=_add_samples)
    except Interrupted:
        _summarise(plan.out, jobs, display.outcomes)
        typer.echo(f"stopped and saved; continue with: {again}", err=True)
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        if not display.stopping:  # nothing was begun
            raise
        typer.echo(f"stopped; continue from the last checkpoints with: {again}", err=True)
        sys.stderr.flush()
        # an ordinary exit would wait for runs that are threads; what they write is whole or not there
        os._exit(130)
    summary = _summarise(plan.out, jobs, display.outcomes)
    show_runs(Console(), plan.out, summary)
    failed = [row for row in summary["runs"] if row["error"] is not None]
    errors = Console(stderr=True)
    for row in failed:
        line = Text.assemble(("error: ", "bold red"), f"{row['folder']}: {row['error']}")
        errors.print(line, soft_wrap=True, highlight=False)
    if failed:
        raise typer.Exit(2)


def _add_samples(job: Job) -> None:
    """The samples that `xorflow train` leaves beside one run; its folder then has the same files."""
    if not any(job.out.glob("samples.*")):
        write_samples(job.out, count=100, seed=0)


def _summarise(out: Path, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    summary = training.summarise(out, jobs, outcomes)
    write_json(out / "summary.json", summary)
    return summary


# ---- what is asked for ----


def parse_seeds(text: str | None, given: Mapping[str, Any]) -> list[int] | None:
    """The seeds that --seeds names, in its order.

    >>> parse_seeds("3, 0-2", {})
    [3, 0, 1, 2]
    """
    if text is None:
        return None
    if "seed" in given:
        raise ConfigError("--seeds names the seed of every run, and --seed came too; leave one of them out")
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:\s*-\s*([0-9]{1,18}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if first > last:
            raise ConfigError(
                f"--seeds is whole numbers and ranges upwards, as in 0,1,2 or 0-7; got {text!r}"
            )
        if len(seeds) + last - first >= _MOST_SEEDS:
            raise ConfigError(f"--seeds names at most {_MOST_SEEDS:,} seeds; got {text!r}")
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds names each seed once; got {text!r}")
    return seeds


def _check_folder(out: Path, resume: bool) -> None:
    if not resume:
        require_free(out)
    elif not out.is_dir():
        raise ConfigError(f"--resume continues the runs in --out, and there is no folder {out}; leave it out")
    elif (out / "config.json").exists():
        raise ConfigError(
            f"--out is a folder of several runs here, and {out} is that of one; choose another --out, or "
            "leave out what makes it several"
        )


def require_one(out: Path) -> None:
    """Refuse to continue several runs as if they were one."""
    if not (out / "config.json").exists() and holds_several(out):
        raise ConfigError(
            f"--resume continues one run here, and {out} holds several: repeat the command that began them, "
            "with its --seeds or --config, and add --resume"
        )


# ---- what a person sees ----


class Display:
    """One progress bar for all runs, with the time left and the last outcome; silent where there is no terminal."""

    def __init__(self, console: Console, out: Path, jobs: Sequence[Job]) -> None:
        self.outcomes: list[Outcome] = []
        self.stopping = False
        self._out = out
        self._jobs = jobs
        self._ended = threading.Event()
        count = TextColumn("[bold]runs {task.fields[done]}/{task.total:.0f}")
        self._bar = progress_of_runs(console, count, status_width=30)
        self._task = self._bar.add_task("runs", total=len(jobs), done=0, status="")
        # the speed is counted from the first change on: from here, with what was done before left out
        self._bar.update(self._task, completed=self._progress() + 1e-9)
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
        del total
        self.outcomes.append(outcome)
        label = outcome.job.out.relative_to(self._out).as_posix()
        status = f"{_headline(outcome)} {label}"
        self._bar.update(self._task, done=done, completed=self._progress(), status=status)

    def on_stop(self) -> None:
        self.stopping = True
        self._bar.update(self._task, status="stopping: the runs are saving")

    def _follow(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            self._bar.update(self._task, completed=self._progress())

    def _progress(self) -> float:
        """How many runs are done, those under way in part: by the epochs in their metrics, however they are run."""
        finished = {outcome.job.out for outcome in self.outcomes}
        return sum(1.0 if job.out in finished else _part_done(job) for job in self._jobs)


def _part_done(job: Job) -> float:
    if (job.out / "result.json").exists():
        return 1.0
    try:
        epochs = (job.out / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0.0
    return epochs / (job.options.epochs + 1)  # the last evaluation counts as one


def _headline(outcome: Outcome) -> str:
    if outcome.result is None:
        return "failed"
    part = outcome.result.get("test") or outcome.result.get("validation")
    return f"{part['nll']:.2f}" if part else "done"


def show_runs(console: Console, out: Path, summary: Mapping[str, Any]) -> None:
    """The end of several runs: what each reached, and the spread over seeds."""
    runs, groups = summary["runs"], [group for group in summary["groups"] if group["n"] > 1 and group["nll"]]
    splits = sorted({row["part"] for row in runs if row["part"]})
    if splits:
        data = " or ".join(splits)
        console.print(f"Negative log-likelihood of the {data} data, in nats (lower is better)", style="bold")
    table = _table("run", "seed", "NLL", "which is", "refitted", "seconds")
    for row in runs:
        table.add_row(Text(row["name"]), str(row["seed"]), *_figures(row))
    console.print(table)
    if groups:
        table = _table("over seeds", "n", "mean NLL", "std", "least to greatest", "mean refitted")
        for group in groups:
            nll, refit = group["nll"], group["refit_nll"]
            reach = f"{nll['min']:.2f} to {nll['max']:.2f}"
            spread = (f"{nll['mean']:.2f}", f"{nll['std']:.2f}", reach, f"{refit['mean']:.2f}")
            table.add_row(Text(group["name"]), str(group["n"]), *spread)
        console.print()
        console.print(table)
    lines = f"runs     {out}\nsummary  {out / 'summary.json'}"
    console.print(lines, soft_wrap=True, highlight=False, markup=False)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="ellipsis")  # the only one that gives way to a narrow terminal
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _figures(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    if row["error"] is not None:
        return "failed", "", "", ""
    seconds = f"{row['seconds']:.1f}"
    if row["nll"] is None:  # no data were held out
        return "-", "", "-", seconds
    stderr = "" if row["stderr"] is None else f" ± {row['stderr']:.2f}"
    kind = "exact" if row["kind"] == "exact" else "upper bound"
    return f"{row['nll']:.2f}{stderr}", kind, f"{row['refit_nll']:.2f}", seconds
