"""`xorflow evaluate`: the likelihoods of a finished run."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from xorflow import training
from xorflow.cli.arguments import AsJson, Device, Memory, RunArgument, Samples, check_samples, parse_bytes
from xorflow.training import out_of_memory_as_error

EXAMPLES = """
[bold]Examples[/bold]

xorflow evaluate runs/demo

xorflow evaluate runs/deep --samples 1000 --json
"""


def evaluate(
    run: RunArgument,
    samples: Samples = 64,
    memory: Memory = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """The likelihoods of a run on its test and validation data, each with what it is."""
    check_samples(samples)
    most = parse_bytes(memory)
    opened = training.open_run(run, device=device)
    dataset = opened.data().to(opened.flow.device)
    with out_of_memory_as_error("lower --memory, or use --device cpu"):
        splits = training.report(opened.flow, dataset, samples, ("test", "validation"), memory=most)
    training.complete_result(run, splits)
    if as_json:
        typer.echo(json.dumps(splits | {"data": dataset.describe()}, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("nats")
    for split in splits:
        table.add_column(split, justify="right")
    figures = [_figures(row) for row in splits.values()]
    for name in figures[0] if figures else ():
        table.add_row(name, *(column[name] for column in figures))
    Console().print(table if figures else "No data were held out, so there is no likelihood to report.")


def _figures(row: dict[str, Any]) -> dict[str, str]:
    """One split's likelihoods by what they are."""
    stderr = "" if row["stderr"] is None else f" ± {row['stderr']:.3f}"
    kind = "exact" if row["kind"] == "exact" else f"bound, {row['samples']} samples"
    return {
        "negative log-likelihood": f"{row['nll']:.3f}{stderr}",
        "  which is": kind,
        "  bits per dimension": f"{row['bits_per_dim']:.4f}",
        "deterministic flow": f"{row['greedy_nll']:.3f}",
        "  with its base refitted": f"{row['refit_nll']:.3f}",
        "least that the base allows": f"{row['floor']:.3f}",
        "rows": f"{row['rows']:,}",
    }
