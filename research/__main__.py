"""`python -m research`: the studies, each resumable by the command that began it, and what is made of their results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from research import results
from research.command import RESULTS
from research.depth import command as depth
from research.depth.table import write_depth
from research.documents import update_documents
from research.estimators import command as estimators
from research.estimators.table import write_study
from research.paper import command as paper
from research.paper.table import write_paper
from research.strong import command as strong
from research.strong.table import write_strong
from xorflow import UserError

_CLICK_EXCEPTION: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What the parser raises: of the package click, or of the copy of it that newer versions of typer carry."""

_WRITERS = {"paper": write_paper, "depth": write_depth, "estimators": write_study, "strong": write_strong}

app = typer.Typer(
    name="research",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="What the library was tried on: the paper's table, depth, gradient estimators, strong conditioners.",
)
app.command("paper", epilog=paper.EXAMPLES)(paper.paper)
app.command("depth", epilog=depth.EXAMPLES)(depth.depth)
app.command("estimators", epilog=estimators.EXAMPLES)(estimators.estimators)
app.command("strong", epilog=strong.EXAMPLES)(strong.strong)


@app.command("tables")
def tables(folder: Path = RESULTS) -> None:
    """Pack the records of all studies, and make their tables and pictures from them."""
    for name, write in _WRITERS.items():
        if results.exists(folder / name / "plan.json"):
            results.pack(folder / name)
            write(folder / name)


@app.command("docs")
def docs(root: Path = Path()) -> None:
    """Make tables and pictures anew, and put the tables into the documents."""
    tables(root / RESULTS)
    for path in update_documents(root):
        typer.echo(path)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 done, 2 a mistake that one line explains, 130 interrupted."""
    try:
        code = app(arguments, standalone_mode=False)
    except UserError as error:
        sys.exit(_fail(str(error)))
    except _CLICK_EXCEPTION as error:
        sys.exit(_fail(error.format_message()))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code or 0)


def _fail(message: str) -> int:
    words = Text.assemble(("error: ", "bold red"), " ".join(message.split()))
    Console(stderr=True).print(words, soft_wrap=True, highlight=False)
    return 2


if __name__ == "__main__":
    main()
