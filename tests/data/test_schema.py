"""Schemas: which kind each column is of, cells as integers and back, and what a schema file may say."""

import datetime
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from xorflow.data.kinds import typed
from xorflow.data.schema import Schema
from xorflow.data.schema_file import read_wishes
from xorflow.errors import DataError

ROWS = 300


def table(rows: int = ROWS, seed: int = 0) -> pa.Table:
    chance = random.Random(seed)
    return pa.table(
        {
            "id": list(range(rows)),
            "name": [f"p{chance.randrange(10**9)}" for _ in range(rows)],
            "note": [f"seen {chance.randrange(200)} times" for _ in range(rows)],
            "word": [chance.choice("abc") for _ in range(rows)],
            "age": pa.array([chance.choice([None, *range(18, 60)]) for _ in range(rows)], pa.int16()),
            "income": [0.0 if chance.random() < 0.3 else chance.lognormvariate(10, 1) for _ in range(rows)],
            "const": ["x"] * rows,
            "nothing": pa.nulls(rows),
            "truth": [chance.random() < 0.5 for _ in range(rows)],
            "day": [
                datetime.date(2000, 1, 1) + datetime.timedelta(chance.randrange(5000)) for _ in range(rows)
            ],
            "zip": [f"{chance.randrange(20):05}" for _ in range(rows)],
            "kind": pa.array([chance.choice("uv") for _ in range(rows)]).dictionary_encode(),
            "list": [[1]] * rows,
        }
    )


KINDS = {
    "word": "category", "age": "integer", "income": "number", "const": "constant", "nothing": "constant", "truth": "boolean",
    "day": "moment", "zip": "category", "kind": "category",
}  # fmt: skip


def test_kinds_follow_from_values() -> None:
    schema = Schema.fit(table())
    assert {column.name: column.kind for column in schema.columns} == KINDS
    assert {name: why.partition(":")[0] for name, why in schema.left_out.items()} == {
        "id": "an identifier", "name": "an identifier", "note": "free text", "list": "no kind of column is for list<item",
    }  # fmt: skip


def test_what_is_left_out_and_why() -> None:
    chance = random.Random(0)
    rows = pa.table(
        {
            "place": list(range(60)),
            "sorted": sorted(chance.sample(range(10**6), 60)),
            "orderID": chance.sample(range(10**6), 60),
            "when": [f"{n % 28 + 1}.{n % 12 + 1}.{1900 + n}" for n in range(60)],
        }
    )
    schema = Schema.fit(rows)
    assert [(column.name, column.kind) for column in schema.columns] == [("sorted", "number")]
    assert schema.left_out == {
        "place": "an identifier: its numbers are all different, and in order from row to row",
        "orderID": "an identifier: its numbers are all different, and it is named so",
        "when": "dates are read as 2020-01-31 or 2020/01/31: rewrite them",
    }


def test_values_are_shown_as_training_rows_have_them() -> None:
    days = [datetime.date(2000, 1, 1) + datetime.timedelta(3 * n) for n in range(40)]
    numbers = [n / 10 for n in range(17, 57)]
    schema = Schema.fit(pa.table({"day": days, "number": numbers, "zeros": [0.0] * 20 + numbers[:20]}))
    shown = {name: values for name, _, values, _, _ in schema.rows()}
    assert shown == {"day": "2000-01-01 to 2000-04-27", "number": "1.7 to 5.6", "zeros": "0 to 3.6"}


def test_cells_go_in_and_come_out() -> None:
    rows = table()
    schema = Schema.fit(rows)
    codes = schema.encode(rows)
    assert codes.dtype == np.uint8
    assert (codes < np.array(schema.categories)).all()
    decoded = schema.decode(codes, seed=3)
    assert decoded.schema.equals(rows.select(schema.names).schema)
    assert (schema.encode(decoded) == codes).all()
    same = [name for name, kind in KINDS.items() if kind in ("category", "boolean", "integer", "constant")]
    assert decoded.select(same).equals(rows.select(same))
    assert decoded.equals(schema.decode(codes, seed=3))
    assert not decoded.equals(schema.decode(codes, seed=4))


def test_frames_and_tables_are_the_same() -> None:
    frame = {"word": ["a", "b", None] * 10, "number": [0.5, float("nan"), 2.5] * 10, "whole": [1, 2, 3] * 10}
    schema = Schema.fit(pl.DataFrame(frame))
    expected = schema.encode(pl.DataFrame(frame))
    assert (schema.encode(pd.DataFrame(frame)) == expected).all()
    assert (schema.encode(pa.table(frame)) == expected).all()
    assert (schema.encode(pa.table(frame).select(["whole", "number", "word"])) == expected).all()
    indexed = pd.DataFrame(frame, index=[*range(29), 40])
    assert Schema.fit(indexed).left_out == {"__index_level_0__": "the index of a frame"}


