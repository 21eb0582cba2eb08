"""What a person sees of a table: how it was read and, at the end of a run of the recipe auto, what was reached, by column."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xorflow.cli.runs import plain_table, say
from xorflow.data import Dataset
from xorflow.training.folder import reported_part

_MOST_COLUMNS = 12
"""So many columns are shown, those first where the model is better than independence by most."""
_MOST_SHOWN = 6
"""So many columns of rows."""


def show_data(console: Console, dataset: Dataset) -> None:
    """How a table was read: what each column is, and what happens to it."""
    if dataset.schema is None:
        return
    say(console, *dataset.notes, "", str(dataset.schema), "")


def show_auto(console: Console, folder: Path, result: Mapping[str, Any], samples: Path) -> None:
    """The end of a run: exact likelihoods beside simpler models, columns, and what was chosen and why."""
    part = str(reported_part(result))
    figures, record = result[part], result["auto"]
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    stderr = "" if figures["stderr"] is None else f"± {figures['stderr']:.3f}"
    for name, nll, error in (
        ("this model", figures["nll"], stderr),
        ("Chow-Liu tree", result["chow_liu_nll"], ""),
        ("independent columns", result["independent_nll"], ""),
    ):
        if nll is not None:
            table.add_row(name, f"{nll:.3f}", error)
    console.print(
        f"Negative log-likelihood of the {part} data, exact, in nats (lower is better)", style="bold"
    )
    console.print(table, "", _columns(result["columns"]), "", _rows(result, part), "", sep="\n")
    kinds = ", ".join(f"{kind} by {weight:.2f}" for kind, weight in record["kinds"].items())
    orders = ", ".join(f"{order} {weight:.2f}" for order, weight in record["weights"].items())
    say(
        console,
        f"logits     {kinds}",
        f"orderings  {orders}; {record['ends']}",
        *(f"because    {reason}" for reason in record["reasons"]),
        f"time       {result['seconds']:.1f} s on {result['device']}",
        f"again      --set orderings={record['orderings']} makes the same model",
        f"run        {folder}",
        f"samples    {samples}",
    )


def _columns(columns: list[Mapping[str, Any]]) -> Table:
    """Bits by column, the greatest gain first."""
    table = plain_table("column", "bits given those before it", "alone", "gain")
    ranked = sorted(columns, key=lambda column: column["bits"] - column["independent_bits"])
    for column in ranked[:_MOST_COLUMNS]:
        gain = column["independent_bits"] - column["bits"]
        table.add_row(
            column["column"], f"{column['bits']:.3f}", f"{column['independent_bits']:.3f}", f"{gain:+.3f}"
        )
    if len(ranked) > _MOST_COLUMNS:
        table.add_row(f"{len(ranked) - _MOST_COLUMNS} more in result.json", "", "", "")
    return table


def _rows(result: Mapping[str, Any], part: str) -> Table:
    """Rows of samples beside rows of data, of the first columns."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rows")
    for column in result["columns"][:_MOST_SHOWN]:
        table.add_column(column["column"], overflow="ellipsis", no_wrap=True)
    for name, rows in result["rows"].items():
        for number, row in enumerate(rows):
            label = {"data": f"{part} data", "samples": "samples"}[name]
            table.add_row("" if number else label, *map(Text, row[:_MOST_SHOWN]))
    return table
