"""Scores of a folder of Parquet files by processes, end to end, beside a bare forward pass; and the memory that they take.

    python benchmarks/endless.py [--out benchmarks/endless.json] [--files 8] [--rows 10000] [--turns 9] [--long 100000]

A MADE of 512 units over the 20 columns of benchmarks/tables.py. In each turn take their turns: one process with one thread, two such
processes, and one process with two threads, each of which reads all files, scores them and writes the scores; and that network's
bare forward pass on the same states, which are tensors in memory, with two threads. Processes have begun before; how long the
command takes to begin is a figure of its own. Ratios are of one turn; their median is given with the middle half of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import xorflow as xf
from tables import table
from xorflow.batch import Scorer
from xorflow.cli.score import score_file

TARGETS = {
    "two processes to one": 1.7,
    "two processes to two threads": 1.0,
    "two processes to the bare pass": 0.5,
}
"""At least, of speeds."""


def write_world(folder: Path, files: int, rows: int) -> torch.Tensor:
    """A run and its files of rows; the states of all rows."""
    (folder / "rows").mkdir()
    tables = [table(rows, seed) for seed in range(files)]
    schema = xf.data.Schema.fit(pa.concat_tables(tables).slice(0, 50_000))
    for number, part in enumerate(tables):
        pq.write_table(part, folder / f"rows/{number:03d}.parquet")
    columns = len(schema.columns)
    network = xf.MADE(columns, hidden=(512,), categories=schema.categories)
    base = xf.FactorisedBase(columns, categories=schema.categories, learned=True)
    xf.save(xf.LatentFlow([xf.Layer(network)], base), folder / "run", schema)
    return torch.cat([torch.from_numpy(schema.encode(part).astype("int64")) for part in tables])


def pool(processes: int, threads: int, stack: ExitStack) -> ProcessPoolExecutor:
    """Processes that have begun, with so many threads each."""
    context = multiprocessing.get_context("spawn")
    made = stack.enter_context(ProcessPoolExecutor(processes, context, torch.set_num_threads, (threads,)))
    list(made.map(time.sleep, [2.0] * processes))
    return made


def score_all(made: ProcessPoolExecutor, scorer: Scorer, folder: Path) -> None:
    out = folder / "scores"
    paths = sorted((folder / "rows").iterdir())
    jobs = [made.submit(score_file, scorer, None, str(path), out / path.name) for path in paths]
    for job in jobs:
        job.result()
    shutil.rmtree(out)


@torch.no_grad()
def bare_pass(network: torch.nn.Module, states: torch.Tensor) -> None:
    for part in states.split(2000):
        network({"state": part})


def take_turns(actions: Mapping[str, Callable[[], None]], turns: int) -> dict[str, list[float]]:
    """Seconds of each action in each turn, in an order that alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for action in actions.values():
        action()
    for turn in range(turns):
        for name, action in [*actions.items()][:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(of: Sequence[float], to: Sequence[float]) -> dict[str, float]:
    """How many times as fast the second is: the median over turns, and the middle half."""
    each = [a / b for a, b in zip(of, to, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
    return {"median": round(middle, 3), "from": round(low, 3), "to": round(high, 3)}


def command(folder: Path, data: str) -> tuple[float, float]:
    """Seconds of the command with two processes, and the most megabytes of one of its processes."""
    code = (
        "import resource, sys\nfrom xorflow.cli import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
        "    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN\n"
        "    print(max(resource.getrusage(kind).ru_maxrss for kind in kinds))"
    )
    words = ["score", str(folder / "run"), "--data", data, "--out", str(folder / "out"), "--jobs", "2"]
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True, text=True)
    shutil.rmtree(folder / "out")
    return time.perf_counter() - began, int(done.stdout.split()[-1]) / 1000


def memory(folder: Path, rows: int) -> dict[str, float]:
    """Megabytes of a process that scores a file of so many rows, and of one that scores eight times as many."""
    found = {}
    for times in (1, 8):
        path = folder / f"long-{times}.parquet"
        with pq.ParquetWriter(path, table(1, 0).schema) as file:
            for seed in range(times):
                file.write_table(table(rows, seed))
        found[f"{times * rows} rows"] = round(command(folder, str(path))[1])
    return found


def measure(folder: Path, files: int, rows: int, turns: int, long: int) -> dict[str, object]:
    states = write_world(folder, files, rows)
    network = xf.load(folder / "run").layers[0].conditioner
    scorer = Scorer(folder / "run")
    with ExitStack() as stack:
        one, two, threads = (pool(*kind, stack) for kind in ((1, 1), (2, 1), (1, 2)))
        torch.set_num_threads(2)
        actions = {
            "one process": lambda: score_all(one, scorer, folder),
            "two processes": lambda: score_all(two, scorer, folder),
            "two threads": lambda: score_all(threads, scorer, folder),
            "bare pass, two threads": lambda: bare_pass(network, states),
        }
        seconds = take_turns(actions, turns)
    pair = seconds["two processes"]
    return {
        "rows": len(states),
        "turns": turns,
        "rows a second": {name: round(len(states) / statistics.median(s)) for name, s in seconds.items()},
        "two processes to one": ratio(seconds["one process"], pair),
        "two processes to two threads": ratio(seconds["two threads"], pair),
        "two processes to the bare pass": ratio(seconds["bare pass, two threads"], pair),
        "seconds of the command on one small file": round(_begin(folder), 1),
        "megabytes": memory(folder, long),
    }


def _begin(folder: Path) -> float:
    pq.write_table(table(10, 0), folder / "small.parquet")
    return command(folder, str(folder / "small.parquet"))[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--rows", type=int, default=10_000, help="of a file")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--long", type=int, default=100_000, help="rows of the file that shows memory")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), given.files, given.rows, given.turns, given.long)
    found |= {"cores": os.cpu_count(), "torch": torch.__version__}
    text = json.dumps({"found": found, "targets": TARGETS}, indent=1)
    given.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
