"""The cells of a table, the same for every model: numbers in bins, categories with a state for what is rare or unseen."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyarrow import csv

from xorflow import ConfigError

PARTS = ("train", "validation", "test")

Arrays = dict[str, NDArray[Any]]


def plan() -> dict[str, Any]:
    """What `tables.toml` holds: a table of it for each of ours, and the rules for all."""
    return tomllib.loads(Path(__file__).with_name("tables.toml").read_text("utf-8"))


def read_cells(data: Path, name: str) -> Arrays:
    """The three parts as integers, and for the models `sizes` of columns, the `ordered` ones, how many `samples` to draw."""
    rules = plan()
    table = rules[name]
    path = data / table["file"]
    if not path.exists():
        raise ConfigError(
            f"--data is where packages are installed, and {path} is not there; "
            f"pip install --no-deps --target {data} {table['package']}=={table['version']}"
        )
    read = csv.read_csv(path, csv.ReadOptions(column_names=table.get("columns")))
    order = np.random.default_rng(rules["split_seed"]).permutation(read.num_rows)
    ends = [round(len(order) * share) for share in np.cumsum([rules["train"], rules["validation"]])]
    columns = [column.to_numpy()[order] for column in read.columns]
    ordered = [d for d, column in enumerate(columns) if column.dtype != object]
    cells = [(kinds if column.dtype == object else bins)(column, ends[0], rules) for column in columns]
    parts = np.split(np.stack([states for states, _ in cells], 1), ends)
    given = {"sizes": [size for _, size in cells], "ordered": ordered, "samples": rules["samples"]}
    return {key: np.array(value) for key, value in [*zip(PARTS, parts, strict=True), *given.items()]}


def bins(number: NDArray[Any], train: int, rules: dict[str, Any]) -> tuple[NDArray[np.int64], int]:
    """Bins between quantiles of the training rows, which are the first, each with enough of them."""
    known, kept, below = number[:train], [], 0
    for edge in np.unique(np.quantile(known, np.arange(1, rules["bins"]) / rules["bins"])):
        count = int((known < edge).sum())
        if rules["rare"] <= count - below and rules["rare"] <= train - count:
            kept.append(edge)
            below = count
    return np.searchsorted(kept, number, side="right"), len(kept) + 1


def kinds(texts: NDArray[Any], train: int, rules: dict[str, Any]) -> tuple[NDArray[np.int64], int]:
    """From 1 on the categories that enough training rows have; 0 is any other."""
    values, counts = np.unique(texts[:train], return_counts=True)
    states = {text: state for state, text in enumerate(values[counts >= rules["rare"]], 1)}
    return np.array([states.get(text, 0) for text in texts]), len(states) + 1
