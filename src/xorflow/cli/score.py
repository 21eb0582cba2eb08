"""`xorflow score`: log p of every row of a file."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
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
from xorflow.data.table import extra_columns, open_rows, told
from xorflow.data.tables import Source
from xorflow.errors import ConfigError
from xorflow.evaluate import LogLikelihood
from xorflow.flows import Flow, LatentFlow, Mixture
from xorflow.table_model import TableModel
from xorflow.training import out_of_memory_as_error


def score(
    run: RunArgument,
    data: Annotated[Path, typer.Option(help="A file with the run's columns.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="A .csv or .npy file to write; printed otherwise.")] = None,
    flow: FlowOption = Which.LATENT,
    samples: Samples = 64,
    memory: Memory = None,
    device: Device = "auto",
    as_json: AsJson = False,
    force: Force = False,
    header: Annotated[
        bool | None,
        typer.Option(help="Whether the first line of a text file names its columns.", show_default=False),
    ] = None,
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
    source = None if opened.schema is None else open_rows(opened.schema, data, header)
    x = load_rows(data, categories=opened.flow.states.sizes, shape=opened.shape) if source is None else None
    chosen = chosen_flow(opened, flow, most)  # may take long, so after all that may be refused
    with out_of_memory_as_error("lower --memory"):
        if x is not None:
            more, log_p = {}, _score_array(chosen, x, samples, most)
        else:
            assert opened.schema is not None
            assert source is not None
            more, log_p = _score_table(TableModel(opened.schema, chosen), source, samples, most)
    values = training.require_finite(log_p, str(data)).values.cpu()
    unseen = ", ".join(
        f"{name!r} in {count:,} row{'s' * (count > 1)}" for name, count in more.get("unseen", {}).items()
    )
    if out is not None:
        _write_scores(out, values)
    if source is not None and opened.schema is not None:
        for line in extra_columns(opened.schema, source):
            typer.echo(line, err=True)
    if as_json:
        typer.echo(json.dumps(log_p.summary() | more | {"log_prob": values.tolist()}, allow_nan=False))
    elif out is not None:
        mean = f"mean {float(values.mean()):.4f} nats"
        typer.echo(f"wrote log p of {len(values)} rows ({log_p.kind}) to {out}; {mean}")
        typer.echo("".join(f"{line}\n" for line in _measures(more.get("measures", {}))), nl=False)
    else:
        typer.echo("\n".join(f"{value:.6f}" for value in values.tolist()))
    if unseen and not as_json:
        typer.echo(f"with something that no training row has: {unseen}", err=out is None)


def _measures(by_column: Mapping[str, str]) -> list[str]:
    """What log p is of, in a line for each measure, where it is not a mass alone."""
    columns: dict[str, list[str]] = {}
    for name, measure in by_column.items():
        columns.setdefault(measure, []).append(name)
    if len(columns.keys() - {"mass"}) == 0:
        return []
    return [f"{measure}: {_list(names)}" for measure, names in columns.items()]


def _list(names: Sequence[str], most: int = 10) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def _score_array(
    flow: Flow | LatentFlow | Mixture, x: Tensor, samples: int, memory: int | None
) -> LogLikelihood:
    if isinstance(flow, LatentFlow) and not flow.has_closed_form:
        return likelihoods.importance(flow, x, samples=samples, memory=memory)
    return likelihoods.exact(flow, x, memory=memory)


def _score_table(
    model: TableModel, source: Source, samples: int, memory: int | None
) -> tuple[dict[str, Any], LogLikelihood]:
    """Scores of rows that are read batch by batch; of what measures they are densities, and what rows have never been seen."""
    values, kind, unseen = [], "exact", Counter()
    with told(source.label):
        for batch in source.batches(model.schema.names):
            scores = model.score(batch, samples=samples, memory=memory)
            values.append(torch.from_numpy(scores.values))
            unseen.update(scores.unseen)
            kind = scores.kind
    features = len(model.schema.columns)
    log_p = LogLikelihood(torch.cat(values), kind, features, None if kind == "exact" else samples)
    return {"measures": model.measures, "unseen": dict(unseen)}, log_p


def _write_scores(path: Path, values: Tensor) -> None:
    buffer = io.BytesIO()
    if path.suffix.lower() == ".npy":
        np.save(buffer, values.numpy(), allow_pickle=False)
    else:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([["log_prob"], *([repr(v)] for v in values.tolist())])
        buffer.write(text.getvalue().encode())
    write_bytes(path, buffer.getvalue(), NO_ROOM)
