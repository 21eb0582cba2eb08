"""What the commands on finished runs have in common: their arguments, and what these mean."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from xorflow import training
from xorflow.errors import ConfigError
from xorflow.flows import Flow, LatentFlow, Mixture
from xorflow.training import Run, out_of_memory_as_error

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Samples = Annotated[int, typer.Option(help="Importance samples, where there is no exact likelihood.")]
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
Force = Annotated[bool, typer.Option("--force", help="Replace the file --out, if there is one.")]
_FLOWS = ("latent", "deterministic", "refitted")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def chosen_flow(opened: Run, which: str, memory: int | None = None) -> Flow | LatentFlow | Mixture:
    """The flow that --flow names."""
    if which not in _FLOWS:
        raise ConfigError(f"--flow is one of {', '.join(_FLOWS)}; got {which!r}")
    if which == "latent":
        return opened.flow
    if which == "deterministic":
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
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise ConfigError(f"--memory is a number of bytes, such as 500MB or 2GB; got {text!r}")
    return size


def check_samples(samples: int) -> None:
    if samples < 1:
        raise ConfigError(f"--samples is at least 1; got {samples}")


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
