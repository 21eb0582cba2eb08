"""`xorflow score`: log p of every row of a file."""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer
from torch import Tensor

from xorflow import training
from xorflow._files import new_file
from xorflow.batch import Scorer
from xorflow.cli.parts import (
    IN_A_FOLDER,
    OF_ONE_FILE,
    Engine,
    Jobs,
    Task,
    WithEngine,
    is_folder,
    make_files,
    refuse,
)
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
from xorflow.data import Split, load_rows
from xorflow.data.arrays import ARRAYS, check_path
from xorflow.data.files import READABLE
from xorflow.data.table import extra_columns, open_rows, told
from xorflow.data.tables import Source, table_files
from xorflow.errors import ConfigError, DataError
from xorflow.evaluate import LogLikelihood
from xorflow.table_model import TableModel, row_by_row
from xorflow.training import Run, out_of_memory_as_error

Data = Annotated[
    Path,
    typer.Option(
        help="A file with the run's columns; or many: a pattern in quotes, or a folder.", show_default=False
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="A .csv or .npy file to write, or a folder for many .parquet files; printed otherwise."
    ),
]


def score(
    run: RunArgument,
    data: Data,
    out: Out = None,
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
    jobs: Jobs = None,
    engine: WithEngine = Engine.PROCESSES,
) -> None:
    """log p of every row of a file, in nats."""
    most = parse_bytes(memory)
    if out is not None and is_folder(out):
        refuse({"--force": force}, IN_A_FOLDER)
        scorer = Scorer(run, flow.value, device, samples, most)
        _score_files(scorer, data, out, header, jobs, engine, as_json)
        return
    refuse({"--jobs": jobs, "--engine": engine}, OF_ONE_FILE)
    opened = training.open_run(run, device=device)
    if out is not None:
        check_out(out, (".csv", ".npy"), (data, opened.options.data), force)
    _require_no_context(opened)
    schema = opened.schema
    if schema is None:
        rows = load_rows(data, categories=opened.flow.states.sizes, shape=opened.shape)
    else:
        rows = open_rows(schema, data, header)
    chosen = chosen_flow(opened, flow, most)  # may take long, so after all that may be refused
    with out_of_memory_as_error("lower --memory"):
        if isinstance(rows, Tensor):
            more, log_p = {}, row_by_row(chosen, Split(rows), samples, most)
        else:
            assert schema is not None
            more, log_p = _score_table(TableModel(schema, chosen), rows, samples, most)
    values = training.require_finite(log_p, str(data)).values.cpu()
    if out is not None:
        _write_scores(out, values)
    for line in more.pop("notes", ()):
        typer.echo(line, err=True)
    if as_json:
        typer.echo(json.dumps(log_p.summary() | more | {"log_prob": values.tolist()}, allow_nan=False))
        return
    if out is not None:
        mean = f"mean {float(values.mean()):.4f} nats"
        typer.echo(f"wrote log p of {len(values)} rows ({log_p.kind}) to {out}; {mean}")
        typer.echo(_measures(more.get("measures", {})), nl=False)
    else:
        typer.echo("\n".join(f"{value:.6f}" for value in values.tolist()))
    typer.echo(_unseen(more.get("unseen", {})), err=out is None, nl=False)


def _require_no_context(opened: Run) -> None:
    if opened.flow.context_features:
        raise ConfigError(
            "score takes data without context, and this run is conditioned on it; use xorflow.load in Python"
        )


# ---- many files ----

_KEY = b"xorflow"
"""Of what a file of scores says of itself."""
_AT_ONCE = 2**14
"""Rows of an array."""


def _score_files(
    scorer: Scorer,
    data: Path,
    out: Path,
    header: bool | None,
    jobs: int | None,
    engine: Engine,
    as_json: bool,
) -> None:
    """A file of scores for each file of rows, in the order of its rows."""
    opened, _ = scorer.opened()
    _require_no_context(opened)
    paths = [Path(os.path.realpath(path)) for path in table_files(data, READABLE, READABLE)]
    if any(path.is_relative_to(os.path.realpath(out)) for path in paths):
        raise ConfigError(f"--out never holds what the command reads, and {out} does; choose another --out")
    extra = dict.fromkeys(name for path in paths for name in _extra(opened, path, header))
    states = [path.stat() for path in paths]
    top = os.path.commonpath([path.parent for path in paths])
    names = [str(path.relative_to(top)) for path in paths]
    tasks = [
        Task(name + ".parquet" * (path.suffix != ".parquet"), str(path), state.st_size)
        for name, path, state in zip(names, paths, states, strict=True)
    ]
    if len({task.name for task in tasks}) < len(tasks):
        raise ConfigError("every file has scores of its own name, and two would have the same; rename one")
    stamps = [[name, state.st_size, state.st_mtime_ns] for name, state in zip(names, states, strict=True)]
    about = {
        "run": scorer.sha256,
        "options": {
            "flow": scorer.flow,
            "samples": scorer.samples,
            "memory": scorer.memory,
            "header": header,
        },
        "data": stamps,
    }
    make_files(out, tasks, functools.partial(score_file, scorer, header), about, jobs, scorer.device, engine)
    if extra:
        typer.echo(f"{data} has columns that are ignored: {_list([*extra])}", err=True)
    _show_files(scorer, out, [out / task.name for task in tasks], as_json)


