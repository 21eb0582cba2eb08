"""`python -m research depth`: whether depth pays, in orderings on the paper's base and in couplings on a learned one."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console

from research import command
from research.budgets import find_budget
from research.depth.rows import chosen_depths
from research.depth.score import DEPTH
from research.depth.table import write_depth
from research.paper.rows import chosen
from research.runner import Request

EXAMPLES = """
[bold]Examples[/bold]

python -m research depth --budget smoke --rows ar-1-marginal,ar-2-code --out runs/smoke-depth

python -m research depth --rows 'coupling-*-posterior' --device cuda --jobs 4

The same command again goes on with what is not finished.
"""


def depth(
    context: typer.Context,
    rows: command.Rows = None,
    seeds: command.Seeds = None,
    budget: command.BudgetName = "full",
    device: command.Device = "auto",
    jobs: command.Jobs = 1,
    out: command.Out = command.RESULTS / "depth",
    work: command.Work = command.WORK / "depth",
) -> None:
    """Compare flows of growing depth, at equal weights, with the best of depth 1."""
    size, wanted = find_budget(budget), chosen_depths(rows)
    by_row = {row.id: row.seeds if size.name == "full" else 1 for row in wanted}
    count = max(by_row.values()) if seeds is None else seeds
    fewer = by_row if seeds is None else {}
    references = chosen("independent-pixels")[1]
    request = Request(wanted, references, size, count, out, work, device, jobs, DEPTH, fewer)
    outcomes = command.train(context, request)
    table = write_depth(out)
    if table["rows"]:
        show_depths(table)
    typer.echo(f"results  {out / 'table.md'}\npicture  {out / 'depth.png'}")
    command.complain(command.failures(outcomes))


def show_depths(table: dict[str, Any], console: Console | None = None) -> None:
    """For each row its depth, how much of it is used, and its likelihoods."""
    lines = [
        [
            *(row["id"], row["base"], str(row["depth"]), str(row["effective_depth"])),
            *(
                command.marked(row["bound"], row["kind"]),
                command.one(row["greedy"]),
                command.one(row["refit"]),
            ),
        ]
        for row in table["rows"]
    ]
    names = ("base", "depth", "used", "NLL", "greedy", "refitted")
    command.show(table["words"], command.BOUNDS, names, lines, console)
