"""`xorflow strong`: recipes with strong conditioners, trained and evaluated as they are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xorflow.cli.experiment import command_again, complain, run_experiment
from xorflow.experiments import Reproduction, Request
from xorflow.experiments.strong import (
    STRONG,
    STRONG_BUDGETS,
    chosen_strong,
    find_strong_budget,
    mix_rows,
)
from xorflow.report import write_strong

EXAMPLES = """
[bold]Examples[/bold]

xorflow strong --budget smoke --out runs/smoke-strong

xorflow strong --rows recurrent,made-strong --device cuda

The same command again goes on with what is not finished.
"""

_BUDGET_NAMES = ", ".join(budget.name for budget in STRONG_BUDGETS)
_DEFAULTS = {
    "budget": "full",
    "device": "auto",
    "jobs": 1,
    "out": Path("results/strong"),
    "work": Path("runs/strong"),
}


def strong(
    rows: Annotated[str | None, typer.Option(help="Rows of the table, with commas; by default all.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many, from 0; by default as each row says.")] = None,
    budget: Annotated[
        str, typer.Option(help=f"{_BUDGET_NAMES}: seconds, minutes, or a GPU's work.")
    ] = "full",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    jobs: Annotated[int, typer.Option(help="How many runs at once.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results/strong"),
    work: Annotated[Path, typer.Option(help="Folder of the runs: weights and checkpoints.")] = Path(
        "runs/strong"
    ),
) -> None:
    """Train the recipes with strong conditioners, and report their exact likelihoods."""
    given = {
        "rows": rows, "seeds": seeds, "budget": budget, "device": device, "jobs": jobs, "out": out, "work": work
    }  # fmt: skip
    size, (trained, mixed) = find_strong_budget(budget), chosen_strong(rows)
    by_row = {row.id: row.seeds for row in trained}
    request = Request(
        rows=trained,
        references=(),
        budget=size,
        seeds=max(by_row.values(), default=1) if seeds is None else seeds,
        out=out,
        work=work,
        device=device,
        workers=jobs,
        experiment=STRONG,
        fewer=by_row if seeds is None else {},
    )
    outcomes = run_experiment(Reproduction(request), command_again("strong", given, _DEFAULTS))
    write_strong(out)  # what is trained is safe, whatever becomes of the mixtures
    waiting = mix_rows(mixed, size, out, work, device)
    table = write_strong(out)
    if table["rows"]:
        show_strong(Console(), table)
    for name in waiting:
        typer.echo(f"{name} waits for the weights of its parts in {work}")
    typer.echo(f"results  {out / 'table.md'}")
    if (out / "samples.png").exists():
        typer.echo(f"picture  {out / 'samples.png'}")
    complain(outcomes)


def show_strong(console: Console, table: dict[str, Any]) -> None:
    """The essence of the table: for each row its likelihoods."""
    console.print(table["words"], style="bold")
    console.print("Exact negative log-likelihood of the test data, in nats (lower is better)")
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("row", overflow="ellipsis", no_wrap=True)
    for name in ("NLL", "training", "refitted", "minutes"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in table["rows"]:
        figures = (row["nll"], row["train_nll"], row["refit"], row["seconds"] / 60)
        shown.add_row(Text(row["id"]), *(f"{value:.2f}" for value in figures))
    console.print(shown)
