"""Tables of Parquet, Feather and frames; what is written can be read."""

import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from xorflow.data.arrow import emptied
from xorflow.data.tables import open_table, write_table
from xorflow.errors import DataError

TABLE = pa.table(
    {
        "word": pa.array(["x", None, 'a "b", c']),
        "whole": pa.array([1, 2, None], pa.int32()),
        "number": pa.array([0.5, None, -2e300]),
        "day": pa.array([datetime.date(2020, 1, 1), None, datetime.date(1900, 2, 3)]),
        "truth": pa.array([True, None, False]),
        "kind": pa.array(["u", "v", "u"]).dictionary_encode(),
    }
)


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
def test_a_table_keeps_its_types(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    write_table(path, TABLE, {})
    assert open_table(path).read().equals(TABLE)
    assert open_table(path).read(["day", "word"]).equals(TABLE.select(["day", "word"]))


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".data"])
def test_text_keeps_the_texts(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    write_table(path, TABLE, {"separator": ";"})
    read = open_table(path, header=suffix != ".data").read()
    assert read.columns[0].to_pylist() == ["x", None, 'a "b", c']
    assert read.columns[3].to_pylist() == ["2020-01-01", None, "1900-02-03"]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".data"])
@pytest.mark.parametrize("cells", [["x", None, None, "y"], [1, None], [None, "x", None]])
def test_a_gap_in_the_only_column_is_a_row(tmp_path: Path, suffix: str, cells: list[object]) -> None:
    path = tmp_path / f"x{suffix}"
    write_table(path, pa.table({"a": cells}), {})
    read = open_table(path, header=suffix != ".data").read()
    assert read.columns[0].to_pylist() == [None if cell is None else str(cell) for cell in cells]


def test_only_what_needs_quotes_has_them(tmp_path: Path) -> None:
    table = pa.table({"a;b": ["x", "y z", None], "c": [1, 2, 3]})
    write_table(tmp_path / "x.csv", table, {})
    assert (tmp_path / "x.csv").read_text() == "a;b,c\nx,1\ny z,2\n,3\n"
    write_table(tmp_path / "x.csv", table, {"separator": ";"})
    assert (tmp_path / "x.csv").read_text() == '"a;b";"c"\nx;1\ny z;2\n;3\n'
    write_table(tmp_path / "x.csv", pa.table({"a": ["x", "1,5"]}), {})
    assert (tmp_path / "x.csv").read_text() == 'a\n"x"\n"1,5"\n'


def test_many_batches_are_one_table(tmp_path: Path) -> None:
    table = pa.table({"a": np.arange(100_000), "b.c": np.arange(100_000) % 7})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=30_000)
    source = open_table(tmp_path / "x.parquet")
    assert next(len(batch) for batch in source.batches(["a"])) <= 2**14
    assert source.read().equals(table)


def test_frames_come_without_their_packages() -> None:
    values = {"n": [1.5, None, 2.0], "s": ["x", "y", None]}
    for frame in (pd.DataFrame(values), pl.DataFrame(values), pa.table(values)):
        assert open_table(frame).read().num_rows == 3
    indexed = pd.DataFrame(values, index=[5, 7, 9])
    assert "__index_level_0__" in open_table(indexed).types


@pytest.mark.parametrize(
    "frame", [pd.DataFrame([[1, 2]], columns=["a", "a"]), pd.DataFrame({"a": [1, "x"]}), pd.DataFrame()]
)
def test_frames_that_are_no_tables(frame: pd.DataFrame) -> None:
    with pytest.raises(DataError):
        open_table(frame).read()


@pytest.mark.parametrize("suffix", [".parquet", ".feather"])
def test_damaged_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    write_table(path, TABLE, {})
    whole = path.read_bytes()
    for content in (
        whole[:50],
        whole[:-4],
        b"PAR1" + bytes(100),
        b"a,b\n1,2\n",
        whole[:60] + bytes(20) + whole[80:],
    ):
        path.write_bytes(content)
        try:
            open_table(path).read()  # bytes that nobody reads may differ
        except DataError as error:
            assert "truncated, damaged or another format" in str(error)  # noqa: PT017


def test_what_no_table_has(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="header is of files of text"):
        open_table(tmp_path / "x.parquet", header=True)
    pq.write_table(TABLE.slice(0, 0), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="at least one row"):
        open_table(tmp_path / "x.parquet").read()
    with pytest.raises(DataError, match=r"tables are written to \.csv"):
        write_table(tmp_path / "x.txt", TABLE, {})


@pytest.mark.parametrize("suffix", [".feather", ".parquet"])
def test_a_name_of_a_column_that_is_no_text_is_damage(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    write_table(path, pa.table({"the name": [1, 2], "b": [3, 4]}), {})
    path.write_bytes(path.read_bytes().replace(b"the name", b"\xf8he name"))
    with pytest.raises(DataError, match="truncated, damaged or another format"):
        open_table(path)


def test_slices_of_texts_are_emptied_and_not_damaged():
    cells = pa.array(["header", "10", "NA"])[1:]
    assert emptied(cells, pa.array([False, True])).to_pylist() == ["10", None]
    assert emptied(pa.chunked_array([cells]), pa.array([True, False])).to_pylist() == [None, "NA"]
