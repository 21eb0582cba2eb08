"""`xorflow evaluate` and `combine`: what is asked of finished runs, and the arguments of all commands that ask."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xorflow import training
from xorflow.errors import ConfigError
from xorflow.flows import Model
from xorflow.training import Run, out_of_memory_as_error
from xorflow.training.config import MOST
from xorflow.training.folder import HELD_OUT


class Which(StrEnum):
    """The flow that --flow names."""

    LATENT = "latent"
    DETERMINISTIC = "deterministic"
    REFITTED = "refitted"


RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Samples = Annotated[
    int,
    typer.Option(min=1, max=MOST - 1, help="Importance samples, where there is no exact likelihood."),
]
Memory = Annotated[
    str | None,
    typer.Option(
        help="About what a pass, or importance samples, may take at a time beside model and data, such as 500MB.",
        show_default=False,
    ),
]
FlowOption = Annotated[
    Which,
    typer.Option(
        "--flow",
        metavar="NAME",
        help="latent; deterministic (the most probable bijection); or refitted, the same on a base fitted to it by a pass "
        "over the training data.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file --out, if there is one.")]

NOTHING_HELD_OUT = "No data were held out, so there is no likelihood to report."
NO_ROOM = "choose a folder that can be written and has room"


# ---- the commands ----


def evaluate(
    run: RunArgument,
    samples: Samples = 64,
    memory: Memory = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """The likelihoods of a run on its test and validation data, each with what it is."""
    most = parse_bytes(memory)
    opened = training.open_run(run, device=device)
    dataset = opened.data().to(opened.flow.device)
    with out_of_memory_as_error("lower --memory, or use --device cpu"):
        splits = training.report(opened.flow, dataset, samples, memory=most)
    training.complete_result(run, splits)
    if as_json:
        typer.echo(json.dumps(splits | {"data": dataset.describe()}, indent=2, allow_nan=False))
        return
    columns = [_figures(row) for row in splits.values()]
    names = columns[0] if columns else ()
    _show("nats", splits, {name: [column[name] for column in columns] for name in names})


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


def combine(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of finished runs.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder of the new run, new or empty.", show_default=False)],
    device: Device = "auto",
) -> None:
    """Mix several runs on the same data, such as seeds of one recipe, into one model."""
    with out_of_memory_as_error("use --device cpu, or combine fewer runs"):
        result = training.combine_runs(runs, out, device)
    splits = [split for split in HELD_OUT if split in result]
    results = {str(run): training.read_result(run) for run in runs} | {str(out): result}
    figures = {name: [f"{one[split]['nll']:.3f}" for split in splits] for name, one in results.items()}
    _show("negative log-likelihood, nats", splits, figures)


def _show(title: str, splits: Iterable[str], rows: Mapping[str, Sequence[str]]) -> None:
    """A table with a column for each split, if there are any."""
    table = plain_table(title, *splits)
    for name, figures in rows.items():
        table.add_row(Text(name), *figures)
    Console().print(table if len(table.columns) > 1 else NOTHING_HELD_OUT)


def plain_table(first: str, *others: str) -> Table:
    """A table with a column of names, and others of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")  # the only one that gives way to a narrow terminal
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def say(console: Console, *lines: str) -> None:
    """Lines as they are, whatever is in them and however long they are."""
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)


# ---- what arguments mean ----


def chosen_flow(opened: Run, which: Which, memory: int | None = None) -> Model:
    """The flow that --flow names."""
    if which is Which.LATENT:
        return opened.flow
    if which is Which.DETERMINISTIC:
        return opened.flow.greedy()
    train = opened.data().to(opened.flow.device).train
    with (
        Console(stderr=True).status("fitting the base to the training data ..."),
        out_of_memory_as_error("use --device cpu"),
    ):
        return training.refitted(opened.flow, train, memory=memory)


def parse_bytes(text: str | None) -> int | None:
    """A number of bytes, as a person writes it.

    >>> parse_bytes("1.5 GB"), parse_bytes("500MB"), parse_bytes(None)
    (1500000000, 500000000, None)
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMG]?)B?", text.strip().upper())
    size = float(match[1]) * 1000 ** " KMG".index(match[2] or " ") if match else 0.0
    if not 1 <= size < 2**63:
        raise ConfigError(f"--memory is a number of bytes, such as 500MB or 2GB; got {text!r}")
    return int(size)


def check_out(path: Path, suffixes: tuple[str, ...], inputs: Iterable[Path | str], force: bool) -> None:
    """Refuse a file of a kind that is not written, one that is read here, and one that is there unless that was said."""
    if path.suffix.lower() not in suffixes:
        raise ConfigError(f"--out is a {' or '.join(suffixes)} file for this run; got {path.name!r}")
    try:
        os.lstat(path)
    except FileNotFoundError:
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(
                f"--out lies in a folder that is there and can be written, and {path} does not"
            ) from None
        return
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}; choose another") from None
    if os.path.isdir(path):
        raise ConfigError(f"--out is a file, and {path} is a folder; choose another --out")
    for given in inputs:
        if os.path.exists(path) and os.path.exists(given) and os.path.samefile(path, given):
            raise ConfigError(
                f"--out never replaces what the command reads, and {path} is that; choose another --out"
            )
    if not force:
        raise ConfigError(
            f"--out replaces a file only with --force, and {path} is there; add it, or choose another --out"
        )
