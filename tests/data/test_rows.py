"""Rows to be scored and rows that were sampled."""

import csv
import datetime
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from xorflow.data import Schema, load, load_rows, write_rows
from xorflow.data.tables import open_table, write_table
from xorflow.errors import DataError

TABLE = pa.table({"colour": ["red", "blue", "red"] * 5, "size": [10, 1, 2] * 5})
SCHEMA = Schema.fit(TABLE, layout={"format": "csv", "separator": ",", "header": True})
CODES = torch.tensor([[1, 2], [0, 0], [1, 1]])
KINDS = (2, 3)


@pytest.mark.parametrize("name", ["x.npy", "x.csv", "x.tsv", "x.parquet", "x.feather"])
def test_what_is_written_can_be_read(tmp_path: Path, name: str) -> None:
    schema = None if name == "x.npy" else SCHEMA
    path = tmp_path / name
    path.write_text("an older file")
    write_rows(path, CODES, schema)
    read = load_rows(path, categories=KINDS, schema=schema)
    assert read.dtype == torch.uint8
    assert read.tolist() == CODES.tolist()
    assert [file.name for file in tmp_path.iterdir()] == [name]  # no temporary file is left


def test_csv_is_decoded(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.csv", CODES.numpy(), SCHEMA)
    assert (tmp_path / "x.csv").read_bytes() == b"colour,size\nred,10\nblue,1\nred,2\n"


def test_npy_holds_codes_in_the_smallest_type(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.npy", CODES)
    assert np.load(tmp_path / "x.npy").dtype == np.uint8
    write_rows(tmp_path / "x.npy", [[256, 0]])
    assert np.load(tmp_path / "x.npy").dtype == np.int64
    assert load_rows(tmp_path / "x.npy", categories=(257, 2)).tolist() == [[256, 0]]


def test_columns_are_matched_by_name(write: Callable[[str, str], Path]) -> None:
    for text in ("colour,size\nred,10\n", " size , new, colour\n10.0,x,red\n", "size;colour\n10;red\n"):
        assert load_rows(write("x.csv", text), categories=KINDS, schema=SCHEMA).tolist() == [[1, 2]]
    headless = write("x.csv", "red,10\n")
    assert load_rows(headless, categories=KINDS, schema=SCHEMA, header=False).tolist() == [[1, 2]]
    with pytest.raises(
        DataError, match=r"has no 'colour', 'size': .* or say --no-header if its first line is a row"
    ):
        load_rows(headless, categories=KINDS, schema=SCHEMA)


def test_columns_without_names_are_matched_by_place(write: Callable[[str, str], Path]) -> None:
    trained = load(write("x.csv", "a,1\nb,2\n" * 10))
    assert trained.schema is not None
    assert trained.schema.names == ("column 1", "column 2")
    for text, header in (("b,1\n", None), ("word,number\nb,1\n", True)):
        path = write("y.csv", text)
        rows = load_rows(path, categories=trained.categories, schema=trained.schema, header=header)
        assert rows.tolist() == [[1, 0]]


def test_beside_rows_without_a_header_no_first_line_is_taken_for_one(
    write: Callable[[str, str], Path], tmp_path: Path
) -> None:
    trained = load(write("x.data", "blue,k\nred,u\npink,v\n" * 20))
    assert trained.schema is not None
    for count in (1, 3):  # all different, as names are
        write_rows(tmp_path / "y.csv", trained.train.values[:count], trained.schema)
        rows = load_rows(tmp_path / "y.csv", categories=trained.categories, schema=trained.schema)
        assert rows.tolist() == trained.train.values[:count].tolist()


def test_what_was_never_seen_is_something_else(write: Callable[[str, str], Path]) -> None:
    path = write("x.csv", "colour,size\ngreen,7\n,\n")
    unseen = [column.unseen for column in SCHEMA.columns]
    assert load_rows(path, categories=KINDS, schema=SCHEMA).tolist() == [unseen, unseen]


def test_times_of_day_are_not_read_from_text(write: Callable[[str, str], Path]) -> None:
    schema = Schema.fit(pa.table({"at": pa.array([datetime.time(hour) for hour in range(24)])}))
    with pytest.raises(DataError, match=r"x\.csv: column 'at' holds time64\[us\], which text is not read as"):
        load_rows(write("x.csv", "at\n08:00:00\n"), categories=schema.categories, schema=schema)


def test_one_row_and_a_constant_column_can_be_scored(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", [[1, 0]])
    assert load_rows(tmp_path / "x.npy", categories=KINDS).tolist() == [[1, 0]]


def test_images_are_flattened(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", np.ones((2, 3, 4), bool))
    rows = load_rows(tmp_path / "x.npz", categories=(2,) * 12, shape=(3, 4))
    assert rows.shape == (2, 12)
    with pytest.raises(DataError, match=r"shape \(4, 3\) of the model, .* have \(3, 4\)"):
        load_rows(tmp_path / "x.npz", categories=(2,) * 12, shape=(4, 3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size\n1\n", "columns are matched by their names, and .* has no 'colour'"),
        ("colour,size\nred,big\n", "x.csv: column 'size' holds numbers, and a cell is none"),
        ("colour,size\n", "only a header"),
        ("colour,size\nred\n", "as many cells as the first"),
    ],
)
def test_tables_that_do_not_fit(write: Callable[[str, str], Path], text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_rows(write("x.csv", text), categories=KINDS, schema=SCHEMA)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ([[0, 1], [0, 3]], "row 1, feature 1 .* holds 3 where K = 3"),
        ([[0, -1]], "holds -1"),
        ([[0, 0.5]], "must be integers"),
        ([[0, np.nan]], "no NaN"),
        ([[0, 1, 2]], "D = 2 features, but the rows of .* have 3"),
        (np.zeros((0, 2)), "at least one row"),
        ([0, 1], r"shape \(N, D\)"),
        (np.zeros((2, 1, 1, 2)), r"got \(2, 1, 1, 2\).* reshape it to \(2, 2\)"),
    ],
)
def test_array_rows_that_do_not_fit(tmp_path: Path, array, message: str) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(DataError, match=message):
        load_rows(tmp_path / "x.npy", categories=KINDS)


def test_failed_writes_leave_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.csv"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"could not write .*: No space left"):
        write_rows(path, CODES, SCHEMA)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"written to \.npy files"):
        write_rows(tmp_path / "x.npz", CODES)
    with pytest.raises(DataError, match="cannot be written"):
        write_rows(tmp_path / "missing" / "x.npy", CODES)
    with pytest.raises(DataError, match=r"shape \(N, D\)"):
        write_rows(tmp_path / "x.npy", [0, 1])
    with pytest.raises(DataError, match=r"0\.\.K-1"):
        write_rows(tmp_path / "x.csv", [[9, 0]], SCHEMA)


def test_cells_that_a_spreadsheet_would_compute_are_quoted_if_that_is_asked_for(tmp_path: Path) -> None:
    table = pa.table(
        {
            "=name": ["=1+1", "@sum", None, "a=b"],
            "number": [-2, 3, -2, 3],
            "text": ["+7", "\tx", "-cmd|' /C calc'!A0", "-1.5"],
        }
    )
    schema = Schema.fit(table, layout={"format": "csv", "separator": ",", "header": True})
    states = schema.encode(table)
    write_rows(tmp_path / "x.csv", states, schema, quote_formulas=True)
    with (tmp_path / "x.csv").open(newline="", encoding="utf-8") as stream:
        assert list(csv.reader(stream)) == [
            ["'=name", "number", "text"],
            ["'=1+1", "-2", "'+7"],
            ["'@sum", "3", "'\tx"],
            ["", "-2", "'-cmd|' /C calc'!A0"],
            ["a=b", "3", "-1.5"],
        ]
    write_rows(tmp_path / "x.csv", states, schema)
    assert (tmp_path / "x.csv").read_text(encoding="utf-8").startswith("=name,number,text\n")


@pytest.mark.parametrize("cells", [[None], [None, None], [None, "a"]])
def test_gaps_of_one_column_are_rows(tmp_path: Path, cells: list[str | None]) -> None:
    for layout in ({"header": False}, {"header": True}):
        write_table(tmp_path / "x.data", pa.table({"x": pa.array(cells, pa.string())}), layout)
        read = open_table(tmp_path / "x.data", layout["header"]).read()
        assert read.column(0).to_pylist() == cells
