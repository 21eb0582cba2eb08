"""What the commands share: options, progress, Ctrl-C, what failed, and the command that goes on."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console
from rich.text import Text

from research.budgets import find_budget
from research.experiment import Experiment, Request
from research.results import Record
from research.rows import chosen
from research.runner import Runner
from research.tables import terminal_table
from xorflow.cli.progress import Display, Planned
from xorflow.training import Interrupted, Outcome

RESULTS, WORK = Path("research/results"), Path("runs")

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

BOUNDS = "Negative log-likelihood of the test data, in nats (lower is better); * is a bound"


def command_of(experiment: Experiment) -> Callable[..., None]:
    """The command of an experiment: trains its rows, and shows their figures."""

    def command(
        context: typer.Context,
        rows: Rows = None,
        seeds: Seeds = None,
        budget: BudgetName = "full",
        device: Device = "auto",
        jobs: Jobs = 1,
        out: Out = RESULTS / experiment.name,
        work: Work = WORK / experiment.name,
    ) -> None:
        size, wanted = find_budget(budget, experiment.budgets), chosen(rows, experiment.rows)
        runner = Runner(Request(experiment, wanted, size, out, work, seeds, device, jobs))
        outcomes = carry_out(context, runner)
        show(experiment, experiment.write(out), Console())
        for name in runner.waiting():
            typer.echo(f"{name} waits for the weights of its parts in {work}")
        conclude(out, outcomes)

    command.__doc__ = experiment.summary
    return command


def show(experiment: Experiment, table: Record, console: Console) -> None:
    """The essence of a table: for each row its likelihoods."""
    if table["rows"]:
        console.print(table["description"], style="bold")
        console.print(BOUNDS)
        console.print(terminal_table(experiment.columns, map(experiment.cells, table["rows"])))


class Undertaking(Protocol):
    """Work of many pieces, of which those that are done are kept."""

    @property
    def planned(self) -> Sequence[Planned]: ...

    def run(self, observer: Display) -> Sequence[Outcome]: ...


def carry_out(context: typer.Context, undertaking: Undertaking) -> Sequence[Outcome]:
    """Work with its progress shown; after Ctrl-C, what to type to go on: what was typed, which the context holds."""
    try:
        with Display(Console(stderr=True), undertaking.planned) as display:
            return undertaking.run(display)
    except Interrupted:
        stopped = "stopped and saved; continue with"
    except KeyboardInterrupt:
        stopped = "stopped; continue from the last checkpoints with"
    typer.echo(f"{stopped}: {shlex.join(['python', '-m', 'research', *context.obj])}", err=True)
    raise typer.Exit(130)


def conclude(out: Path, outcomes: Iterable[Outcome]) -> None:
    """Say where the results are and what failed, and exit with 2 if anything did."""
    typer.echo(f"results  {out / 'table.md'}, {out / 'table.json'}")
    pictures = ", ".join(map(str, sorted(out.glob("*.png"))))
    if pictures:
        typer.echo(f"pictures {pictures}")
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        # runs are continued by the command that made them, which here is not `xorflow train`
        error = str(outcome.error).replace("continue it with --resume", "give the same command again")
        print_error(f"{outcome.job.name}, seed {outcome.job.options.seed}: {error}")
    if failed:
        raise typer.Exit(2)


def print_error(text: str) -> None:
    """One line on standard error."""
    line = Text.assemble(("error: ", "bold red"), " ".join(text.split()))
    Console(stderr=True).print(line, soft_wrap=True, highlight=False)
