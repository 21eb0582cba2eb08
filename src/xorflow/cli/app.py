"""The commands, put together, and how errors reach a person."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from xorflow import __version__
from xorflow.errors import UserError, in_one_line

COMMANDS = {
    "train": "Train a latent flow, by default on bundled MNIST.",
    "recipes": "Named sets of options, and what to expect of them.",
    "evaluate": "The likelihoods of a run on its test and validation data.",
    "sample": "Draw new rows from a run.",
    "score": "log p of every row of a file, in nats.",
    "combine": "Mix several runs on the same data into one model.",
}
"""Each is a module of this package with a function of that name, imported when the command is called: torch takes a second."""

_CLICK_EXCEPTION: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What the parser raises: of the package click, or of the copy of it that newer versions of typer carry."""
_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class _Commands(TyperGroup):
    """All commands by name; only that which is called is more than its name and a sentence."""

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else _loaded(str(command.name)), rest


def _loaded(name: str) -> Any:
    module, alone = import_module(f"xorflow.cli.{name}"), typer.Typer(**_SETTINGS)
    alone.command(name, epilog=module.EXAMPLES)(getattr(module, name))
    return typer.main.get_command(alone)


app = typer.Typer(
    name="xorflow",
    cls=_Commands,
    invoke_without_command=True,
    help="Normalising flows on discrete data: train, evaluate, sample, score, combine.",
    epilog="Begin with [bold]xorflow train[/bold]: bundled MNIST, a few minutes on a laptop.",
    **_SETTINGS,
)


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
        sys.exit(_fail(_message(error)))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(code or 0)


def _message(error: Any) -> str:
    """What the parser says; of an option of a run that is no flag, how it is given."""
    if type(error).__name__ != "NoSuchOption" or error.ctx.info_name != "train":
        return error.format_message()
    from xorflow.training.config import hint

    return f"No such option: {error.option_name}; {hint(error.option_name.strip('-').replace('-', '_'))}"


def _fail(message: str) -> int:
    line = Text.assemble(("error: ", "bold red"), in_one_line(message))
    Console(stderr=True).print(line, soft_wrap=True, highlight=False)
    return 2
