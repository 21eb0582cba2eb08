"""`python -m research debd`: every set of a folder with the default, against the best published figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from research import results
from research.command import RESULTS, Out, Rows
from research.debd.study import find_sets, run_of, train_and_score, write_debd
from research.rows import picked
from research.tables import fixed, terminal_table
from xorflow.training import Interrupted

EXAMPLES = ("debd --data debd --rows 'nltcs,d*' --seeds 1 --out runs/debd",)

_Data = Annotated[
    Path, typer.Option(help="Folder of the sets, NAME.npz or NAME.ts.data; they are not ours to give away.")
]
_Seeds = Annotated[int, typer.Option(help="How many, from 0.")]
_Minutes = Annotated[float, typer.Option(help="The budget of each run.")]


def debd(
    data: _Data,
    rows: Rows = None,
    seeds: _Seeds = 3,
    minutes: _Minutes = 2.0,
    out: Out = RESULTS / "debd",
) -> None:
    """Twenty binary tables: exact log-likelihoods with the default, beside the best published."""
    sets = find_sets(data)
    names = picked(rows, [*sets], "--rows names sets, which are")
    console = Console(stderr=True)
    for seed in range(seeds):
        for name in names:
            if not results.exists(run_of(out, name, seed)):
                console.print(f"{name}, seed {seed}", highlight=False)
                try:
                    train_and_score(sets[name], name, seed, minutes, out)
                except Interrupted:  # while a network is trained
                    raise KeyboardInterrupt from None
                write_debd(out)
    table = write_debd(out)
    shown = [[row["set"], *(fixed(row[key], 3) for key in _SHOWN)] for row in table["rows"]]
    Console().print(terminal_table(f"set | >{' | >'.join(_SHOWN)}", shown))


_SHOWN = ("independent", "chow_liu", "published", "ll", "worst", "seconds")
