"""The speed of what the recipe auto makes: scores and samples, beside LightGBM's own prediction of the same trees.

    python benchmarks/densities.py [--out benchmarks/densities.json] [--orderings 2]

Two tables, of 20 columns with 2 to 5 values and of 180 bits, with as many orderings as the recipe makes where the clock lets it. LightGBM's
turn is a prediction of every column by its booster, of the trees of the same orderings; it does less, since networks and mixing are
ours alone. Scores and samples in seconds with a thread for each core; beside LightGBM's prediction in CPU seconds of one thread,
in turns. The median, and the middle half.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightgbm
import numpy as np
import torch

import xorflow as xf
from xorflow.data import Dataset, Split
from xorflow.training import auto_fit

TURNS = 9
TARGETS = {20: {"scoring": 1.0, "sampling": 1.0}, 180: {"sampling": 10.0}}
"""Seconds at most on two cores, by columns: 10,000 rows scored, 1,000 drawn."""


def table(columns: int, rows: int) -> Dataset:
    """Rows whose cells mostly follow from those before."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([2 + d % 4 if columns == 20 else 2 for d in range(columns)])
    x = torch.rand(rows, columns, generator=generator).mul(sizes).long()
    for d in range(1, columns):
        kept = torch.rand(rows, generator=generator) < 0.8
        x[kept, d] = (x[kept, d - 1] + x[kept, max(d - 3, 0)]) % sizes[d]
    train, validation, test = x.to(torch.uint8).tensor_split([rows // 2, rows * 5 // 8])
    return Dataset("drawn", Split(train), Split(validation), Split(test), tuple(sizes.tolist()))


def measure(columns: int, orderings: int | None) -> dict[str, Any]:
    """The times of one table, in turns."""
    data = table(columns, 16_000 if columns == 20 else 4_000)
    boosters: list[lightgbm.Booster] = []
    train = lightgbm.train
    with patch.object(lightgbm, "train", lambda *a, **k: boosters.append(train(*a, **k)) or boosters[-1]):
        searched = auto_fit(data, minutes=1_000, orderings=orderings)
    model = searched.model.eval()
    assert data.test is not None
    x = data.test.values.repeat(10, 1)[:10_000]
    seen = [np.ascontiguousarray(x[:, : booster.num_feature()].numpy(), np.float32) for booster in boosters]

    def predict() -> None:
        for booster, rows in zip(boosters, seen, strict=True):
            booster.predict(rows, raw_score=True, num_threads=1)

    actions: dict[str, Callable[[], object]] = {
        "scoring": lambda: xf.evaluate.exact(model, x),
        "sampling": lambda: model().sample((1_000,)),
        "lightgbm": predict,
    }
    cores = torch.get_num_threads()
    seconds = _in_turns({name: actions[name] for name in ("scoring", "sampling")}, time.perf_counter)
    torch.set_num_threads(1)
    cpu_seconds = _in_turns(actions, time.process_time)
    torch.set_num_threads(cores)
    row: dict[str, Any] = {
        "columns": columns,
        "orderings": searched.record["orderings"],
        "kinds": [*searched.record["kinds"]],
        "trees": sum(unit.get("trees", 0) for unit in searched.record["units"]),
        "targets": TARGETS[columns],
        "threads": cores,
    }
    row |= {f"{name}, seconds": _summary(of_action) for name, of_action in seconds.items()}
    row |= {f"{name}, CPU seconds": _summary(of_action) for name, of_action in cpu_seconds.items()}
    pairs = zip(cpu_seconds["scoring"], cpu_seconds["lightgbm"], strict=True)
    row["scoring / lightgbm"] = _summary([ours / theirs for ours, theirs in pairs])
    return row


def _in_turns(
    actions: Mapping[str, Callable[[], object]], clock: Callable[[], float]
) -> dict[str, list[float]]:
    """What each action takes, turn by turn."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(TURNS):
        for name, action in actions.items():
            began = clock()
            action()
            times[name].append(clock() - began)
    return times


def _summary(values: Sequence[float]) -> dict[str, float | list[float]]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "middle half": [round(low, 4), round(high, 4)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--orderings", type=int, help="instead of as many")
    parser.add_argument("--columns", type=int, nargs="+", default=[20, 180])
    arguments = parser.parse_args()
    rows = []
    for columns in arguments.columns:
        rows.append(measure(columns, arguments.orderings))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
