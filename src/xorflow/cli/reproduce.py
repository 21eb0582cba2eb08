"""`xorflow reproduce`: the paper's table, trained again, ours beside theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xorflow.cli.experiment import command_again, complain, run_experiment
from xorflow.experiments import BUDGETS, Reproduction, Request, chosen, find_budget
from xorflow.report import write_reproduction

EXAMPLES = """
[bold]Examples[/bold]

xorflow reproduce --budget smoke --out runs/smoke

xorflow reproduce --budget quick --rows ste-1,marginal --jobs 2 --out runs/quick

xorflow reproduce --rows ste-1,ste-2 --device cuda --jobs 6

The same command again goes on with what is not finished.
"""

_DEFAULTS = {
    "budget": "full",
    "device": "auto",
    "jobs": 1,
    "out": Path("results/paper"),
    "work": Path("runs/paper"),
}
_BUDGET_NAMES = ", ".join(budget.name for budget in BUDGETS)


def reproduce(
    rows: Annotated[str | None, typer.Option(help="Rows of the table, with commas; by default all.")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="How many, from 0; by default 3, in smaller budgets fewer.")
    ] = None,
    budget: Annotated[
        str,
        typer.Option(help=f"{_BUDGET_NAMES}: seconds, ten minutes on two cores, about an hour on an H200."),
    ] = "full",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    jobs: Annotated[int, typer.Option(help="How many runs at once.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results/paper"),
    work: Annotated[Path, typer.Option(help="Folder of the runs: weights and checkpoints.")] = Path(
        "runs/paper"
    ),
) -> None:
    """Train every row of the paper's table, and show its figures beside ours."""
    given = {
        "rows": rows, "seeds": seeds, "budget": budget, "device": device, "jobs": jobs, "out": out, "work": work
    }  # fmt: skip
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
    outcomes = run_experiment(Reproduction(request), command_again("reproduce", given, _DEFAULTS))
    table = write_reproduction(out)
    if table["rows"]:
        show_table(Console(), table)
    typer.echo(f"results  {out / 'table.md'}\npictures {out / 'curves.png'}, {out / 'samples.png'}")
    complain(outcomes)


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
