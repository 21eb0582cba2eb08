"""`python -m research mixed`: three tables of mixed columns, ours beside three others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from research.command import RESULTS, WORK
from research.mixed.cells import plan
from research.mixed.study import fit_and_compare, mixed_table, write_mixed

EXAMPLES = ("mixed --data packages --mostlyai venv/bin/python",)

_Data = Annotated[Path, typer.Option(help="Folder where the packages of the tables are installed.")]
_Mostlyai = Annotated[Path, typer.Option(help="Python of an environment with mostlyai-engine.")]


def mixed(data: _Data, mostlyai: _Mostlyai) -> None:
    """Three tables of mixed columns: the default beside trees, a Chow-Liu tree and mostlyai-engine."""
    out = RESULTS / "mixed"
    for name, entry in plan().items():
        if isinstance(entry, dict):
            fit_and_compare(data, name, mostlyai, out, WORK / "mixed")
    typer.echo(mixed_table(write_mixed(out)))
