"""`python -m research`: the studies, each resumable by the command that began it, and what is made of their results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from research import results
from research.command import RESULTS, command_of, print_error
from research.debd import command as debd
from research.debd.study import write_debd
from research.depth.study import DEPTH
from research.documents import update_documents
from research.estimators import command as estimators
from research.estimators.table import write_study
from research.mixed import command as mixed
from research.mixed.study import write_mixed
from research.paper.study import PAPER
from research.strong.study import STRONG
from xorflow import UserError

_CLICK_EXCEPTION: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What the parser raises: of the package click, or of the copy of it that newer versions of typer carry."""

EXPERIMENTS = (PAPER, DEPTH, STRONG)

app = typer.Typer(
    name="research",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="What the library was tried on: the paper's table, depth, gradient estimators, strong conditioners, tables.",
)


def _epilog(examples: Sequence[str]) -> str:
    end = "The same command again goes on with what is not finished."
    return "\n\n".join(("[bold]Examples[/bold]", *(f"python -m research {text}" for text in examples), end))


for experiment in EXPERIMENTS:
    app.command(experiment.name, epilog=_epilog(experiment.examples))(command_of(experiment))
app.command("estimators", epilog=_epilog(estimators.EXAMPLES))(estimators.estimators)
app.command("debd", epilog=_epilog(debd.EXAMPLES))(debd.debd)
app.command("mixed", epilog=_epilog(mixed.EXAMPLES))(mixed.mixed)


@app.command("tables")
def tables(folder: Path = RESULTS) -> None:
    """Pack the records of all studies, and make their tables and pictures from them."""
    writers = {experiment.name: experiment.write for experiment in EXPERIMENTS}
    others = {"estimators": write_study, "debd": write_debd, "mixed": write_mixed}
    for name, write in (writers | others).items():
        study = folder / name
        if results.exists(study / "plan.json") or results.records(study, "runs"):
            results.pack(study)
            write(study)


@app.command("docs")
def docs(root: Path = Path()) -> None:
    """Make tables and pictures anew, and put the tables into the documents."""
    tables(root / RESULTS)
    for path in update_documents(root):
        typer.echo(path)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 done, 2 a mistake that one line explains, 130 interrupted."""
    typed = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(typed, standalone_mode=False, obj=typed)
    except UserError as error:
        print_error(str(error))
        code = 2
    except _CLICK_EXCEPTION as error:
        print_error(error.format_message())
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
