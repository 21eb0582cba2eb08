"""What the commands on finished runs have in common: their arguments, and what these mean."""

from __future__ import annotations

import re
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


def check_suffix(path: Path, allowed: tuple[str, ...]) -> None:
    """Refuse a file of a kind that is not written."""
    if path.suffix.lower() not in allowed:
        raise ConfigError(f"--out is a {' or '.join(allowed)} file for this run; got {path.name!r}")
