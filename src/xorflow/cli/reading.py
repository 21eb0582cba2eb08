"""`evaluate`, `sample` and `score`: what is done with a finished run."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from xorflow import evaluate as likelihoods
from xorflow import training
from xorflow.cli.images import save_image_grid
from xorflow.data import load_rows, write_rows
from xorflow.errors import ConfigError
from xorflow.flows import Flow, LatentFlow, Mixture
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

xorflow sample runs/demo --flow refitted --out bijection.png
"""
SCORE_EXAMPLES = """
[bold]Examples[/bold]

xorflow score runs/people --data new.csv --out scores.csv

xorflow score runs/demo --data images.npy --json
"""

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Memory = Annotated[
    str | None,
    typer.Option(
        help="About what a pass, or importance samples, may take at a time beside model and data, such as 500MB.",
        show_default=False,
    ),
]
Which = Annotated[
    str,
    typer.Option(
        help="latent; deterministic (the most probable bijection); or refitted, the same on a base fitted to it by a pass "
        "over the training data."
    ),
]


def evaluate(
    run: RunArgument,
    samples: Annotated[
        int, typer.Option(help="Importance samples, where there is no exact likelihood.")
    ] = 64,
    memory: Memory = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """The likelihoods of a run on its test and validation data, each with what it is."""
    _check_samples(samples)
    most = parse_bytes(memory)
    opened = training.open_run(run, device=device)
    dataset = opened.data().to(opened.flow.device)
    with out_of_memory_as_error("lower --memory, or use --device cpu"):
        splits = training.report(opened.flow, dataset, samples, ("test", "validation"), memory=most)
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


def sample(
    run: RunArgument,
    count: Annotated[int, typer.Option("--count", "-n", help="How many.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A .png (images), .npy or .csv file to write.")] = None,
    flow: Which = "latent",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Draw new rows from a run."""
    if count < 1:
        raise ConfigError(f"--count is at least 1; got {count}")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed is at least 0 and below 2^63; got {seed}")
    opened = training.open_run(run, device=device)
    if out is not None:
        _check_suffix(out, (".npy", ".csv", ".png") if _is_image(opened) else (".npy", ".csv"))
    chosen = _chosen(opened, flow)
    with out_of_memory_as_error("lower --count"):
        x = draw(chosen, count, seed)
    if out is not None:
        _write(out, x, opened)
    if as_json:
        typer.echo(json.dumps(x.tolist() if opened.codec is None else opened.codec.decode(x.numpy())))
    elif out is None:
        typer.echo(f"wrote {_write_new(x, opened)}")
    else:
        typer.echo(f"wrote {out}")


def score(
    run: RunArgument,
    data: Annotated[
        Path, typer.Option(help="A .npy, .npz or .csv file with the run's columns.", show_default=False)
    ],
    out: Annotated[Path | None, typer.Option(help="A .csv or .npy file to write; printed otherwise.")] = None,
    flow: Which = "latent",
    samples: Annotated[
        int, typer.Option(help="Importance samples, where there is no exact likelihood.")
    ] = 64,
    memory: Memory = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """log p of every row of a file, in nats."""
    _check_samples(samples)
    most = parse_bytes(memory)
    if out is not None:
        _check_suffix(out, (".csv", ".npy"))
    opened = training.open_run(run, device=device)
    if opened.flow.context_features:
        raise ConfigError(
            "score takes data without context, and this run is conditioned on it; use xorflow.load in Python"
        )
    x = load_rows(data, categories=opened.flow.states.sizes, codec=opened.codec, shape=opened.shape)
    chosen = _chosen(opened, flow, most)  # may take long, so after all that may be refused
    with out_of_memory_as_error("lower --memory, or score fewer rows at a time"):
        if isinstance(chosen, LatentFlow) and not chosen.has_closed_form:
            log_p = likelihoods.importance(chosen, x, samples=samples, memory=most)
        else:
            log_p = likelihoods.exact(chosen, x, memory=most)
    values = log_p.values.cpu()
    if out is not None:
        _write_scores(out, values)
    if as_json:
        typer.echo(json.dumps(log_p.summary() | {"log_prob": values.tolist()}))
    elif out is not None:
        typer.echo(
            f"wrote log p of {len(values)} rows ({log_p.kind}) to {out}; mean {float(values.mean()):.4f} nats"
        )
    else:
        typer.echo("\n".join(f"{value:.6f}" for value in values.tolist()))


def draw(flow: Flow | LatentFlow | Mixture, count: int, seed: int) -> Tensor:
    """Samples on the CPU; a flow with labels gets one label after the other."""
    generator = torch.Generator(flow.device).manual_seed(seed)
    if not flow.context_features:
        return flow().sample((count,), generator=generator).cpu()
    labels = torch.arange(count, device=flow.device) % flow.context_features
    context = torch.nn.functional.one_hot(labels, flow.context_features)
    return flow(context).sample((), generator=generator).cpu()


def write_samples(folder: Path, count: int, seed: int) -> Path:
    """Samples of a finished run, in the form that suits the data, beside its other files."""
    trained_on = training.read_result(folder)["device"]
    on_gpu = (
        trained_on.startswith("cuda") and torch.cuda.is_available()
    )  # large networks take a minute on a CPU
    opened = training.open_run(folder, device=trained_on if on_gpu else "cpu")
    path = folder / _natural_name(opened)
    _write(path, draw(opened.flow, count, seed), opened)
    return path


def _write_new(x: Tensor, opened: Run) -> Path:
    """Samples in this folder, under a name that is free: nobody asked to replace a file."""
    first = Path(_natural_name(opened))
    names = (first.with_stem(f"{first.stem}-{n}") if n > 1 else first for n in range(1, 10_000))
    path = next(name for name in names if not name.exists())
    _write(path, x, opened)
    return path


def _natural_name(opened: Run) -> str:
    """A picture of images, a table where categories have names, an array otherwise."""
    if _is_image(opened):
        return "samples.png"
    return "samples.npy" if opened.codec is None else "samples.csv"


def _is_image(opened: Run) -> bool:
    return opened.shape is not None and len(opened.shape) == 2


def _write(path: Path, x: Tensor, opened: Run) -> None:
    if path.suffix.lower() == ".png" and opened.shape is not None:
        save_image_grid(path, x.numpy(), opened.shape, opened.flow.states.width)
    else:
        write_rows(path, x, opened.codec)


def _write_scores(path: Path, values: Tensor) -> None:
    buffer = io.BytesIO()
    if path.suffix.lower() == ".npy":
        np.save(buffer, values.numpy(), allow_pickle=False)
    else:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([["log_prob"], *([repr(v)] for v in values.tolist())])
        buffer.write(text.getvalue().encode())
    write_bytes(path, buffer.getvalue(), "choose a folder that can be written and has room")


def _check_suffix(path: Path, allowed: tuple[str, ...]) -> None:
    if path.suffix.lower() not in allowed:
        raise ConfigError(f"--out is a {' or '.join(allowed)} file for this run; got {path.name!r}")


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def parse_bytes(text: str | None) -> int | None:
    """A number of bytes, as a person writes it.

    >>> parse_bytes("1.5 GB"), parse_bytes("500MB"), parse_bytes(None)
    (1500000000, 500000000, None)
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise ConfigError(f"--memory is a number of bytes, such as 500MB or 2GB; got {text!r}")
    return size


def _check_samples(samples: int) -> None:
    if samples < 1:
        raise ConfigError(f"--samples is at least 1; got {samples}")


_FLOWS = ("latent", "deterministic", "refitted")


def _chosen(opened: Run, flow: str, memory: int | None = None) -> Flow | LatentFlow | Mixture:
    if flow not in _FLOWS:
        raise ConfigError(f"--flow is one of {', '.join(_FLOWS)}; got {flow!r}")
    if flow == "latent":
        return opened.flow
    if flow == "deterministic":
        return opened.flow.greedy()
    train = opened.data().to(opened.flow.device).train
    with (
        Console(stderr=True).status("fitting the base to the training data ..."),
        out_of_memory_as_error("use --device cpu"),
    ):
        return training.refitted(opened.flow, train, memory=memory)
