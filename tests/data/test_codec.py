"""Categories of columns: order, encoding, decoding, and what is kept of them."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xorflow.data import Codec
from xorflow.data.table import has_header, tabulate
from xorflow.errors import DataError

CODEC = Codec(("colour", "size"), (("blue", "red"), (-1, 2, 10)))
CELL = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=3)


def table_of(rows: list[list[str]]):
    return tabulate(enumerate(rows))


def test_integers_sort_as_numbers_and_others_as_text() -> None:
    rows = [["10", "10", "007"], ["9", "b", "7"], ["-1", "9", "7"]]
    codec = Codec.fit(table_of(rows))
    assert codec.values == ((-1, 9, 10), ("10", "9", "b"), ("007", "7"))
    assert codec.categories == (3, 3, 2)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4).flatmap(lambda d: st.lists(st.lists(CELL, min_size=d, max_size=d), min_size=1)))
def test_decode_inverts_encode_and_json_keeps_all(rows: list[list[str]]) -> None:
    codec = Codec.fit(table_of(rows))
    codes = codec.encode(rows)
    assert codes.max() < max(codec.categories)
    assert codec.decode(codes) == rows
    assert Codec.from_json(json.loads(json.dumps(codec.to_json()))) == codec


def test_blanks_around_cells_do_not_count() -> None:
    table = table_of([[" red", "1"], ["red ", " 2"], ["blue", "1 "]])
    assert table.cells.tolist() == [["red", "1"], ["red", "2"], ["blue", "1"]]
    assert Codec.fit(table).encode(table).tolist() == [[1, 0], [1, 1], [0, 0]]


def test_integer_columns_take_floats_that_hold_integers() -> None:
    assert CODEC.encode([["red", "2.0"], ["blue", "1e1"], ["red", -1]]).tolist() == [[1, 1], [0, 2], [1, 0]]
    assert Codec.integers((3, 2)).encode([["2", "0"]]).tolist() == [[2, 0]]


def test_types_of_codes() -> None:
    assert CODEC.encode([["red", "2"]]).dtype == np.uint8
    assert Codec.integers((257,)).encode([["256"]]).dtype == np.int64
    assert CODEC.decode(torch.tensor([[1, 2]])) == [["red", "10"]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [["red", "2"], ["green", "2"]],
            "row 1 .*, column 'colour' holds 'green', which is none of 'blue', 'red'",
        ),
        ([["red", "3"]], "column 'size' holds '3', which is none of -1, 2, 10"),
        ([["red", "2.5"]], "holds '2.5'"),
        ([["red", "inf"]], "holds 'inf'"),
        ([["red", ""]], "every cell needs a value: row 0 .*, column 'size' is empty"),
        ([["red"]], "must have 2 cells, row 0 .* has 1"),
        ([], "at least one row"),
        ([["colour", "size"]], "if this is a header, it should read colour,size"),
    ],
)
def test_what_cannot_be_encoded(rows: list[list[str]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        CODEC.encode(rows)


def test_long_lists_of_categories_are_shortened() -> None:
    with pytest.raises(DataError, match=r"none of 0\.\.99;"):
        Codec.integers((100,)).encode([["100"]])
    codec = Codec(None, (tuple(f"w{i:02}" for i in range(50)),))
    with pytest.raises(DataError, match=r"column 1 holds 'x', .* 'w07', \.\.\. \(50 in all\)"):
        codec.encode([["x"]])


def test_what_cannot_be_decoded() -> None:
    with pytest.raises(DataError, match="holds 3 where K = 3"):
        CODEC.decode([[0, 3]])
    with pytest.raises(DataError, match=r"shape \(N, 2\)"):
        CODEC.decode([0, 1])


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"names": None},
        {"names": "ab", "values": [[1], [2]]},
        {"names": None, "values": []},
        {"names": None, "values": [[]]},
        {"names": None, "values": [["a", 1]]},
        {"names": None, "values": [["a", "a"]]},
        {"names": None, "values": [[0.5]]},
        {"names": None, "values": ["ab"]},
    ],
)
def test_damaged_json(data: object) -> None:
    with pytest.raises(DataError, match="damaged"):
        Codec.from_json(data)


def test_names_must_match_columns() -> None:
    with pytest.raises(DataError, match="1 names were given for 2 columns"):
        Codec.from_json({"names": ["a"], "values": [[1], [2]]})


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([["a", "b"], ["1", "2"]], True),
        ([["a", "b"], ["x", "2"], ["a", "3"]], True),  # 'a' occurs again, but column 2 is all numbers
        ([["a", "b"], ["x", "y"], ["x", "z"]], True),  # nothing occurs again
        ([["a", "b"], ["a", "c"], ["d", "b"]], False),
        ([["a", "b"], ["x", "y"], ["x", "b"]], False),  # one cell occurs again
        ([["1", "b"], ["2", "c"]], False),
        ([["0", "1"], ["1", "0"]], False),
        ([["0.5", "x"], ["1", "0"]], False),
        ([["nan", "inf"], ["1", "0"]], True),  # names, not numbers
        ([["a", "b"]], True),
    ],
)
def test_header_rule(rows: list[list[str]], expected: bool) -> None:
    assert has_header(table_of(rows)) is expected


def test_header_texts_are_forgotten_unless_they_are_values_too() -> None:
    table = table_of([["a", "b"], ["a", "1"], ["c", "2"]]).below_header()
    assert Codec.fit(table).values == (("a", "c"), (1, 2))
    assert table.cells.tolist() == [["a", "1"], ["c", "2"]]
    assert table.place(0) == "row 1 (from 0)"
    assert table.names == ("a", "b")


def test_equal_cells_share_their_memory() -> None:
    table = table_of([[f"x{n % 3}", "y"] for n in range(9)])
    assert len({id(text) for text in table.cells.flat}) == 4
