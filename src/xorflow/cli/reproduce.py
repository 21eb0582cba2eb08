"""`xorflow reproduce`: the paper's table, trained again, ours beside theirs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xorflow.cli.reproduce_display import ReproductionDisplay
from xorflow.experiments import BUDGETS, Reproduction, Request, chosen, find_budget
from xorflow.report import write_reproduction
from xorflow.training import Interrupted, Outcome

EXAMPLES = """
[bold]Examples[/bold]

xorflow reproduce --budget smoke --out runs/smoke

xorflow reproduce --budget quick --rows ste-1,marginal --jobs 2 --out runs/quick

xorflow reproduce --rows ste-1,ste-2 --device cuda --jobs 6

The same command again goes on with what is not finished.
"""

_BUDGET_NAMES = ", ".join(budget.name for budget in BUDGETS)


def reproduce(
    rows: Annotated[str | None, typer.Option(help="Rows of the table, with commas; by default all.")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="How many, from 0; by default 3, in smaller budgets fewer.")
    ] = None,
    budget: Annotated[
        str, typer.Option(help=f"{_BUDGET_NAMES}: seconds, ten minutes on two cores, hours on a GPU.")
    ] = "full",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    jobs: Annotated[int, typer.Option(help="How many runs at once.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results/paper"),
    work: Annotated[Path, typer.Option(help="Folder of the runs: weights and checkpoints.")] = Path(
        "runs/paper"
    ),
) -> None:
    """Train every row of the paper's table, and show its figures beside ours."""
    again = _again(rows=rows, seeds=seeds, budget=budget, device=device, jobs=jobs, out=out, work=work)
    size = find_budget(budget)
    wanted, references = chosen(rows)
    request = Request(
        rows=wanted,
        references=references,
        budget=size,
        seeds=size.seeds if seeds is None else seeds,
        out=out,
        work=work,
        device=device,
        workers=jobs,
    )
    outcomes = _run(Reproduction(request), again)
    table = write_reproduction(out)
    if table["rows"]:
        show_table(Console(), table)
    typer.echo(f"results  {out / 'table.md'}\npictures {out / 'curves.png'}, {out / 'samples.png'}")
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    _complain(failed)
    if failed:
        raise typer.Exit(2)


def _run(reproduction: Reproduction, again: str) -> list[Outcome]:
    display = ReproductionDisplay(Console(stderr=True), reproduction.planned)
    try:
        with display:
            return reproduction.run(display)
    except Interrupted:
        typer.echo(f"stopped and saved; continue with: {again}", err=True)
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        typer.echo(f"stopped; continue from the last checkpoints with: {again}", err=True)
        if display.stopping:
            sys.stderr.flush()
            # an ordinary exit would wait for runs that are threads; what they write is whole or not there
            os._exit(130)
        raise typer.Exit(130) from None


def _complain(failed: Sequence[Outcome]) -> None:
    errors = Console(stderr=True)
    for outcome in failed:
        # runs are continued by the command that made them, which here is not `xorflow train`
        reason = (outcome.error or "").replace("continue it with --resume", "give the same command again")
        words = f"{outcome.job.name}, seed {outcome.job.options.seed}: {reason}"
        errors.print(Text.assemble(("error: ", "bold red"), words), soft_wrap=True, highlight=False)


def _again(**given: Any) -> str:
    """What to type to go on; what has its default is left out."""
    defaults = {
        "budget": "full",
        "device": "auto",
        "jobs": 1,
        "out": Path("results/paper"),
        "work": Path("runs/paper"),
    }
    words = ["xorflow", "reproduce"]
    for name, value in given.items():
        if value is not None and defaults.get(name) != value:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def show_table(console: Console, table: dict[str, Any]) -> None:
    """The essence of the table: for each row the paper's figures, ours and cured."""
    console.print(table["words"], style="bold")
    console.print("Negative log-likelihood of the test data, in nats (lower is better); * is a bound")
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("row", overflow="ellipsis", no_wrap=True)
    for name in ("paper", "greedy", "ours", "greedy", "cured", "greedy"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in table["rows"]:
        cells = [_number(row["paper"]["nll"]), _number(row["paper"]["greedy"])]
        for found in (row["ours"], row["cured"]):
            cells += [_nll(found), _number((found or {}).get("greedy"))]
        shown.add_row(Text(row["id"]), *cells)
    console.print(shown)


def _nll(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return _number(found["nll"]) + (" " if found["kind"] == "exact" else "*")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
