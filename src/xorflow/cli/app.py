"""The commands, put together, and how what they say, errors too, reaches a person."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from xorflow import __version__
from xorflow.errors import UserError, in_one_line

COMMANDS = {
    "train": (
        "train",
        "Train a latent flow, by default an exact one of bundled MNIST.",
        "xorflow train --conditioner made:hidden=512+512 --epochs 3 --set warmup=100",
        "xorflow train --seeds 0-2 --epochs 2 --out runs/spread",
        "A NAME may have settings, NAME:KEY=VALUE,KEY=VALUE; see docs/options.md.",
    ),
    "recipes": (
        "train",
        "Named sets of options, and what to expect of them.",
        "xorflow recipes",
        "xorflow recipes --json",
        "xorflow train --recipe transformer-pair --out runs/strong",
    ),
    "evaluate": (
        "runs",
        "The likelihoods of a run on its test and validation data.",
        "xorflow evaluate runs/demo",
        "xorflow evaluate runs/deep --samples 1000 --json",
    ),
    "sample": (
        "sample",
        "Draw new rows from a run.",
        "xorflow sample runs/demo --count 64 --out digits.png",
        "xorflow sample runs/people --count 1000 --out people.csv",
        "xorflow sample runs/people --count 1000000000 --out rows",
        "xorflow sample runs/demo --flow refitted --out bijection.png",
    ),
    "score": (
        "score",
        "log p of every row of a file, in nats.",
        "xorflow score runs/people --data new.csv --out scores.csv",
        "xorflow score runs/people --data 'rows/*.parquet' --out scores",
        "xorflow score runs/demo --data images.npy --json",
    ),
    "combine": (
        "runs",
        "Mix several runs on the same data, such as seeds of one recipe, into one model.",
        "xorflow train --seeds 0-1 --out runs/both",
        "xorflow combine runs/both/seed-0 runs/both/seed-1 --out runs/mixture",
        "xorflow sample runs/mixture --count 64 --out digits.png",
    ),
}
"""By name: the module of this package that has a function of that name, one sentence, and examples. Modules are imported when
their command is called: torch takes a second."""

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
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else _loaded(str(command.name)), rest


def _loaded(name: str) -> Any:
    module, sentence, *examples = COMMANDS[name]
    alone = typer.Typer(**_SETTINGS)
    epilog = "\n\n".join(["[bold]Examples[/bold]", *examples])
    alone.command(name, help=sentence, epilog=epilog)(getattr(import_module(f"xorflow.cli.{module}"), name))
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
    command = typer.main.get_command(app)
    with guarded(), _logged():
        code = 0
        try:
            # not by calling `app`, which ends silently after any broken pipe
            with command.make_context(
                "xorflow", sys.argv[1:] if arguments is None else [*arguments]
            ) as context:
                command.invoke(context)
            sys.stdout.flush()
        except typer.Exit as stop:
            code = stop.exit_code
        except UserError as error:
            code = _fail(str(error))
        except _CLICK_EXCEPTION as error:
            code = _fail(_message(error))
        except (KeyboardInterrupt, typer.Abort):
            code = 130
        except ReaderGone:
            code = 0
    sys.exit(code)


@contextmanager
def _logged() -> Iterator[None]:
    """Within this block standard error has what the library logs, such as how far it is with long work."""
    logger, handler = logging.getLogger("xorflow"), logging.StreamHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _message(error: Any) -> str:
    """What the parser says, what came, and where more is said; of an option of a run that is no flag, how it is given."""
    if type(error).__name__ == "NoSuchOption" and error.ctx.info_name == "train":
        from xorflow.training.config import hint

        return f"No such option: {error.option_name}; {hint(error.option_name.strip('-').replace('-', '_'))}"
    said = error.format_message().rstrip(".")
    if (
        error.__cause__ is not None
    ):  # newer versions of typer check values by pydantic, and leave out what came
        said += f"; got {error.__cause__.errors()[0]['input']!r}"
    command = "xorflow" if error.ctx is None else error.ctx.command_path
    return f"{said}; see {command} --help"


def _fail(message: str) -> int:
    if os.environ.get("RANK", "0") != "0":  # of several processes, begun by torchrun, the first one says it
        return 2
    show_error(message)
    return 2


def show_error(message: str) -> None:
    """What went wrong, in one line."""
    line = Text.assemble(("error: ", "bold red"), in_one_line(message))
    Console(stderr=True).print(line, soft_wrap=True, highlight=False)


# ---- standard output and standard error while a command runs ----


class ReaderGone(Exception):
    """Who reads the pipe that standard output is has seen enough."""


@contextmanager
def guarded() -> Iterator[None]:
    """Within this block what standard output cannot take is a UserError or ReaderGone, and what standard error can't is lost.

    Only writing to them is guarded: any other OSError is still one.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Output(sys.stdout), _Messages(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Output:
    """A text stream that writes a letter which its encoding lacks as an escape, like \\xb1; all else is that of the stream."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._reason: OSError | None = None if stream else OSError(errno.EBADF, "it is closed")

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # typer would write there, past all this, where the encoding is ASCII
            raise AttributeError(name)
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._there().write(text)
        except UnicodeEncodeError as error:
            return self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except OSError as error:
            self._failed(error)
            return 0

    def flush(self) -> None:
        try:
            self._there().flush()
        except OSError as error:
            self._failed(error)

    def _there(self) -> TextIO:
        """The stream; once it has failed it fails always, for who tried it first may have ignored that."""
        if self._reason is not None:
            raise self._reason
        assert self._stream is not None
        return self._stream

    def _failed(self, error: OSError) -> None:
        real = self._stream is not None and self._stream in (sys.__stdout__, sys.__stderr__)
        if real and self._reason is None:  # what it still holds would fail once more when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        self._reason = error
        self._tell(error)

    def _tell(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise ReaderGone
        raise UserError(
            f"standard output cannot be written: {error.strerror}; send it elsewhere; what was to be written to files is there"
        ) from error


class _Messages(_Output):
    def _tell(self, error: OSError) -> None:
        """There is nobody to tell."""
