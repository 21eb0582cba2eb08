"""The commands, put together, and how errors reach a person."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from xorflow import __version__
from xorflow.cli import combine, reading, recipes, train
from xorflow.errors import UserError

_CLICK_EXCEPTION: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What the parser raises: of the package click, or of the copy of it that newer versions of typer carry."""

app = typer.Typer(
    name="xorflow",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Normalising flows on discrete data: train, evaluate, sample, score, combine.",
    epilog="Begin with [bold]xorflow train[/bold]: bundled MNIST, a few minutes on a laptop.",
)
app.command("train", epilog=train.EXAMPLES)(train.command())
app.command("recipes", epilog=recipes.EXAMPLES)(recipes.recipes)
app.command("evaluate", epilog=reading.EVALUATE_EXAMPLES)(reading.evaluate)
app.command("sample", epilog=reading.SAMPLE_EXAMPLES)(reading.sample)
app.command("score", epilog=reading.SCORE_EXAMPLES)(reading.score)
app.command("combine", epilog=combine.EXAMPLES)(combine.combine)


def _show_version(wanted: bool) -> None:
    if wanted:
        Console().print(f"xorflow {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _top(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None:
    del version
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 a mistake that one line explains, 130 interrupted."""
    try:
        code = app(arguments, standalone_mode=False)
    except UserError as error:
        sys.exit(_fail(str(error)))
    except _CLICK_EXCEPTION as error:
        sys.exit(_fail(error.format_message()))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(code or 0)


def _fail(message: str) -> int:
    line = Text.assemble(("error: ", "bold red"), " ".join(message.split()))
    Console(stderr=True).print(line, soft_wrap=True, highlight=False)
    return 2
