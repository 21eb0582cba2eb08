"""A run and sixteen small files of rows, as engines find them, and a worker that is killed in the middle."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tiny_runs import people_file, tiny_options, train_run
from xorflow.batch import Scorer
from xorflow.data.tables import open_table

FILES, ROWS = 16, 5000


@dataclass(frozen=True)
class World:
    """A run, the folder of rows, whose `id` counts them, and the log p of each row."""

    run: Path
    rows: Path
    log_prob: np.ndarray

    def require_every_row_once(self, scored: pa.Table) -> None:
        ids = scored["id"].to_numpy()
        assert sorted(ids) == [*range(FILES * ROWS)]
        assert np.array_equal(scored["log_prob"].to_numpy(), self.log_prob[ids])  # bit for bit


def make_world(folder: Path) -> World:
    people = people_file(folder / "people.csv", rows=FILES * ROWS)
    train_run(tiny_options(people), folder / "run")
    (folder / "rows").mkdir()
    table = open_table(people).read().append_column("id", pa.array(range(FILES * ROWS)))
    for number in range(FILES):
        pq.write_table(table.slice(number * ROWS, ROWS), folder / f"rows/{number:02d}.parquet")
    scored = Scorer(folder / "run")(table)
    return World(folder / "run", folder / "rows", scored["log_prob"].to_numpy())


def dying(scorer: Scorer, folder: Path) -> Callable[[pa.Table], pa.Table]:
    """The scorer, in a worker that is killed in its third batch, the first one that comes so far; each batch leaves a mark."""

    def score(table: pa.Table) -> pa.Table:
        import signal
        import time
        import uuid

        scored = scorer(table)
        if len(table):
            pid = os.getpid()
            (folder / f"{pid}-{uuid.uuid4().hex}").touch()
            time.sleep(0.1)  # so that no worker is done with all before another has begun
            if len([*folder.glob(f"{pid}-*")]) == 3:
                try:
                    (folder / "killed").touch(exist_ok=False)
                except FileExistsError:
                    return scored
                os.kill(pid, signal.SIGKILL)
        return scored

    return score


def workers(folder: Path) -> dict[str, int]:
    """How many batches each process began."""
    pids = [path.name.split("-")[0] for path in folder.glob("*-*")]
    return {pid: pids.count(pid) for pid in pids}
