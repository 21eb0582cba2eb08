"""What the commands share: options, progress, Ctrl-C, what failed, and the command that goes on."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from research.display import RunsDisplay
from research.runner import Request, Runner
from xorflow.training import Interrupted, Outcome

RESULTS, WORK = Path("research/results"), Path("runs")
T = TypeVar("T")

Rows = Annotated[
    str | None, typer.Option(help="Rows of the table, with commas; * stands for any letters. By default all.")
]
Seeds = Annotated[
    int | None, typer.Option(help="How many, from 0; by default as each row says, in smaller budgets fewer.")
]
BudgetName = Annotated[
    str, typer.Option(help="smoke, quick or full: seconds a row, minutes on two cores, or a GPU's work.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Jobs = Annotated[int, typer.Option(help="How many runs at once.")]
Out = Annotated[Path, typer.Option(help="Folder of the results.")]
Work = Annotated[Path, typer.Option(help="Folder of the runs: weights and checkpoints.")]


def train(context: typer.Context, request: Request) -> list[Outcome]:
    """Make all runs of a request, with progress."""
    runner = Runner(request)
    display = RunsDisplay(Console(stderr=True), runner.planned)
    return guarded(context, display, lambda: runner.run(display))


def guarded(context: typer.Context, display: Any, work: Callable[[], T]) -> T:
    """Work with its progress shown; after Ctrl-C, what to type to go on."""
    try:
        with display:
            return work()
    except Interrupted:
        _stopped("stopped and saved; continue with", context)
    except KeyboardInterrupt:
        _stopped("stopped; continue from the last checkpoints with", context, at_once=display.stopping)


def _stopped(words: str, context: typer.Context, *, at_once: bool = False) -> NoReturn:
    typer.echo(f"{words}: {command_again(context)}", err=True)
    if at_once:
        sys.stderr.flush()
        # an ordinary exit would wait for runs that are threads; what they write is whole or not there
        os._exit(130)
    raise typer.Exit(130) from None


def complain(failures: Iterable[str]) -> None:
    """Say what failed, and exit with 2 if anything did."""
    errors = Console(stderr=True)
    lines = [*failures]
    for line in lines:
        # runs are continued by the command that made them, which here is not `xorflow train`
        words = line.replace("continue it with --resume", "give the same command again")
        errors.print(Text.assemble(("error: ", "bold red"), words), soft_wrap=True, highlight=False)
    if lines:
        raise typer.Exit(2)


def failures(outcomes: Iterable[Outcome]) -> list[str]:
    """What became of the runs that failed, a line for each."""
    return [f"{o.job.name}, seed {o.job.options.seed}: {o.error}" for o in outcomes if o.error is not None]


def command_again(context: typer.Context) -> str:
    """What was typed, to be typed again."""
    words = ["python", "-m", "research", str(context.info_name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        for item in value if isinstance(value, list) else [value]:
            flag = [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
            words += flag if item is True else [*flag, str(item)]
    return shlex.join(words)


def show(
    title: str,
    note: str,
    columns: Sequence[str],
    lines: Iterable[Sequence[str]],
    console: Console | None = None,
) -> None:
    """The essence of a table: a row's name, then figures."""
    console = console or Console()
    console.print(title, style="bold")
    console.print(note)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("row", overflow="ellipsis", no_wrap=True)
    for name in columns:
        shown.add_column(name, justify="right", no_wrap=True)
    for name, *cells in lines:
        shown.add_row(Text(name), *cells)
    console.print(shown)


BOUNDS = "Negative log-likelihood of the test data, in nats (lower is better); * is a bound"


def one(value: float | None) -> str:
    """One digit after the point, or a dash."""
    return "-" if value is None else f"{value:.1f}"


def marked(value: float, kind: str) -> str:
    """A likelihood; a star says that it is a bound."""
    return one(value) + (" " if kind == "exact" else "*")
