"""`xorflow recipes`: the named sets of options that `xorflow train --recipe` takes."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xorflow.training.recipes import RECIPES, Recipe

EXAMPLES = """
[bold]Examples[/bold]

xorflow recipes

xorflow recipes --json

xorflow train --recipe transformer-pair --out runs/strong
"""


def recipes(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all options.")] = False,
) -> None:
    """Named sets of options: what each is for, and what to expect of it."""
    if as_json:
        typer.echo(json.dumps([recipe.to_json() for recipe in RECIPES.values()], indent=2))
        return
    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("recipe", "data"):
        table.add_column(column, no_wrap=True)
    for column in ("images", "minutes", "nats"):
        table.add_column(column, no_wrap=True, justify="right")
    table.add_column("what it is")
    for recipe in RECIPES.values():
        table.add_row(
            recipe.label, recipe.data, *_expected(recipe), Text(f"{recipe.summary} For {recipe.machine}.")
        )
    console.print(table)
    console.print(
        "nats: the exact NLL of test images after training on so many images. By default 10,000 validate, and 50,000 are left; "
        "validation=0 trains on all 60,000."
    )


def _expected(recipe: Recipe) -> tuple[str, str, str]:
    minutes = "-" if recipe.minutes is None else f"{recipe.minutes:.1f}"
    return f"{recipe.images:,}", minutes, "-" if recipe.nll is None else f"{recipe.nll:.2f}"
