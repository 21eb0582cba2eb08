"""Scores and samples as folders of many files: the same bytes however they are made and whoever is killed."""

from __future__ import annotations

import csv
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attack.processes import small_disk
from command_line import Command, Outcome, finish, start
from tiny_runs import people_file, rows_file
from xorflow.batch import Scorer
from xorflow.cli import sample
from xorflow.data.tables import open_table

KILLS = 4


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of eight files of rows, two of them text, one in a folder below."""
    folder = tmp_path_factory.mktemp("many") / "rows"
    for number in range(6):
        table = open_table(people_file(folder.parent / "some.csv", rows=3000, seed=number)).read()
        table = table.set_column(3, "rooms", table["rooms"].cast(pa.int64()))
        path = folder / f"below/{number}.parquet" if number == 5 else folder / f"{number}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
    for number in range(6, 8):
        people_file(folder / f"{number}.csv", rows=2000, seed=number)
    (folder / "_SUCCESS").touch()
    (folder / ".part.csv").write_text("half", encoding="utf-8")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_file_of_rows_has_a_file_of_scores(
    people: Path, many: Path, tmp_path: Path, xorflow: Command
) -> None:
    run, out = people / "run", tmp_path / "scores"
    said = xorflow("score", run, "--data", f"{many}/**/*.parquet", "--out", out, "--jobs", "1")
    assert (said.code, said.err) == (0, "")
    assert {*contents(out)} == {"manifest.json", *(f"{n}.parquet" for n in range(5)), "below/5.parquet"}
    scorer, total = Scorer(run), 0.0
    for path in (many / "0.parquet", many / "below/5.parquet"):
        found = pq.read_table(out / path.relative_to(many))
        expected = scorer(pq.read_table(path))["log_prob"]
        assert found.column_names == ["log_prob"]
        assert np.array_equal(found["log_prob"].to_numpy(), expected.to_numpy())
    for path in out.rglob("*.parquet"):
        total += float(pq.read_table(path)["log_prob"].to_numpy().sum())
    assert f"wrote log_prob of 18,000 rows to {out}; mean {total / 18000:.4f} nats" in said.out


def test_neither_the_number_of_processes_nor_the_kind_of_file_changes_a_bit(
    people: Path, many: Path, tmp_path: Path, xorflow: Command
) -> None:
    run = people / "run"
    for jobs in ("1", "2"):
        said = xorflow("score", run, "--data", many, "--out", tmp_path / jobs, "--jobs", jobs, "--json")
        assert (said.code, said.err) == (0, "")
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert "7.csv.parquet" in contents(tmp_path / "1")
    assert xorflow("score", run, "--data", many / "7.csv", "--out", tmp_path / "7.npy").code == 0
    found = pq.read_table(tmp_path / "1/7.csv.parquet")["log_prob"].to_numpy()
    assert np.array_equal(found, np.load(tmp_path / "7.npy"))
    again = xorflow("score", run, "--data", many, "--out", tmp_path / "2", "--json")
    assert again.out == said.out


def _stamp(out: Path) -> int:
    """Another one as soon as a process has begun to work there."""
    manifest = out / "manifest.json"
    return manifest.stat().st_mtime_ns if manifest.exists() else 0


def _killed(command: tuple[str | Path, ...], out: Path, chance: random.Random) -> int:
    """How often the command, and all that it began, was killed at a random moment before it came to its end."""
    killed = 0
    for _ in range(KILLS):
        before = _stamp(out)
        process = start(*command)
        limit = time.monotonic() + 60
        while _stamp(out) == before and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 4))
        process.send_signal(chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)))
        ended = finish(process)
        assert "Traceback" not in ended.err
        killed += ended.code != 0
    return killed


def _assert_survives(command: tuple[str | Path, ...], folder: Path, xorflow: Command) -> None:
    assert xorflow(*command, "--out", folder / "whole").code == 0
    out = folder / "out"
    killed = _killed((*command, "--jobs", "2", "--out", out), out, random.Random(0))
    last = xorflow(*command, "--out", out)
    assert (last.code, last.err) == (0, "")
    assert killed >= 1
    assert contents(out) == contents(folder / "whole")  # nothing is left half written, either


def test_scores_of_a_command_that_is_killed_over_and_over_are_the_same(
    people: Path, many: Path, tmp_path: Path, xorflow: Command
) -> None:
    _assert_survives(("score", people / "run", "--data", many), tmp_path, xorflow)


def test_so_are_samples(people: Path, tmp_path: Path, xorflow: Command) -> None:
    _assert_survives(("sample", people / "run", "--count", "450000"), tmp_path, xorflow)


def test_parts_are_samples_of_the_seed_and_their_number(
    people: Path, tmp_path: Path, xorflow: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "PART", 5000)
    command = ("sample", people / "run", "--jobs", "1")
    for name, count, seed in (("a", 12000, 0), ("b", 20000, 0), ("c", 12000, 1)):
        said = xorflow(*command, "--count", str(count), "--seed", str(seed), "--out", tmp_path / name)
        assert said.out == f"wrote {count:,} rows in {-(-count // 5000)} files to {tmp_path / name}\n"
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert {*a} == {"manifest.json", *(f"part-00000{n}.parquet" for n in range(3))}
    assert [a[f"part-00000{n}.parquet"] == b[f"part-00000{n}.parquet"] for n in range(3)] == [
        True,
        True,
        False,
    ]
    tables = [pq.read_table(tmp_path / f"a/part-00000{n}.parquet") for n in range(3)]
    assert [len(table) for table in tables] == [5000, 5000, 2000]
    assert tables[2].equals(pq.read_table(tmp_path / "b/part-000002.parquet").slice(0, 2000))
    assert not tables[0].equals(tables[1])
    assert not tables[0].equals(pq.read_table(tmp_path / "c/part-000000.parquet"))
    assert c.keys() == a.keys()
    colours = pa.concat_tables(tables)["colour"].to_pylist()
    with (people / "people.csv").open(encoding="utf-8") as file:
        known = [row["colour"] for row in csv.DictReader(file)]
    for colour in ("blue", "green", "red"):  # of 12,000 rows, and 200 that it was trained on
        assert abs(colours.count(colour) / len(colours) - known.count(colour) / len(known)) < 0.15


def test_columns_that_are_ignored_are_named(
    people: Path, many: Path, tmp_path: Path, xorflow: Command
) -> None:
    (tmp_path / "rows").mkdir()
    table = pq.read_table(many / "0.parquet")
    pq.write_table(table.append_column("id", table["rooms"]), tmp_path / "rows/0.parquet")
    said = xorflow("score", people / "run", "--data", tmp_path / "rows", "--out", tmp_path / "out")
    assert (said.code, said.err) == (0, f"{tmp_path / 'rows'} has columns that are ignored: 'id'\n")


def test_arrays_are_scored_and_sampled_too(deep: Path, tmp_path: Path, xorflow: Command) -> None:
    (tmp_path / "rows").mkdir()
    for number in range(2):
        rows_file(tmp_path / f"rows/{number}.npy", rows=50, seed=number)
    command = ("score", deep / "run", "--data", tmp_path / "rows", "--samples", "4")
    assert xorflow(*command, "--out", tmp_path / "scores", "--jobs", "1").code == 0
    found = pq.read_table(tmp_path / "scores/1.npy.parquet")
    assert (found.column_names, len(found)) == (["lower_bound"], 50)
    assert xorflow("sample", deep / "run", "--count", "30", "--out", tmp_path / "many").code == 0
    assert np.load(tmp_path / "many/part-000000.npy").shape == (30, 6)


# ---- refused ----


def _refused(outcome: Outcome, *words: str) -> None:
    said = outcome.refused()
    assert all(word in said for word in words), said


def test_a_folder_goes_on_only_with_the_same(
    people: Path, many: Path, tmp_path: Path, xorflow: Command
) -> None:
    rows, out = tmp_path / "rows", tmp_path / "out"
    shutil.copytree(many, rows)
    command = ("score", people / "run", "--data", f"{rows}/[67].csv", "--out", out, "--jobs", "1")
    assert xorflow(*command).code == 0
    before = contents(out)
    _refused(xorflow(*command, "--flow", "deterministic"), "another 'options'")
    _refused(xorflow("score", people / "run", "--data", f"{rows}/6.csv", "--out", out), "another 'data'")
    _refused(xorflow("sample", people / "run", "--count", "10", "--out", out), "another 'options'")
    shutil.copytree(people / "run", tmp_path / "run")
    assert (
        xorflow("train", "--config", people / "run/config.json", "--seed", "9", "--out", tmp_path / "r").code
        == 0
    )
    _refused(xorflow("score", tmp_path / "r", *command[2:]), "another 'run'")
    os.utime(rows / "6.csv", (1, 1))
    _refused(xorflow(*command), "another 'data'")
    assert contents(out) == before


def test_folders_that_are_not_ours_stay_as_they_are(
    people: Path, many: Path, tmp_path: Path, xorflow: Command
) -> None:
    command = ("score", people / "run", "--data", f"{many}/*.csv", "--out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine", encoding="utf-8")
    _refused(xorflow(*command, tmp_path / "full"), "is not empty")
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    _refused(xorflow(*command, tmp_path / "file"), "is a file")
    _refused(xorflow(*command, many), "never holds what the command reads")
    _refused(xorflow(*command, people / "run"), "is not empty")
    _refused(
        xorflow(*command, tmp_path / "out", "--force"), "--force would have no effect where --out is a folder"
    )
    one = ("score", people / "run", "--data", many / "6.csv", "--jobs", "2")
    _refused(xorflow(*one), "--jobs would have no effect where --out is no folder")
    _refused(
        xorflow("sample", people / "run", "--jobs", "2"),
        "--jobs would have no effect where --out is no folder",
    )
    _refused(
        xorflow("sample", people / "run", "--out", tmp_path / "out", "--flow", "refitted"),
        "refitted base needs",
    )
    assert {*os.listdir(tmp_path)} == {"full", "file"}


def test_files_that_cannot_be_scored_are_named_before_any_is(
    people: Path, many: Path, tmp_path: Path, xorflow: Command
) -> None:
    rows = tmp_path / "rows"
    shutil.copytree(many, rows)
    command = ("score", people / "run", "--data", rows, "--out", tmp_path / "out")
    whole = (rows / "2.parquet").read_bytes()
    (rows / "2.parquet").write_bytes(whole[:-100])
    _refused(xorflow(*command), "2.parquet cannot be read as parquet")
    pq.write_table(pq.read_table(many / "2.parquet").drop_columns(["pet"]), rows / "2.parquet")
    _refused(xorflow(*command), "2.parquet has no 'pet'")
    times = pa.array([0] * 3000, pa.timestamp("s"))
    pq.write_table(pq.read_table(many / "2.parquet").set_column(0, "colour", times), rows / "2.parquet")
    _refused(xorflow(*command), "2.parquet", "'colour'", "convert it")
    _refused(
        xorflow("score", people / "run", "--data", f"{rows}/*.feather", "--out", tmp_path / "out"),
        "names no data",
    )
    _refused(xorflow("score", people / "run", "--data", tmp_path, "--out", tmp_path / "out"), "names no data")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_file_that_turns_out_to_be_damaged_fails_alone(
    people: Path, many: Path, tmp_path: Path, xorflow: Command, jobs: str
) -> None:
    rows, out = tmp_path / "rows", tmp_path / "out"
    shutil.copytree(many, rows)
    for name in ("2.parquet", "below/5.parquet"):
        content = bytearray((rows / name).read_bytes())
        content[4:200] = bytes(196)  # what its footer tells is whole
        (rows / name).write_bytes(content)
    command = ("score", people / "run", "--data", f"{rows}/**/*.parquet", "--out", out, "--jobs", jobs)
    said = xorflow(*command)
    _refused(said, "cannot be read as parquet", "there are problems in", "all other files are there")
    assert all(name in said.err for name in ("2.parquet", "below/5.parquet"))
    assert {*contents(out)} == {"manifest.json", *(f"{n}.parquet" for n in (0, 1, 3, 4))}
    _refused(xorflow(*command), "cannot be read as parquet")


def test_a_disk_that_is_full_is_a_line_and_with_room_again_the_command_goes_on(
    people: Path, many: Path, tmp_path: Path, xorflow: Command
) -> None:
    command = ("score", people / "run", "--data", many)
    assert xorflow(*command, "--out", tmp_path / "whole").code == 0
    with small_disk(tmp_path / "disk") as disk:
        if disk is None:
            pytest.skip("a file system of its own is not allowed here")
        with (disk / "ballast").open("wb", buffering=0) as stream:
            while (room := shutil.disk_usage(disk).free - 40_000) > 0:
                stream.write(bytes(room))
        said = xorflow(*command, "--out", disk / "out")
        _refused(said, "could not write", "No space left on device", "problems in")
        assert not [*(disk / "out").glob(".*")]
        (disk / "ballast").unlink()
        assert xorflow(*command, "--out", disk / "out").code == 0
        assert contents(disk / "out") == contents(tmp_path / "whole")


def test_a_fault_of_ours_is_no_mistake_of_the_user(
    people: Path,
    tmp_path: Path,
    xorflow: Command,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*arguments: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(sample, "narrow", fail)
    said = xorflow("sample", people / "run", "--count", "5", "--out", tmp_path / "out", "--jobs", "1")
    assert said.code == 1
    assert said.out == ""
    assert "Traceback" in caplog.text
    assert said.err.endswith(
        "error: part-000000.parquet: KeyError: 'a fault'; all other files are there, and are kept\n"
    )


def test_ray_that_is_not_installed_is_an_extra(
    people: Path, many: Path, tmp_path: Path, xorflow: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xorflow.cli.parts.find_spec", lambda name: None)
    command = ("score", people / "run", "--data", many, "--out", tmp_path / "out", "--engine", "ray")
    _refused(xorflow(*command), "pip install 'xorflow[ray]'")
    assert not (tmp_path / "out").exists()
