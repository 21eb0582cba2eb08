"""Rows to be scored and rows that were sampled."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from xorflow.data import Codec, load_rows, write_rows
from xorflow.errors import DataError

CODEC = Codec(("colour", "size"), (("blue", "red"), (1, 2, 10)))
CODES = torch.tensor([[1, 2], [0, 0], [1, 1]])
KINDS = (2, 3)


@pytest.mark.parametrize("name", ["x.npy", "x.csv"])
@pytest.mark.parametrize("codec", [CODEC, None, Codec(None, CODEC.values)])
def test_what_is_written_can_be_read(tmp_path: Path, name: str, codec: Codec | None) -> None:
    path = tmp_path / name
    path.write_text("an older file")
    write_rows(path, CODES, codec)
    read = load_rows(path, categories=KINDS, codec=codec)
    assert read.dtype == torch.uint8
    assert read.tolist() == CODES.tolist()
    assert [file.name for file in tmp_path.iterdir()] == [name]  # no temporary file is left


def test_csv_is_decoded(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.csv", CODES.numpy(), CODEC)
    assert (tmp_path / "x.csv").read_bytes() == b"colour,size\nred,10\nblue,1\nred,2\n"
    write_rows(tmp_path / "x.csv", CODES, None)
    assert (tmp_path / "x.csv").read_bytes() == b"1,2\n0,0\n1,1\n"


def test_npy_holds_codes_in_the_smallest_type(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.npy", CODES, CODEC)
    assert np.load(tmp_path / "x.npy").dtype == np.uint8
    write_rows(tmp_path / "x.npy", [[256, 0]], None)
    assert np.load(tmp_path / "x.npy").dtype == np.int64
    assert load_rows(tmp_path / "x.npy", categories=(257, 2), codec=None).tolist() == [[256, 0]]


def test_header_of_rows_to_score_may_be_absent(write: Callable[[str, str], Path]) -> None:
    for text in ("colour,size\nred,10\n", "red,10\n", " colour , size\nred,10.0\n"):
        assert load_rows(write("x.csv", text), categories=KINDS, codec=CODEC).tolist() == [[1, 2]]
    for text in ("first,second\n1,2\n", "1,2\n", "1.0,2.0\n"):
        assert load_rows(write("x.csv", text), categories=KINDS, codec=None).tolist() == [[1, 2]]


def test_one_row_and_a_constant_column_can_be_scored(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", [[1, 0]])
    assert load_rows(tmp_path / "x.npy", categories=KINDS, codec=None).tolist() == [[1, 0]]


def test_images_are_flattened(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", np.ones((2, 3, 4), bool))
    rows = load_rows(tmp_path / "x.npz", categories=(2,) * 12, codec=None, shape=(3, 4))
    assert rows.shape == (2, 12)
    with pytest.raises(DataError, match=r"shape \(4, 3\) of the model, .* have \(3, 4\)"):
        load_rows(tmp_path / "x.npz", categories=(2,) * 12, codec=None, shape=(4, 3))


@pytest.mark.parametrize(
    ("text", "codec", "message"),
    [
        (
            "colour,size\nred,1\ngreen,1\n",
            CODEC,
            "line 3, column 'colour' holds 'green', which is none of 'blue', 'red'",
        ),
        ("red,7\n", CODEC, "line 1, column 'size' holds '7', which is none of 1, 2, 10"),
        ("size,colour\n1,red\n", CODEC, "if this is a header, it should read colour,size"),
        ("red,1,1\n", CODEC, "D = 2 features, but the rows of .* have 3"),
        ("red,\n", CODEC, "every cell needs a value: .*line 1, column 'size' is empty"),
        ("colour,size\n", CODEC, "only a header"),
        ("0,1\n2,1\n", None, "line 2, column 1 holds '2', which is none of 0, 1"),
        ("0,1\n0,x\n", None, "line 2, column 2 holds 'x', which is none of 0..2"),
        ("0,1\n0\n", None, "line 2 has 1"),
    ],
)
def test_csv_rows_that_do_not_fit(
    write: Callable[[str, str], Path], text: str, codec: Codec | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_rows(write("x.csv", text), categories=KINDS, codec=codec)


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
        load_rows(tmp_path / "x.npy", categories=KINDS, codec=None)


def test_failed_writes_leave_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.csv"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"could not write .*: No space left"):
        write_rows(path, CODES, CODEC)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\.npy or \.csv files"):
        write_rows(tmp_path / "x.npz", CODES, None)
    with pytest.raises(DataError, match="cannot be written"):
        write_rows(tmp_path / "missing" / "x.npy", CODES, None)
    with pytest.raises(DataError, match=r"shape \(N, D\)"):
        write_rows(tmp_path / "x.npy", [0, 1], None)
    with pytest.raises(DataError, match="holds 2 where K = 2"):
        write_rows(tmp_path / "x.csv", [[2, 0]], CODEC)


def test_cells_that_a_spreadsheet_would_compute_are_quoted_if_that_is_asked_for(tmp_path: Path) -> None:
    codec = Codec(
        ("=name", "number", "text"), (("=1+1", "@sum"), (-2, 3), ("+7", "\tx", "-cmd|' /C calc'!A0", "a=b"))
    )
    codes = [[0, 0, 0], [1, 1, 1], [0, 0, 2], [1, 1, 3]]
    write_rows(tmp_path / "x.csv", codes, codec, quote_formulas=True)
    with (tmp_path / "x.csv").open(newline="", encoding="utf-8") as stream:
        assert list(csv.reader(stream)) == [
            ["'=name", "number", "text"],
            ["'=1+1", "-2", "+7"],
            ["'@sum", "3", "'\tx"],
            ["'=1+1", "-2", "'-cmd|' /C calc'!A0"],
            ["'@sum", "3", "a=b"],
        ]
    write_rows(tmp_path / "x.csv", codes, codec)
    assert (tmp_path / "x.csv").read_text(encoding="utf-8").startswith("=name,number,text\n=1+1,-2,+7\n")
