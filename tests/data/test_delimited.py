"""Files of text: separators, headers, gaps, and what is no table."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from xorflow.data.delimited import Delimited
from xorflow.data.tables import open_table
from xorflow.data.texts import read_texts, type_of_texts
from xorflow.errors import DataError

Write = Callable[[str, str], Path]


def cells(path: Path, **options: Any) -> dict[str, list]:
    """The columns of a file as values of the types that are found."""
    table = open_table(path, **options).read()
    return {
        name: read_texts(table[name], type_of_texts(table[name], name), name).to_pylist()
        for name in table.column_names
    }


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("x.csv", "a,b\n00123,x\n1,y\n", {"a": ["00123", "1"], "b": ["x", "y"]}),
        ("x.csv", "a\n+4912\n1\n", {"a": ["+4912", "1"]}),
        ("x.csv", "a\n999999999999999999999\n1\n", {"a": ["999999999999999999999", "1"]}),
        ("x.csv", "a,b\n1.5,\n-2e3,x\nNA,\"\"\n", {"a": [1.5, -2000.0, None], "b": [None, "x", None]}),
        ("x.csv", ",a\n0,x\n1,y\n", {"column 1": [0, 1], "a": ["x", "y"]}),
        ("x.csv", "a;b\n1;x,y\n2;z\n", {"a": [1, 2], "b": ["x,y", "z"]}),
        ("x.tsv", "a\tb\n1\tx;y,z\n", {"a": [1], "b": ["x;y,z"]}),
        ("x.CSV", "\ufeff0,a\r\n1,é\r\n", {"column 1": [0, 1], "column 2": ["a", "é"]}),
        ("x.data", "39, State, ?\n50, Self, 7\n", {"column 1": [39, 50], "column 2": ["State", "Self"], "column 3": [None, 7]}),
        ("x.data", "EI,one\nIE,two\n", {"column 1": ["EI", "IE"], "column 2": ["one", "two"]}),
        ("x.csv", 'a,b\n1,"two\nlines"\n3,"a ""b"""\n', {"a": [1, 3], "b": ["two\nlines", 'a "b"']}),
        ("x.csv", "a\n1\n\n3\n", {"a": [1, None, 3]}),
        ("x.csv", "a,b\n1,2\n\n3,4\n\n", {"a": [1, 3], "b": [2, 4]}),
    ],
)  # fmt: skip
def test_what_a_file_says(write: Write, name: str, text: str, expected: dict[str, list]) -> None:
    assert cells(write(name, text)) == expected


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ("pet,farm\ncat,no\nox,yes\npet,no\n", True),  # a name that is also a value
        ("cat,no\nox,yes\ncat,no\nox,no\n", False),
        ("a,b\n1,x\n", True),
        ("1,x\n2,y\n", False),
        ("vhigh,low,vhigh\nlow,low,vhigh\nlow,vhigh,low\n", False),
        ("a,b\nx,y\n", True),
        ("land,1960,1961,1962\nAruba,4.8,4.6,4.5\nChad,6.2,6.3,6.3\n", True),  # years
        (",0,1,2\n0,0.1,0.2,0.3\n1,0.2,0.5,0.9\n", True),  # what a frame calls columns that have no names
        ("x,1,2,3\ny,1,0,2\n", False),
        ("x,1960,1961,1970\ny,1,0,2\n", False),
    ],
)
def test_whether_there_is_a_header(write: Write, text: str, header: bool) -> None:
    path = write("x.csv", text)
    assert Delimited(path).has_header is header
    assert open_table(path, header=False).read().num_rows == text.count("\n")
    assert Delimited(path, expected=("farm",)).has_header is text.startswith("pet")


def test_dates_may_have_slashes(write: Write) -> None:
    path = write("x.csv", "d,t\n2020/01/31,2012/01/01 00:00\n2021/02/01,2012/01/01 01:30\n")
    table = cells(path)
    assert table["d"][0].isoformat() == "2020-01-31"
    assert table["t"][1].isoformat() == "2012-01-01T01:30:00"


def test_dates_and_times(write: Write) -> None:
    path = write(
        "x.csv",
        "d,t,z\n2020-01-31,2020-01-31 10:00,2020-01-31T10:00:00.5+01:00\n2021-02-01,2020-01-31T10:30,NaT\n",
    )
    table = open_table(path).read()
    kinds = [type_of_texts(table[name], name) for name in table.column_names]
    assert kinds == [pa.date32(), pa.timestamp("s"), pa.timestamp("us", "UTC")]
    assert read_texts(table["z"], kinds[2], "z")[0].as_py().hour == 9


def test_a_late_block_has_its_say(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n" + "1,2\n" * 1_200_000 + "w,3.5\n")
    table = open_table(path).read()
    assert len(table) == 1_200_001
    assert type_of_texts(table["b"], "b") == pa.float64()
    with pytest.raises(DataError, match=r"column 'a' holds numbers, but 'w' is none"):
        type_of_texts(table["a"], "a")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a,b\n1,2\n3\n", "every row has as many cells as the first: .*Row #3: Expected 2 columns, got 1"),
        (b'a,b\n1,"2\n3,4\n', "a quote in .* is never closed"),
        ("a,b\né,2\n".encode("latin-1"), "text is UTF-8, and .* is not .*; save it as UTF-8"),
        ("a,b\né,2\n".encode("utf-16"), "it holds a zero byte"),
        (b"a,b\n1,\0\n", "it holds a zero byte"),
        (b"\n\n", "at least one row, and .* has none"),
        (b"a,b\n", "has only a header, a,b"),
        (b"a,a\n1,2\n", "uses 'a' twice; rename them, or say --no-header"),
        (b",".join([b"1"] * 100_000), "at most 10,000 columns, and .* has 100,000"),
        (b"a\n" + b"x" * 2**23, "has more; a quote may not be closed"),
        (b"a b c\n1 x 2\n3  y 4\n", "seem to be by blanks; write commas instead"),
    ],
)
def test_what_is_no_table(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words):
        open_table(path).read()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["2020-01-01", "2020-01-02", "soon"], "column 'c' holds dates, but 'soon' is none; mend it"),
        (["2020-01-01", "2020-02-31"], "column 'c' holds dates, and a cell is none"),
        (["1", "1e400"], "numbers are finite: column 'c' holds '1e400'"),
        ([*map(str, range(200)), "O1"], "column 'c' holds numbers, but 'O1' is none"),
    ],
)
def test_one_odd_cell_is_told(values: list[str], words: str) -> None:
    column = pa.chunked_array([values])
    with pytest.raises(DataError, match=words):
        read_texts(column, type_of_texts(column, "c"), "c")


def test_words_among_numbers_make_words() -> None:
    assert type_of_texts(pa.chunked_array([["1", "2", "3+", "3+"]]), "c") == pa.string()
    column = pa.chunked_array([["1", "unknown", "2"]])
    assert type_of_texts(column, "c", gaps=("unknown",)) == pa.int64()
    assert read_texts(column, pa.int64(), "c", gaps=("unknown",)).to_pylist() == [1, None, 2]
    assert read_texts(column, pa.string(), "c", gaps=("unknown",)).to_pylist() == ["1", None, "2"]
