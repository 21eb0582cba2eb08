"""`xorflow score`: log p of every row of a file."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from torch import Tensor

from xorflow import evaluate as likelihoods
from xorflow import training
from xorflow._files import write_bytes
from xorflow.cli.runs import (
    NO_ROOM,
    AsJson,
    Device,
    FlowOption,
    Force,
    Memory,
    RunArgument,
    Samples,
    Which,
    check_out,
    chosen_flow,
    parse_bytes,
)
from xorflow.data import load_rows
from xorflow.errors import ConfigError
from xorflow.flows import LatentFlow
from xorflow.training import out_of_memory_as_error


def score(
    run: RunArgument,
    data: Annotated[
        Path, typer.Option(help="A .npy, .npz or .csv file with the run's columns.", show_default=False)
    ],
    out: Annotated[Path | None, typer.Option(help="A .csv or .npy file to write; printed otherwise.")] = None,
    flow: FlowOption = Which.LATENT,
    samples: Samples = 64,
    memory: Memory = None,
    device: Device = "auto",
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """log p of every row of a file, in nats."""
    most = parse_bytes(memory)
    opened = training.open_run(run, device=device)
    if out is not None:
        check_out(out, (".csv", ".npy"), (data, opened.options.data), force)
    if opened.flow.context_features:
        raise ConfigError(
            "score takes data without context, and this run is conditioned on it; use xorflow.load in Python"
        )
    x = load_rows(data, categories=opened.flow.states.sizes, codec=opened.codec, shape=opened.shape)
    chosen = chosen_flow(opened, flow, most)  # may take long, so after all that may be refused
    with out_of_memory_as_error("lower --memory, or score fewer rows at a time"):
        if isinstance(chosen, LatentFlow) and not chosen.has_closed_form:
            log_p = likelihoods.importance(chosen, x, samples=samples, memory=most)
        else:
            log_p = likelihoods.exact(chosen, x, memory=most)
    values = training.require_finite(log_p, str(data)).values.cpu()
    if out is not None:
        _write_scores(out, values)
    if as_json:
        typer.echo(json.dumps(log_p.summary() | {"log_prob": values.tolist()}, allow_nan=False))
    elif out is not None:
        typer.echo(
            f"wrote log p of {len(values)} rows ({log_p.kind}) to {out}; mean {float(values.mean()):.4f} nats"
        )
    else:
        typer.echo("\n".join(f"{value:.6f}" for value in values.tolist()))


def _write_scores(path: Path, values: Tensor) -> None:
    buffer = io.BytesIO()
    if path.suffix.lower() == ".npy":
        np.save(buffer, values.numpy(), allow_pickle=False)
    else:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([["log_prob"], *([repr(v)] for v in values.tolist())])
        buffer.write(text.getvalue().encode())
    write_bytes(path, buffer.getvalue(), NO_ROOM)
