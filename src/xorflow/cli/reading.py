"""`evaluate`, `sample` and `score`: what is done with a finished run."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from xorflow import evaluate as likelihoods
from xorflow import training
from xorflow.data import load_rows, write_rows
from xorflow.errors import ConfigError
from xorflow.flows import Flow, LatentFlow
from xorflow.report import save_image_grid
from xorflow.training import Run
from xorflow.training.devices import out_of_memory_as_error
from xorflow.training.storage import write_bytes

EVALUATE_EXAMPLES = """
[bold]Examples[/bold]

xorflow evaluate runs/demo

xorflow evaluate runs/deep --samples 1000 --json
"""
SAMPLE_EXAMPLES = """
[bold]Examples[/bold]

xorflow sample runs/demo --count 64 --out digits.png

xorflow sample runs/people --count 1000 --out people.csv
"""
SCORE_EXAMPLES = """
[bold]Examples[/bold]

xorflow score runs/people --data new.csv --out scores.csv

xorflow score runs/demo --data images.npy --json
"""

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Reading = Annotated[str, typer.Option(help="latent, or deterministic (the most probable bijection).")]


def evaluate(
    run: RunArgument,
    samples: Annotated[int, typer.Option(help="Importance samples, where there is no exact likelihood.")] = 64,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """The likelihoods of a run on its test and validation data, each with what it is."""
    opened = training.open_run(run, device=device)
    dataset = training.build_data(opened.options).to(opened.flow.device)
    if samples < 1:
        raise ConfigError(f"--samples is at least 1; got {samples}")
    with out_of_memory_as_error("use --device cpu"):
        found = training.report(opened.flow, dataset, samples, ("test", "validation"))
    if as_json:
        typer.echo(json.dumps(found | {"data": dataset.describe()}, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("part", "rows", "NLL (nats)", "kind", "bits/dim", "deterministic", "refitted", "floor"):
        table.add_column(column, justify="left" if column in ("part", "kind") else "right")
    for part, row in found.items():
        table.add_row(
            part,
            f"{row['rows']:,}",
            f"{row['nll']:.3f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.3f}"),
            row["kind"] if row["kind"] == "exact" else f"bound, {row['samples']} samples",
            f"{row['bits_per_dim']:.4f}",
            f"{row['greedy_nll']:.3f}",
            f"{row['refit_nll']:.3f}",
            f"{row['floor']:.3f}",
        )
    Console().print(table)


def sample(
    run: RunArgument,
    count: Annotated[int, typer.Option("--count", "-n", help="How many.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A .png (images), .npy or .csv file to write.")] = None,
    reading: Reading = "latent",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Draw new rows from a run."""
    if count < 1:
        raise ConfigError(f"--count is at least 1; got {count}")
    opened = training.open_run(run, device=device)
    with out_of_memory_as_error("lower --count"):
        x = draw(_reading(opened, reading), count, seed)
    if out is not None:
        _write(out, x, opened)
    if as_json:
        typer.echo(json.dumps(x.tolist() if opened.codec is None else opened.codec.decode(x.numpy())))
    elif out is None:
        typer.echo(f"wrote {write_samples(opened, Path.cwd(), count, seed, x)}")
    else:
        typer.echo(f"wrote {out}")


def score(
    run: RunArgument,
    data: Annotated[Path, typer.Option(help="A .npy, .npz or .csv file with the run's columns.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="A .csv or .npy file to write; printed otherwise.")] = None,
    reading: Reading = "latent",
    samples: Annotated[int, typer.Option(help="Importance samples, where there is no exact likelihood.")] = 64,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """log p of every row of a file, in nats."""
    opened = training.open_run(run, device=device)
    if opened.flow.context_features:
        raise ConfigError("score takes data without context, and this run is conditioned on labels; use xorflow.load in Python")
    flow = _reading(opened, reading)
    x = load_rows(data, categories=opened.flow.states.sizes, codec=opened.codec, shape=opened.shape)
    with out_of_memory_as_error("score fewer rows at a time"):
        if isinstance(flow, LatentFlow) and not flow.has_closed_form:
            found = likelihoods.importance(flow, x, samples=samples)
        else:
            found = likelihoods.exact(flow, x)
    values = found.values.cpu()
    if out is not None:
        _write_scores(out, values)
    if as_json:
        typer.echo(json.dumps(found.summary() | {"log_prob": values.tolist()}))
    elif out is not None:
        typer.echo(f"wrote log p of {len(values)} rows ({found.kind}) to {out}; mean {float(values.mean()):.4f} nats")
    else:
        typer.echo("\n".join(f"{value:.6f}" for value in values.tolist()))


def draw(flow: Flow | LatentFlow, count: int, seed: int) -> Tensor:
    """Samples on the CPU; a flow with labels gets each label in turn."""
    generator = torch.Generator(flow.device).manual_seed(seed)
    if not flow.context_features:
        return flow().sample((count,), generator=generator).cpu()
    labels = torch.arange(count, device=flow.device) % flow.context_features
    context = torch.nn.functional.one_hot(labels, flow.context_features)
    return flow(context).sample((), generator=generator).cpu()


def write_samples(opened: Run, folder: Path, count: int, seed: int, x: Tensor | None = None) -> Path:
    """`samples.png` for images, `samples.csv` where categories have names, `samples.npy` otherwise."""
    x = draw(opened.flow, count, seed) if x is None else x
    if opened.shape is not None and len(opened.shape) == 2:
        path = folder / "samples.png"
    else:
        path = folder / ("samples.npy" if opened.codec is None else "samples.csv")
    _write(path, x, opened)
    return path


def _write(path: Path, x: Tensor, opened: Run) -> None:
    if path.suffix == ".png":
        if opened.shape is None or len(opened.shape) != 2:
            raise ConfigError("a .png needs data with the shape of an image, which this run's have not; write .npy or .csv")
        save_image_grid(path, x.numpy(), opened.shape, opened.flow.states.width)
    else:
        write_rows(path, x, opened.codec)


def _write_scores(path: Path, values: Tensor) -> None:
    buffer = io.BytesIO()
    if path.suffix == ".npy":
        np.save(buffer, values.numpy())
    elif path.suffix == ".csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([["log_prob"], *([repr(v)] for v in values.tolist())])
        buffer.write(text.getvalue().encode())
    else:
        raise ConfigError(f"--out is a .csv or .npy file; got {path.name!r}")
    write_bytes(path, buffer.getvalue())


def _reading(opened: Run, reading: str) -> Flow | LatentFlow:
    if reading not in ("latent", "deterministic"):
        raise ConfigError(f"--reading is latent or deterministic; got {reading!r}")
    return opened.flow if reading == "latent" else opened.flow.greedy()

