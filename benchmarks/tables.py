"""A table of 20 columns as it is: what training takes of memory, and scoring of time and memory.

    python benchmarks/tables.py [--out benchmarks/tables.json] [--training 50000] [--scoring 1000000]

One column has 2,000 categories, two hold raw numbers; others have gaps, dates, one value, an index. Training is `xorflow train` on
a .csv file for an epoch, a process of its own. Scoring reads a .parquet file with a MADE of 512 units, batch by batch, and takes
turns with that network's bare forward pass on the same states as tensors in memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import xorflow as xf
from xorflow.data.table import open_rows
from xorflow.data.tables import write_table

TARGETS = {"training, GB": 1.5, "speed": 0.5, "scoring, GB": 1.0}
"""At most, at least, at most."""

_AT_ONCE = 100_000


def table(rows: int, seed: int) -> pa.Table:
    """Rows whose columns depend on each other a little."""
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 8, rows)
    gaps = rng.random((2, rows)) < 0.1
    columns: dict[str, Any] = {
        "index": np.arange(rows) + seed * rows,
        "product": np.char.add("p", (rng.zipf(1.3, rows) % 2000).astype(str)),
        "income": np.exp(rng.normal(10 + group / 8, 1)).round(2),
        "distance": pa.array(rng.gamma(2, 5, rows), mask=gaps[0]),
        "day": pa.array(rng.integers(15_000, 19_000, rows).astype("datetime64[D]")),
        "source": np.full(rows, "shop"),
        "age": pa.array(rng.integers(18, 80, rows), mask=gaps[1]),
        "group": np.char.add("g", group.astype(str)),
    }
    for place in range(20 - len(columns)):
        columns[f"c{place}"] = np.char.add(
            "v", ((group + rng.integers(0, 3, rows)) % (3 + place)).astype(str)
        )
    return pa.table(columns)


def train(rows: int, folder: Path) -> dict[str, float]:
    """Seconds and gigabytes of `xorflow train` on a .csv file for an epoch."""
    write_table(folder / "people.csv", table(rows, 0), {})
    command = ["train", "--data", "people.csv", "--epochs", "1", "--out", "run", "--device", "cpu"]
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "xorflow", *command], cwd=folder, check=True)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "training, GB": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6}


def write_rows(rows: int, folder: Path) -> xf.data.Schema:
    """A .parquet file of so many rows, and the schema of its first ones; some at a time, or they would be in memory."""
    first = table(min(rows, _AT_ONCE), 0)
    with pq.ParquetWriter(folder / "rows.parquet", first.schema) as file:
        for seed in range(-(-rows // _AT_ONCE)):
            file.write_table(table(min(rows, _AT_ONCE), seed))
    return xf.data.Schema.fit(first.slice(0, 50_000))


@torch.no_grad()
def score(folder: Path, rows: int) -> dict[str, float]:
    """The speed of scores beside that of the bare forward pass, batch by batch, and the most gigabytes."""
    schema = write_rows(rows, folder)
    network = xf.MADE(len(schema.columns), hidden=(512,), categories=schema.categories)
    base = xf.FactorisedBase(len(schema.columns), categories=schema.categories, learned=True)
    model = xf.TableModel(schema, xf.LatentFlow([xf.Layer(network)], base))
    batches = open_rows(schema, folder / "rows.parquet").batches(schema.names)
    scoring, bare, scored = [], [], 0
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            break
        model.score(batch)
        scoring.append(time.perf_counter() - began)
        scored += len(batch)
        states = torch.from_numpy(schema.encode(batch).astype(np.int64))
        began = time.perf_counter()
        for part in states.split(2000):
            network({"state": part})
        bare.append(time.perf_counter() - began)
    low, speed, high = np.quantile(np.array(bare) / scoring, [0.25, 0.5, 0.75])
    return {
        "rows": scored,
        "rows a second": scored / sum(scoring),
        "speed": speed,
        "speed, lower quartile of batches": low,
        "speed, upper quartile of batches": high,
        "scoring, GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--training", type=int, default=50_000, help="rows")
    parser.add_argument("--scoring", type=int, default=1_000_000, help="rows")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times = score(Path(folder), given.scoring) | train(given.training, Path(folder))
    times = {name: round(value, 3) for name, value in times.items()} | {"threads": torch.get_num_threads()}
    given.out.write_text(json.dumps({"found": times, "targets": TARGETS}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(times, indent=1))


if __name__ == "__main__":
    main()
