"""Bad files: every one an error that says the rule, what came and what to do."""

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from xorflow.data import load
from xorflow.data.arrays import read_arrays
from xorflow.errors import DataError

GOOD = np.arange(40).reshape(20, 2) % 3


def refused(path: Path, message: str, **options) -> None:
    with pytest.raises(DataError, match=message):
        load(path, **options)


@pytest.mark.parametrize(
    ("array", "options", "message"),
    [
        (GOOD - 1, {}, "categories count from 0, but feature 0 holds -1"),
        (GOOD, {"categories": 2}, r"row \d+, feature \d .* holds 2 where K = 2"),
        (GOOD + 0.5, {}, r"values must be integers.*: row 0, feature 0 .* holds 0\.5"),
        (np.where(GOOD == 2, np.nan, GOOD), {}, "no NaN: row 1, feature 0"),
        (np.where(GOOD == 2, np.inf, GOOD), {}, "holds inf"),
        (GOOD.astype(str), {}, "got an array of <U21; encode texts .* or keep them in a .csv"),
        (GOOD[:0], {}, r"at least one row and one feature, got shape \(0, 2\)"),
        (
            np.zeros((8, 4, 5, 3)),
            {},
            r"one value a pixel, \(N, H, W\), got \(8, 4, 5, 3\).* reshape it to \(8, 60\)",
        ),
        (np.zeros((8, 1, 4, 5)), {}, r"reshape it to \(8, 20\)"),
        (GOOD[:, 0], {}, r"shape \(N, D\).* got \(20,\); reshape a single feature to \(N, 1\)"),
        (GOOD[:1], {}, "the split needs 3 rows or more, 1 to train, 1 to validate and 1 to test, got 1"),
        (GOOD[:2], {}, "needs 3 rows or more"),
        (GOOD, {"validation": 10, "test": 10}, "needs 21 rows or more"),
        (GOOD, {"validation": 1.0}, r"a fraction in \[0, 1\) or a number of rows, got 1\.0"),
        (GOOD, {"test": -1}, r"a fraction in \[0, 1\)"),
        (GOOD, {"test": True}, r"got True"),
        (GOOD * [1, 0] + [0, 5], {}, r"1 of 2 are constant: first feature 1 \(from 0\), always 5; drop them"),
        (GOOD * 10**6, {}, "more than 65536 categories; re-code it"),
        (GOOD, {"categories": (3, 3, 3)}, "one for each of 2 columns, got 3"),
        (GOOD, {"categories": 1}, "at least two categories"),
        (GOOD, {"seed": -1}, r"seed .* must lie in 0\.\.2\^64 - 1"),
    ],
)
def test_bad_arrays(tmp_path: Path, array: np.ndarray, options: dict, message: str) -> None:
    np.save(tmp_path / "x.npy", array)
    refused(tmp_path / "x.npy", message, **options)


def test_stated_categories_allow_a_constant_column(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", GOOD * [1, 0])
    assert load(tmp_path / "x.npy", categories=3).categories == (3, 3)


def test_truncated_and_altered_npy(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, GOOD)
    whole = path.read_bytes()
    for end in (1, 5, 50, 127, 128, len(whole) - 1):
        path.write_bytes(whole[:end])
        refused(path, "truncated, damaged")
    path.write_bytes(whole.replace(b"(20, 2)", b"(30, 2)"))
    refused(path, "truncated, damaged")
    path.write_bytes(b"no array at all")
    refused(path, "truncated, damaged")


def test_claims_of_absurd_size_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (900000000000000, 2), }"
    header += b" " * (118 - len(header) - 1) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))
    refused(path, "truncated, damaged")


