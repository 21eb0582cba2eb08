"""`python -m research paper`: the paper's table, trained again, ours beside theirs."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console

from research import command
from research.budgets import find_budget
from research.paper.rows import chosen
from research.paper.score import PAPER
from research.paper.table import write_paper
from research.runner import Request

EXAMPLES = """
[bold]Examples[/bold]

python -m research paper --budget smoke --out runs/smoke

python -m research paper --rows ste-1,ste-2 --device cuda --jobs 6

The same command again goes on with what is not finished.
"""


def paper(
    context: typer.Context,
    rows: command.Rows = None,
    seeds: command.Seeds = None,
    budget: command.BudgetName = "full",
    device: command.Device = "auto",
    jobs: command.Jobs = 1,
    out: command.Out = command.RESULTS / "paper",
    work: command.Work = command.WORK / "paper",
) -> None:
    """Train every row of the paper's table, and show its figures beside ours."""
    size, (wanted, references) = find_budget(budget), chosen(rows)
    count = size.seeds if seeds is None else seeds
    request = Request(wanted, references, size, count, out, work, device, jobs, PAPER)
    outcomes = command.train(context, request)
    table = write_paper(out)
    if table["rows"]:
        show_table(table)
    typer.echo(f"results  {out / 'table.md'}\npictures {out / 'curves.png'}, {out / 'samples.png'}")
    command.complain(command.failures(outcomes))


def show_table(table: dict[str, Any], console: Console | None = None) -> None:
    """For each row the paper's figures, ours and improved."""
    lines = []
    for row in table["rows"]:
        cells = [command.one(row["paper"]["nll"]), command.one(row["paper"]["greedy"])]
        for found in (row["ours"], row["improved"]):
            nll = "-" if found is None else command.marked(found["nll"], found["kind"])
            cells += [nll, command.one((found or {}).get("greedy"))]
        lines.append([row["id"], *cells])
    names = ("paper", "greedy", "ours", "greedy", "improved", "greedy")
    command.show(table["words"], command.BOUNDS, names, lines, console)