def test_texts_are_read_as_the_columns_are() -> None:
    texts = pa.table(
        {
            "n": ["1", "NA", "2"] * 5,
            "zip": ["00123", "1", "00123"] * 5,
            "d": ["2020-01-01", "2020-01-03", ""] * 5,
        }
    )
    schema = Schema.fit(typed(texts), layout={"format": "csv", "separator": ","})
    assert [column.kind for column in schema.columns] == ["integer", "category", "moment"]
    new = pa.table(
        {"n": ["2", "1.5", "7"], "zip": ["123", "00123", None], "d": ["2020-01-01", None, "1900-01-01"]}
    )
    codes = schema.encode(new)
    assert codes[0, 1] == schema.columns[1].unseen
    assert codes[1:, 0].tolist() == [schema.columns[0].unseen] * 2
    with pytest.raises(DataError, match=r"column 'n' holds numbers, and a cell is none .*'many'"):
        schema.encode(new.set_column(0, "n", pa.array(["1", "many", "2"])))


def test_a_schema_survives_json(tmp_path: Path) -> None:
    schema = Schema.fit(
        table(),
        read_wishes({"columns": {"zip": {"gaps": ["?"]}}}),
        layout={"format": "csv", "separator": ";"},
    )
    again = Schema.from_json(json.loads(json.dumps(schema.to_json(), allow_nan=False)))
    assert again == schema
    assert again.sha256 == schema.sha256
    assert str(again) == str(schema)
    good = schema.to_json()
    for key, value in (
        ("version", 2), ("order", ["a"]), ("order", [1]), ("left_out", {"x": 1}), ("gaps", {"zip": "?"}), ("columns", []),
        ("layout", {"separator": ",,"}),
        ("layout", {"separator": "é"}), ("layout", {"format": "../x"}), ("layout", {"other": 1}),
    ):  # fmt: skip
        with pytest.raises(DataError, match="restore"):
            Schema.from_json(good | {key: value})


def test_a_schema_is_shown_as_a_table() -> None:
    lines = str(Schema.fit(table())).splitlines()
    assert lines[0].split() == ["column", "kind", "values", "gaps", "what", "happens"]
    assert len(lines) == 1 + len(table().column_names)
    assert any(line.startswith("age") and " yes " in line for line in lines)
    assert any(line.startswith("name") and "left out" in line and "an identifier" in line for line in lines)


def test_a_schema_file_has_the_last_word(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(
        '[columns.id]\nkind = "number"\n[columns.word]\nrare = 200\n[columns.zip]\nkind = "left out"\n'
    )
    schema = Schema.fit(table(), read_wishes(path))
    kinds = {column.name: column for column in schema.columns}
    assert kinds["id"].kind == "number"
    assert schema.left_out["zip"] == "as the schema file says"
    assert kinds["word"].categories < 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[columns.x]\nkind = "number"', "there is no 'x'"),
        ('[columns.word]\nkind = "number"', "must hold numbers, and holds string"),
        ('[columns.word]\nkind = "text"', "says of column 'word'.*one of category, boolean"),
        ("[columns.word]\ngaps = 3", "gaps, a list of texts"),
        ("[columns.word]\nrare = true", "a number of rows"),
        ("[columns.word]\nkinds = 1", "it can say kind"),
        ("rare = 3", r"a table \[columns.NAME\]"),
        ("columns = 3", r"a table \[columns.NAME\]"),
        ("[", "no readable TOML"),
        (None, "there is no schema file"),
    ],
)
def test_schema_files_that_are_wrong(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "schema.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=words):
        Schema.fit(table(), read_wishes(path))


def test_what_is_no_table_of_this_schema() -> None:
    schema = Schema.fit(pa.table({"a": ["x", "y"] * 5, "b": [1, 2] * 5}))
    wrong: list[tuple[Any, str]] = [
        (pa.table({"a": ["x"]}), "there is no 'b' among 'a'"),
        (pa.table({"a": [1], "b": [1]}), "column 'a' holds string"),
        (pd.DataFrame({"a": [1, "x"], "b": [1, 1]}), "one type each"),
    ]
    for rows, words in wrong:
        with pytest.raises(DataError, match=words):
            schema.encode(rows)
    with pytest.raises(DataError, match="shape"):
        schema.decode(np.zeros((2, 3)))
    with pytest.raises(DataError, match=r"0\.\.K-1"):
        schema.decode(np.array([[9, 0]]))


def test_nothing_is_left() -> None:
    with pytest.raises(DataError, match="all are left out: 'id': an identifier"):
        Schema.fit(pa.table({"id": [f"p{n}" for n in range(50)]}))


def test_training_rows_show_what_none_of_them_has() -> None:
    schema = Schema.fit(table())
    codes = schema.encode(table())
    shown = schema.shown(codes, 0)
    for d, column in enumerate(schema.columns):
        assert (shown[:, d] == column.unseen).any()
    assert (shown == schema.shown(codes, 0)).all()
    assert (shown != codes).mean() < 0.1
