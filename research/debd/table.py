"""The scoreboard of DEBD, from the records of `python -m research debd`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from research import results
from research.results import Record
from research.tables import fixed, markdown_table

_KEYS = ("set", "seed", "ll", "stderr", "seconds", "cpu_seconds", "independent", "chow_liu")


def make_table(folder: Path) -> Record:
    """What `table.json` holds: for each set the mean over seeds, beside the best published figure."""
    published = json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))
    runs = [results.read(path, "debd", _KEYS) for path in results.records(folder, "runs")]
    names = [*dict.fromkeys([*published, *sorted(run["set"] for run in runs)])]
    rows = [_row(of_set, published) for name in names if (of_set := [r for r in runs if r["set"] == name])]
    return {"version": results.VERSION, "study": "debd", "rows": rows}


def _row(runs: list[Record], published: dict[str, float]) -> Record:
    """`ll` and `stderr` (over test rows) are means over seeds, times those of the longest run."""
    first = runs[0]
    return {
        "set": first["set"],
        "ll": statistics.fmean(run["ll"] for run in runs),
        "kind": first["kind"],
        "stderr": statistics.fmean(run["stderr"] for run in runs),
        "seconds": max(run["seconds"] for run in runs),
        "cpu_seconds": max(run["cpu_seconds"] for run in runs),
        "device": first["device"],
        "published": published.get(first["set"]),
        "independent": first["independent"],
        "chow_liu": first["chow_liu"],
        "seeds": [run["seed"] for run in sorted(runs, key=lambda run: run["seed"])],
        "worst": min(run["ll"] for run in runs),
        "orderings": [run["auto"]["orderings"] for run in runs],
    }


def debd_table(table: Record) -> str:
    """Log-likelihoods of test rows; the better of our worst seed and the published one is bold."""
    return markdown_table(
        "set | >independent | >Chow-Liu | >best published | >xorflow | >worst seed | >seeds | >seconds | >CPU seconds",
        map(_cells, table["rows"]),
    )


def _cells(row: Record) -> list[str]:
    ours, best = f"{row['ll']:.3f} ± {row['stderr']:.3f}", fixed(row["published"], 3)
    if row["published"] is not None and row["worst"] > row["published"]:
        ours = f"**{ours}**"
    elif row["published"] is not None:
        best = f"**{best}**"
    return [
        *(row["set"], fixed(row["independent"], 3), fixed(row["chow_liu"], 3), best, ours),
        *(fixed(row["worst"], 3), str(len(row["seeds"])), fixed(row["seconds"], 0)),
        fixed(row["cpu_seconds"], 0),
    ]


def write_debd(folder: Path) -> Record:
    """`table.json` and `table.md` beside the runs; returns the table."""
    return results.write_table(folder, lambda: make_table(folder), lambda table: f"{debd_table(table)}\n")
