"""The table of mixed columns, from the records of `python -m research mixed`."""

from __future__ import annotations

from pathlib import Path

from research import results
from research.results import Record
from research.tables import markdown_table


def make_table(folder: Path) -> Record:
    """What `table.json` holds: the records, small tables first."""
    keys = ("table", "rows", "columns", "models")
    runs = [results.read(path, "mixed", keys) for path in results.records(folder, "runs")]
    return {"version": results.VERSION, "study": "mixed", "rows": sorted(runs, key=lambda run: run["rows"])}


def mixed_table(table: Record) -> str:
    """Log-likelihoods of test rows, how much less they are than ours, what fitting cost, and rows with impossible pairs."""
    return markdown_table(
        "table | model | >log-likelihood | >less than ours | >CPU seconds | >memory, MB | >impossible",
        (_cells(run, model) for run in table["rows"] for model in run["models"]),
    )


def _cells(run: Record, model: Record) -> list[str]:
    ours = model is run["models"][0]
    of_table = f"{run['table']}, {run['rows']:,} × {run['columns']}"
    ll, less = ("{:.3f} ± {:.3f}".format(*model[key]) for key in ("ll", "less"))
    cost = f"{model['cpu_seconds']:.0f}", f"{model['megabytes']:,.0f}"
    impossible = "{:.1%} ± {:.1%}".format(*model["impossible"])
    return [of_table if ours else "", model["model"], ll, "–" if ours else less, *cost, impossible]


def write_mixed(folder: Path) -> Record:
    """`table.json` and `table.md` beside the runs; returns the table."""
    return results.write_table(folder, lambda: make_table(folder), lambda table: f"{mixed_table(table)}\n")