def _extra(opened: Run, path: Path, header: bool | None) -> list[str]:
    """Columns that are ignored in a file that can be opened and has the run's, in types that can be read as theirs."""
    if opened.schema is None:
        check_path(path, ARRAYS)
        return []
    source = open_rows(opened.schema, path, header)
    with told(source.label):
        opened.schema.encode(pa.schema([*source.types.items()]).empty_table())
    return [name for name in source.types if name not in opened.schema.order]


def score_file(scorer: Scorer, header: bool | None, data: str, path: Path) -> None:
    """The scores of a file's rows; memory depends on neither their number nor that of files."""
    opened, model = scorer.opened()
    if opened.schema is not None:
        source = open_rows(opened.schema, Path(data), header)
        batches = source.batches(opened.schema.names)
    else:
        batches = iter(load_rows(data, categories=model.states.sizes, shape=opened.shape).split(_AT_ONCE))
    unseen, total = Counter(), 0.0
    schema = pa.schema([(scorer.column, pa.float64())])
    with (
        new_file(path, NO_ROOM) as stream,
        pq.ParquetWriter(stream, schema, use_dictionary=False) as writer,
        told(data),
    ):
        for batch in batches:
            scores = scorer.scores(batch)
            writer.write_table(pa.table([scores.values], schema))
            unseen.update(scores.unseen)
            total += math.fsum(scores.values)
        writer.add_key_value_metadata({_KEY: json.dumps({"sum": total, "unseen": unseen})})


def _show_files(scorer: Scorer, out: Path, paths: Sequence[Path], as_json: bool) -> None:
    """The mean over all files, with what was never seen."""
    opened, _ = scorer.opened()
    rows, total, unseen = 0, 0.0, Counter()
    for path in paths:
        try:
            about = pq.read_metadata(path)
            kept = json.loads(about.metadata[_KEY])
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError):
            raise DataError(
                f"{path} is not the file that was written there; remove it, and give the same command again"
            ) from None
        rows, total = rows + about.num_rows, total + kept["sum"]
        unseen.update(kept["unseen"])
    measures = {} if opened.schema is None else {c.name: c.measure for c in opened.schema.columns}
    if as_json:
        kind = {"kind": "exact" if scorer.column == "log_prob" else "lower bound"}
        figures = {"nll": -total / rows, **kind, "rows": rows, "measures": measures, "unseen": dict(unseen)}
        typer.echo(json.dumps(figures, allow_nan=False))
        return
    typer.echo(f"wrote {scorer.column} of {rows:,} rows to {out}; mean {total / rows:.4f} nats")
    typer.echo(_measures(measures) + _unseen(unseen), nl=False)


def _measures(by_column: Mapping[str, str]) -> str:
    """What log p is of, in a line for each measure, where it is not a mass alone."""
    columns: dict[str, list[str]] = {}
    for name, measure in by_column.items():
        columns.setdefault(measure, []).append(name)
    if columns.keys() <= {"mass"}:
        return ""
    return "".join(f"{measure}: {_list(names)}\n" for measure, names in columns.items())


def _unseen(counts: Mapping[str, int]) -> str:
    """A line about columns with something new, if there are any."""
    rows = [f"{name!r} in {count:,} row{'s' * (count > 1)}" for name, count in counts.items()]
    return f"with something that no training row has: {', '.join(rows)}\n" if rows else ""


def _list(names: Sequence[str], most: int = 10) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def _score_table(
    model: TableModel, source: Source, samples: int, memory: int | None
) -> tuple[dict[str, Any], LogLikelihood]:
    """Scores of rows that are read batch by batch; what measures they are densities of, what is new in them, what to note."""
    values, kind, unseen = [], "exact", Counter()
    with told(source.label):
        for batch in source.batches(model.schema.names):
            scores = model.score(batch, samples=samples, memory=memory)
            values.append(torch.from_numpy(scores.values))
            unseen.update(scores.unseen)
            kind = scores.kind
    features = len(model.schema.columns)
    log_p = LogLikelihood(torch.cat(values), kind, features, None if kind == "exact" else samples)
    notes = extra_columns(model.schema, source)
    return {"measures": model.measures, "unseen": dict(unseen), "notes": notes}, log_p


def _write_scores(path: Path, values: Tensor) -> None:
    with new_file(path, NO_ROOM) as stream:
        if path.suffix.lower() == ".npy":
            np.save(stream, values.numpy(), allow_pickle=False)
        else:
            lines = ["log_prob", *map(repr, values.tolist())]
            stream.write("".join(f"{line}\n" for line in lines).encode())
