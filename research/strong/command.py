"""`python -m research strong`: recipes with strong conditioners, trained and evaluated as they are reported."""

from __future__ import annotations

import typer

from research import command
from research.budgets import find_budget
from research.runner import Request
from research.strong.rows import STRONG_BUDGETS, chosen_strong
from research.strong.score import STRONG, mix_rows
from research.strong.table import write_strong

EXAMPLES = """
[bold]Examples[/bold]

python -m research strong --budget smoke --out runs/smoke-strong

python -m research strong --rows recurrent,made-strong --device cuda

The same command again goes on with what is not finished.
"""


def strong(
    context: typer.Context,
    rows: command.Rows = None,
    seeds: command.Seeds = None,
    budget: command.BudgetName = "full",
    device: command.Device = "auto",
    jobs: command.Jobs = 1,
    out: command.Out = command.RESULTS / "strong",
    work: command.Work = command.WORK / "strong",
) -> None:
    """Train the recipes with strong conditioners, and report their exact likelihoods."""
    size, (trained, mixed) = find_budget(budget, STRONG_BUDGETS), chosen_strong(rows)
    by_row = {row.id: row.seeds for row in trained}
    count = max(by_row.values(), default=1) if seeds is None else seeds
    fewer = by_row if seeds is None else {}
    outcomes = command.train(
        context, Request(trained, (), size, count, out, work, device, jobs, STRONG, fewer)
    )
    write_strong(out)  # what is trained is safe, whatever becomes of the mixtures
    waiting = mix_rows(mixed, size, out, work, device)
    table = write_strong(out)
    if table["rows"]:
        keys = ("nll", "train_nll", "refit")
        lines = [
            [row["id"], *(f"{row[key]:.2f}" for key in keys), f"{row['seconds'] / 60:.2f}"]
            for row in table["rows"]
        ]
        note = "Exact negative log-likelihood of the test data, in nats (lower is better)"
        command.show(table["words"], note, ("NLL", "training", "refitted", "minutes"), lines)
    for name in waiting:
        typer.echo(f"{name} waits for the weights of its parts in {work}")
    typer.echo(f"results  {out / 'table.md'}")
    if (out / "samples.png").exists():
        typer.echo(f"picture  {out / 'samples.png'}")
    command.complain(command.failures(outcomes))