def test_truncated_and_altered_npz(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=GOOD)
    whole = path.read_bytes()
    for data in (whole[:100], whole[:-30], whole[:60] + b"\xff\x00\xff" + whole[63:]):
        path.write_bytes(data)
        refused(path, "truncated, damaged")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    objects = np.array([[{}, 1], [2, 3]], dtype=object)
    np.save(tmp_path / "x.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=objects)
    (tmp_path / "y.npy").write_bytes(pickle.dumps([[0, 1]]))
    for name in ("x.npy", "x.npz", "y.npy"):
        refused(tmp_path / name, "unpickling can run code")


def test_npz_with_the_wrong_arrays(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=GOOD, b=GOOD)
    refused(path, "one named 'x', .* it holds 'a', 'b'")
    np.savez(path)
    refused(path, "it holds none")
    np.savez(path, train=GOOD, valid=GOOD)
    refused(path, "may hold 'validation' and 'test', got valid")
    np.savez(path, train=GOOD, test=GOOD[:, :1])
    refused(path, "rows of one shape")


def test_a_table_with_nothing_to_model(write: Callable[[str, str], Path]) -> None:
    path = write("x.csv", "".join(f"id{n}\n" for n in range(50)))
    refused(path, "data must have a column that can be modelled, and all are left out: 'id0': an identifier")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,b\n1,2\n", {}, "needs 3 rows or more"),
        ("a,b\n1,2\n", {"validation": 0, "test": 0, "categories": 2}, "categories= is of arrays"),
        ("a,b\n1,2\n", {"part": "c"}, "part= names a column, and there is no 'c' among 'a', 'b'"),
        (
            "a,b\ntrain,2\nlater,2\n",
            {"part": "a"},
            "column 'a' names the part of each row, .* one row has 'later'",
        ),
        ("a,b\ntest,2\ntest,2\n", {"part": "a"}, "no row is to train"),
        (
            "a,b\ntrain,2\ntest,2\n",
            {"part": "a", "test": 0.5},
            "test= draws rows, and which rows those are is said",
        ),
        ("a,b\ntrain,2\ntest,2\n", {"part": "a", "test_data": "x.csv"}, "leave out part, or test_data"),
        ("a,b\n" + "1,2\n" * 9, {"schema": {"columns": {"c": {"kind": "number"}}}}, "there is no 'c'"),
        (
            "a,b\n" + "1,2\n1,2020\n1e400,7\n" * 9,
            {"header": True},
            "numbers are finite: column 'a' holds '1e400'",
        ),
    ],
)
def test_bad_tables(write: Callable[[str, str], Path], text: str, options: dict, message: str) -> None:
    refused(write("x.csv", text), message, **options)


def test_a_column_that_changes_its_type_between_files(write: Callable[[str, str], Path]) -> None:
    train, other = write("train.csv", "a,b\n" + "1,x\n2,y\n" * 9), write("test.csv", "a,b\nmany,x\n")
    refused(train, "test.csv: column 'a' holds numbers, and a cell is none", test_data=other)
    refused(train, "test.csv has no 'a'", test_data=write("test.csv", "b\nx\n"))


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("1")
    (tmp_path / "x.csv").touch()
    refused(tmp_path, r"it is a file, a folder of \.parquet files")
    refused(tmp_path / "x.txt", r"data files end here in \.npy, \.npz, \.csv, .* got .*x\.txt")
    refused(tmp_path / "none.npy", "does not exist")
    refused(tmp_path / "x.csv", r"is empty \(0 bytes\)")


@pytest.mark.parametrize("kind", ["fifo", "too long", "unreadable name"])
def test_a_path_that_is_no_plain_file(tmp_path: Path, kind: str) -> None:
    if kind == "fifo":
        path, message = tmp_path / "x.npy", "it is no plain file"
        os.mkfifo(path)
    elif kind == "too long":
        path, message = tmp_path / f"{'x' * 300}.csv", "File name too long"
    else:
        path, message = tmp_path / "x\0.csv", "its name holds a zero"
    refused(path, message)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i8', 'fortran_order': False, 'shape': (2, 2), } trailing",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (2, " + "9" * 5000 + "), }",
        "{'descr': '<q9', 'fortran_order': False, 'shape': (2, 2), }",
        "{'descr': '|V0', 'fortran_order': False, 'shape': (2, 2), }",
        "{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (2, 2), }",
        "{'descr': '<i8', 'fortran_order': None, 'shape': (2, 2), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (-2, -2), }",
        "(((((",
        "{'descr': '''",
    ],
)
def test_headers_that_numpy_never_wrote(tmp_path: Path, header: str) -> None:
    text = header.encode() + b"\n"
    for name, content in (
        ("x.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(32)),
        ("y.npy", b"\x93NUMPY\x03\x00" + len(text).to_bytes(4, "little") + text + bytes(32)),
    ):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, "truncated, damaged")


def test_members_that_are_no_arrays_or_claim_too_much(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("train.npy", b"no array")
    refused(path, "truncated, damaged")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", _saved(GOOD))
        archive.filelist[0].file_size = 2**31 - 1  # as the directory at the end will say
    refused(path, "says that it has 2,147,483,647 bytes")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", _saved(GOOD))
        archive.writestr("readme.txt", "two arrays")
    refused(path, "truncated, damaged")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_archives_that_numpy_does_not_write(tmp_path: Path, method: int) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x.npy", _saved(GOOD))
    refused(path, "compressed as numpy never does")


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize(
    "array", [GOOD, np.asfortranarray(GOOD), GOOD.astype(">i4"), GOOD.reshape(20, 2, 1), GOOD > 0]
)
def test_what_numpy_writes_is_read_as_it_reads_it(
    tmp_path: Path, version: tuple[int, int], array: np.ndarray
) -> None:
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, array, version)
    np.savez(tmp_path / "y.npz", x=array)
    np.savez_compressed(tmp_path / "z.npz", x=array)
    for name in ("x.npy", "y.npz", "z.npz"):
        read = read_arrays(tmp_path / name)["x"]
        assert read.dtype == array.dtype
        np.testing.assert_array_equal(read, array)


def _saved(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()
