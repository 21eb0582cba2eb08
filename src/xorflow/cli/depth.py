"""`xorflow depth`: whether depth pays, in orderings on the paper's base and in couplings on a learned one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xorflow.cli.experiment import command_again, complain, run_experiment
from xorflow.experiments import BUDGETS, DEPTH, Reproduction, Request, chosen, chosen_depths, find_budget
from xorflow.report import write_depth

EXAMPLES = """
[bold]Examples[/bold]

xorflow depth --budget smoke --rows ar-1-marginal,ar-2-code --out runs/smoke-depth

xorflow depth --rows 'coupling-*-posterior' --device cuda --jobs 4

The same command again goes on with what is not finished.
"""

_BUDGET_NAMES = ", ".join(budget.name for budget in BUDGETS)
_DEFAULTS = {
    "budget": "full",
    "device": "auto",
    "jobs": 1,
    "out": Path("results/depth"),
    "work": Path("runs/depth"),
}


def depth(
    rows: Annotated[
        str | None, typer.Option(help="Rows, with commas; * stands for any letters. By default all.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="How many, from 0; by default 3 in the rows that decide, 1 elsewhere, in smaller budgets 1."
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(help=f"{_BUDGET_NAMES}: seconds a row, a minute a row on two cores, or a GPU's work."),
    ] = "full",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    jobs: Annotated[int, typer.Option(help="How many runs at once.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results/depth"),
    work: Annotated[Path, typer.Option(help="Folder of the runs: weights and checkpoints.")] = Path(
        "runs/depth"
    ),
) -> None:
    """Compare flows of growing depth, at equal weights, with the best of depth 1."""
    given = {
        "rows": rows, "seeds": seeds, "budget": budget, "device": device, "jobs": jobs, "out": out, "work": work
    }  # fmt: skip
    size, wanted = find_budget(budget), chosen_depths(rows)
    by_row = {row.id: row.seeds if size.name == "full" else 1 for row in wanted}
    request = Request(
        rows=wanted,
        references=chosen("independent-pixels")[1],
        budget=size,
        seeds=max(by_row.values()) if seeds is None else seeds,
        out=out,
        work=work,
        device=device,
        workers=jobs,
        experiment=DEPTH,
        fewer=by_row if seeds is None else {},
    )
    outcomes = run_experiment(Reproduction(request), command_again("depth", given, _DEFAULTS))
    table = write_depth(out)
    if table["rows"]:
        show_depths(Console(), table)
    typer.echo(f"results  {out / 'table.md'}\npicture  {out / 'depth.png'}")
    complain(outcomes)


def show_depths(console: Console, table: dict[str, Any]) -> None:
    """The essence of the table: for each row its depth, how much of it is used, and its likelihoods."""
    console.print(table["words"], style="bold")
    console.print("Negative log-likelihood of the test data, in nats (lower is better); * is a bound")
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("row", overflow="ellipsis", no_wrap=True)
    for name in ("base", "depth", "used", "NLL", "greedy", "refitted"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in table["rows"]:
        bound = f"{row['bound']:.1f}" + (" " if row["kind"] == "exact" else "*")
        shown.add_row(
            Text(row["id"]),
            row["base"],
            str(row["depth"]),
            str(row["effective_depth"]),
            bound,
            f"{row['greedy']:.1f}",
            f"{row['refit']:.1f}",
        )
    console.print(shown)
