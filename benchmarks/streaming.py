"""Training on more rows than memory holds: time and memory beside those of rows in memory.

    python benchmarks/streaming.py [--out benchmarks/streaming.json] [--rows 10000000] [--part 400000] [--turns 9]

Made by the script: Parquet files of 20 columns, four of them with 1,000 categories. `xorflow train` takes one epoch of all rows, a
process of its own, whose largest resident memory is told. On a part that fits, epochs from the files take turns with epochs from
memory; told is the median of the ratio of rows a second, with the interval that holds the middle half of the turns.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import xorflow as xf
from xorflow.estimators import MaximumLikelihood
from xorflow.training import Options, Trainer

TARGETS = {"memory, GB": 1.5, "speed": 0.8}
"""At most, at least."""

_A_FILE, _A_GROUP = 500_000, 100_000
_BATCH, _HIDDEN = 1024, 64


def write_files(rows: int, folder: Path) -> None:
    """Columns that depend on a group: four of 1,000 words, two of numbers, the rest of a few integers."""
    folder.mkdir()
    for first in range(0, rows, _A_FILE):
        rng, count = np.random.default_rng(first), min(_A_FILE, rows - first)
        group = rng.integers(0, 10, count)
        words = np.array([f"word {number}" for number in range(1000)])
        columns: dict[str, np.ndarray] = {
            f"word {place}": words[(100 * group + rng.geometric(0.02, count)) % 1000] for place in range(4)
        }
        columns |= {f"number {place}": rng.normal(group, 1).round(3) for place in range(2)}
        columns |= {f"few {place}": (group + rng.integers(0, 3, count)) % (place + 3) for place in range(14)}
        pq.write_table(pa.table(columns), folder / f"{first:09d}.parquet", row_group_size=_A_GROUP)


def whole(folder: Path, rows: int) -> dict[str, float]:
    """An epoch of all rows, from the command line."""
    command = [
        "train",
        "--data",
        str(folder),
        "--stream",
        "always",
        "--epochs",
        "1",
        "--out",
        str(folder.parent / "run"),
    ]
    command += [
        "--batch-size",
        str(_BATCH),
        "--conditioner",
        f"made:hidden={_HIDDEN}",
        "--device",
        "cpu",
        "--recipe",
        "none",
    ]
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "xorflow", *command], check=True)
    seconds = time.perf_counter() - began
    result = json.loads((folder.parent / "run/result.json").read_text())
    return {
        "rows": rows,
        "seconds in all": seconds,
        "training, seconds": result["seconds"],
        "training, rows a second": result["data"]["sizes"]["train"] / result["seconds"],
        "memory, GB": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6,
    }


def trainer(folder: Path, stream: str, turns: int) -> Trainer:
    data = xf.data.load(folder, stream=stream)  # pyright: ignore[reportArgumentType]
    net = xf.MADE(data.features, (_HIDDEN,), categories=data.categories)
    flow = xf.LatentFlow(
        [xf.Layer(net)], xf.FactorisedBase(data.features, categories=data.categories, learned=True)
    )
    options = Options(data="rows", layers=None, epochs=turns + 1, batch_size=_BATCH, device="cpu")
    return Trainer(flow, MaximumLikelihood(), data, options)


def in_turns(folder: Path, turns: int) -> dict[str, float | list[float]]:
    """Rows a second from files over those from memory."""
    both = [trainer(folder, stream, turns) for stream in ("always", "never")]
    ratios = []
    for turn in range(turns + 1):
        times = []
        for one in both if turn % 2 else both[::-1]:
            one.progress.batch = 0
            began = time.perf_counter()
            one.train_epoch()
            times.append(time.perf_counter() - began)
        streamed, held = times if turn % 2 else times[::-1]
        ratios += [held / streamed] if turn else []  # the first one warms up
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "part, rows": both[1].rows,
        "turns": turns,
        "speed": statistics.median(ratios),
        "middle half": [low, high],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--part", type=int, default=400_000)
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    found: dict = {"threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory() as name:
        write_files(given.part, Path(name) / "part")
        found |= in_turns(Path(name) / "part", given.turns)
        print(json.dumps(found, indent=1), flush=True)
        write_files(given.rows, Path(name) / "rows")
        found |= whole(Path(name) / "rows", given.rows)
    print(json.dumps(found, indent=1))
    given.out.write_text(json.dumps({"found": found, "targets": TARGETS}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
