"""A set, trained with the default and scored once: what a record holds; and the scoreboard, from all records."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from research import results
from research.results import Record, keep
from research.tables import fixed, markdown_table
from xorflow import ConfigError, auto_fit, data, evaluate
from xorflow.data import Dataset, Split
from xorflow.training import chow_liu, independent_nll


def find_sets(folder: Path) -> dict[str, Path]:
    """The files of sets, by name: `NAME.npz` with arrays of bits, or as they are published `NAME.ts.data` beside two others."""
    texts = {path.name.removesuffix(".ts.data"): path for path in sorted(folder.glob("*.ts.data"))}
    files = texts | {path.stem: path for path in sorted(folder.glob("*.npz"))}
    if not files:
        raise ConfigError(
            f"--data is a folder of files NAME.npz or NAME.ts.data, and {folder} has none; choose another"
        )
    return dict(sorted(files.items()))


def read_set(path: Path, name: str) -> Dataset:
    """The bits of a set, in the three parts that are published."""
    if path.suffix == ".npz":
        dataset = data.load(path, categories=2)
        if dataset.test is None or dataset.validation is None:
            raise ConfigError(f"a set has the arrays train, validation and test, and {path} lacks one")
        return dataset
    train, validation, test = (
        Split(_bits(path.with_name(f"{name}.{part}.data"))) for part in ("ts", "valid", "test")
    )
    return Dataset(name, train, validation, test, (2,) * train.values.shape[1])


def _bits(path: Path) -> Tensor:
    """The cells of a text file: they are read as those of any table, without its states for gaps."""
    schema = data.load(path, validation=0, test=0, header=False).schema
    assert schema is not None
    states = data.load_rows(path, categories=schema.categories, schema=schema, header=False)
    cells = np.stack([column.to_numpy() for column in schema.decode(states.numpy(), 0).columns], 1)
    return data.validate(torch.from_numpy(cells), (2,) * cells.shape[1]).to(torch.uint8)


def run_of(out: Path, name: str, seed: int) -> Path:
    """Where the record of a run is."""
    return out / "runs" / f"{name}-{seed}.json"


def train_and_score(path: Path, name: str, seed: int, minutes: float, out: Path) -> None:
    """One run with everything counted, from reading the file to the likelihood of the test rows; its record is kept."""
    began, cpu = time.monotonic(), time.process_time()
    dataset = read_set(path, name)
    assert dataset.test is not None
    fitted = auto_fit(dataset, minutes=minutes, seed=seed)
    log_p = evaluate.exact(fitted.model, dataset.test)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    keep(
        run_of(out, name, seed),
        {
            "set": name,
            "seed": seed,
            "ll": -log_p.nll,
            "kind": log_p.kind,
            "stderr": log_p.stderr,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu, 1),
            "device": f"{torch.get_num_threads()} threads",
            "minutes": minutes,
            "sizes": dataset.describe()["sizes"],
            "features": dataset.features,
            **_beside(dataset),
            "auto": fitted.record,
        },
    )


def _beside(dataset: Dataset) -> Record:
    """Log-likelihoods of the test rows under independent columns and the best tree."""
    assert dataset.test is not None
    tree = chow_liu(dataset.train.values, dataset.categories)
    return {
        "independent": -independent_nll(dataset, dataset.test),
        "chow_liu": None if tree is None else float(tree.log_prob(dataset.test.values).mean()),
    }


# ---- the scoreboard ----


_KEYS = ("set", "seed", "ll", "stderr", "seconds", "cpu_seconds", "independent", "chow_liu")


def make_table(folder: Path) -> Record:
    """What `table.json` holds: for each set the mean over seeds, beside the best published figure."""
    published = json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))
    runs = results.read_all(folder, "runs", "debd", _KEYS)
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
    """`table.json` beside the runs; returns the table."""
    return results.write_table(folder, lambda: make_table(folder))
