"""Dask on this machine: two workers, one of which is killed in the middle, and every row once."""

from __future__ import annotations

from pathlib import Path

import dask.dataframe as dd
import pandas as pd
import pyarrow as pa
from distributed import Client, LocalCluster

from engines.world import FILES, World, dying, workers
from xorflow.batch import Scorer


def test_map_partitions_with_a_killed_worker(world: World, tmp_path: Path) -> None:
    scorer = dying(Scorer(world.run), tmp_path)

    def scored(rows: pd.DataFrame) -> pd.DataFrame:
        return scorer(pa.Table.from_pandas(rows, preserve_index=False)).to_pandas()

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as cluster,
        Client(cluster),
    ):
        frame = dd.read_parquet(str(world.rows), split_row_groups=True)
        assert frame.npartitions == FILES
        meta = frame._meta.assign(log_prob=0.0)
        table = pa.Table.from_pandas(frame.map_partitions(scored, meta=meta).compute())
    world.require_every_row_once(table)
    assert (tmp_path / "killed").exists()
    assert len(workers(tmp_path)) >= 2
    assert sum(workers(tmp_path).values()) > FILES
