"""`combine`: finished runs as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xorflow.cli.arguments import Device
from xorflow.training import read_result
from xorflow.training.combine import combine_runs
from xorflow.training.devices import out_of_memory_as_error

EXAMPLES = """
[bold]Examples[/bold]

xorflow train --seeds 0-1 --out runs/both

xorflow combine runs/both/seed-0 runs/both/seed-1 --out runs/mixture

xorflow sample runs/mixture --count 64 --out digits.png
"""


def combine(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of finished runs.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder of the new run, new or empty.", show_default=False)],
    device: Device = "auto",
) -> None:
    """Mix several runs on the same data, such as seeds of one recipe, into one model."""
    with out_of_memory_as_error("use --device cpu, or combine fewer runs"):
        result = combine_runs(runs, out, device)
    if not {"test", "validation"} & result.keys():
        typer.echo("No data were held out, so there is no likelihood to report.")
        return
    results = {str(run): read_result(run) for run in runs} | {str(out): result}
    splits = [split for split in ("test", "validation") if split in result]
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("negative log-likelihood, nats", overflow="fold")
    for split in splits:
        shown.add_column(split, justify="right", no_wrap=True)
    for name, figures in results.items():
        shown.add_row(Text(name), *(f"{figures[split]['nll']:.3f}" for split in splits))
    Console().print(shown)
