"""What commands that train many rows share: progress, Ctrl-C, what failed, and the command that goes on."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from xorflow.cli.reproduce_display import ReproductionDisplay
from xorflow.experiments import Reproduction
from xorflow.training import Interrupted, Outcome


def run_experiment(reproduction: Reproduction, again: str) -> list[Outcome]:
    """Make all runs, with progress; `again` is what to type to go on after Ctrl-C."""
    display = ReproductionDisplay(Console(stderr=True), reproduction.planned)
    try:
        with display:
            return reproduction.run(display)
    except Interrupted:
        typer.echo(f"stopped and saved; continue with: {again}", err=True)
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        typer.echo(f"stopped; continue from the last checkpoints with: {again}", err=True)
        if display.stopping:
            sys.stderr.flush()
            # an ordinary exit would wait for runs that are threads; what they write is whole or not there
            os._exit(130)
        raise typer.Exit(130) from None


def complain(outcomes: Sequence[Outcome]) -> None:
    """Say which runs failed, and exit with 2 if any did."""
    errors = Console(stderr=True)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        # runs are continued by the command that made them, which here is not `xorflow train`
        reason = (outcome.error or "").replace("continue it with --resume", "give the same command again")
        words = f"{outcome.job.name}, seed {outcome.job.options.seed}: {reason}"
        errors.print(Text.assemble(("error: ", "bold red"), words), soft_wrap=True, highlight=False)
    if failed:
        raise typer.Exit(2)


def command_again(command: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """What to type to go on; what has its default is left out."""
    words = ["xorflow", command]
    for name, value in given.items():
        if value is not None and defaults.get(name) != value:
            words += [f"--{name}", str(value)]
    return shlex.join(words)
