"""A table: every model in a process of its own, then what they reach, side by side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from research import results
from research.mixed.cells import PARTS, Arrays, read_cells
from research.results import Record, exists, keep
from research.tables import markdown_table
from xorflow import UserError

MODELS = OURS, LIGHTGBM, CHOW_LIU, MOSTLY = "xorflow", "LightGBM alone", "Chow-Liu tree", "mostlyai-engine"


def fit_and_compare(data: Path, name: str, mostlyai: Path, out: Path, work: Path) -> None:
    """The record of a table, unless it is there; models whose files are in `work` are not fitted again."""
    record, path = out / "runs" / f"{name}.json", work / f"{name}.npz"
    if exists(record):
        return
    cells = read_cells(data, name)
    work.mkdir(parents=True, exist_ok=True)
    np.savez(path, **cells)  # pyright: ignore[reportArgumentType]
    fitted = {model: _fitted(model, path, mostlyai) for model in MODELS}
    rows = np.concatenate([cells[part] for part in PARTS])
    models = compared(rows, cells["sizes"], fitted)
    keep(record, {"table": name, "rows": len(rows), "columns": rows.shape[1], "models": models})


def _fitted(model: str, cells: Path, mostlyai: Path) -> Arrays:
    """What a model's process wrote, whole or not at all."""
    path, part = (cells.with_stem(f"{cells.stem} {text}") for text in (model, f"{model} part"))
    if not path.exists():
        command = [sys.executable, "-m", "research.mixed.fit", model]
        if model == MOSTLY:
            # more threads would only cost it more time of the processor
            command = ["env", "OMP_NUM_THREADS=1", str(mostlyai), str(Path(__file__).with_name("mostly.py"))]
        code = subprocess.run([*command, str(cells), str(part)]).returncode
        if code:
            raise UserError(f"{' '.join(command)} ended with {code}; what it wrote is above")
        part.rename(path)
    return dict(np.load(path))


def compared(rows: NDArray[Any], sizes: NDArray[Any], fitted: dict[str, Arrays]) -> list[Record]:
    """Of each model the log-likelihood of test rows, how much less it is than ours, its cost and its impossible rows."""
    first = np.cumsum(sizes) - sizes
    never = never_together(rows + first, sizes.sum())
    return [
        {
            "model": model,
            "ll": _mean(figures["log_p"]),
            "less": _mean(fitted[OURS]["log_p"] - figures["log_p"]),
            **{key: float(figures[key]) for key in ("cpu_seconds", "megabytes", "orderings")},
            "impossible": _mean(has_pair(figures["samples"] + first, never)),
        }
        for model, figures in fitted.items()
    ]


def _mean(values: NDArray[Any]) -> list[float]:
    """With its standard error."""
    return [float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)]


def never_together(rows: NDArray[Any], states: int) -> NDArray[Any]:
    """Pairs of states, of which no two columns share any, that no row has, although independence would expect ten or more."""
    hot = np.zeros((len(rows), states))
    np.put_along_axis(hot, rows, 1, 1)
    return (hot.T @ hot == 0) & (np.outer(hot.sum(0), hot.mean(0)) >= 10)


def has_pair(rows: NDArray[Any], pairs: NDArray[Any]) -> NDArray[Any]:
    """Which rows have any of these pairs."""
    return np.any(pairs[rows[:, :, None], rows[:, None]], (1, 2))


# ---- the table of all ----


def make_table(folder: Path) -> Record:
    """What `table.json` holds: the records, small tables first."""
    runs = results.read_all(folder, "runs", "mixed", ("table", "rows", "columns", "models"))
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
    """`table.json` beside the runs; returns the table."""
    return results.write_table(folder, lambda: make_table(folder))
