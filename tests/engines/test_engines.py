"""Ray and Dask on this machine: two workers, one of which is killed in the middle, and every row once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import dask.dataframe as dd
import pandas as pd
import psutil
import pyarrow as pa
import pytest
import ray
import ray.data
from distributed import Client, LocalCluster

from command_line import Outcome, finish, start
from engines.world import FILES, World, dying, workers
from xorflow.batch import Scorer

PATIENCE = 400
"""Seconds; on two cores that are free a command takes ten."""


@pytest.fixture
def two_workers() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("two_workers")
def test_map_batches_with_a_killed_worker(world: World, tmp_path: Path) -> None:
    scorer = dying(Scorer(world.run), tmp_path)
    data = ray.data.read_parquet(str(world.rows)).repartition(FILES)
    scored = data.map_batches(scorer, batch_format="pyarrow")
    world.require_every_row_once(pa.concat_tables(ray.get(scored.to_arrow_refs())))
    assert (tmp_path / "killed").exists()
    assert len(workers(tmp_path)) >= 2
    assert sum(workers(tmp_path).values()) > FILES


@pytest.mark.usefixtures("two_workers")
def test_a_scorer_is_what_map_batches_takes(world: World) -> None:
    scored = ray.data.read_parquet(str(world.rows)).map_batches(Scorer(world.run), batch_format="pyarrow")
    world.require_every_row_once(pa.concat_tables(ray.get(scored.to_arrow_refs())))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def score(world: World, out: Path, *more: str) -> Outcome:
    return finish(start("score", world.run, "--data", world.rows, "--out", out, *more), PATIENCE)


def test_the_command_with_a_killed_worker_makes_the_files_of_processes(world: World, tmp_path: Path) -> None:
    assert score(world, tmp_path / "whole", "--jobs", "1").code == 0
    out = tmp_path / "out"
    process = start("score", world.run, "--data", world.rows, "--out", out, "--engine", "ray", "--jobs", "2")
    killed, limit = 0, time.monotonic() + PATIENCE
    while not killed and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
        if len([*out.glob("*.parquet")]) >= 2:
            killed = _kill_worker(process.pid)
    heard = _listening(process.pid)
    said = finish(process, PATIENCE)
    assert killed
    assert heard == {"127.0.0.1"}
    assert said.code == 0
    assert contents(out) == contents(tmp_path / "whole")
    assert said.out.count("\n") == 1, said  # which workers died is said elsewhere
    assert score(world, out, "--engine", "ray").out == said.out  # with nothing left to do


def _listening(driver: int) -> set[str]:
    """The addresses at which the command and all that it began can be reached."""
    heard: set[str] = set()
    for process in [psutil.Process(driver), *psutil.Process(driver).children(recursive=True)]:
        with suppress(psutil.Error):
            heard |= {c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
    return {address.removeprefix("::ffff:") for address in heard}


def _kill_worker(driver: int) -> int:
    """Kill a process that works on a file."""
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if process.name().startswith("ray::Map") or "ray::Map" in " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
                return process.pid
        except psutil.Error:
            continue
    return 0


def test_a_cluster_that_is_not_there_is_one_line(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    said = score(world, tmp_path / "out", "--engine", "ray")
    assert "Ray could not finish" in said.refused()


def test_a_damaged_file_fails_alone(world: World, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for path in sorted(world.rows.iterdir())[:4]:
        content = bytearray(path.read_bytes())
        if path.name == "02.parquet":
            content[4:100] = bytes(96)
        (tmp_path / "rows" / path.name).write_bytes(content)
    command = ("score", world.run, "--data", tmp_path / "rows", "--out", tmp_path / "out", "--engine", "ray")
    assert (
        "02.parquet cannot be read as parquet" in finish(start(*command, "--jobs", "2"), PATIENCE).refused()
    )
    assert {*contents(tmp_path / "out")} == {"manifest.json", *(f"0{n}.parquet" for n in (0, 1, 3))}


# ---- Dask ----


def test_map_partitions_of_dask_with_a_killed_worker(world: World, tmp_path: Path) -> None:
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
