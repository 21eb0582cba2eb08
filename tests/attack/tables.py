"""Doors of tables: files of every format that pyarrow reads, whole and damaged; schemas, and what people say of columns."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import xorflow as xf
from attack.damage import TEXTS, VALUES, Chance, damaged_bytes, damaged_json, json_bytes
from attack.rule import Case, require
from xorflow.data.schema import Schema
from xorflow.data.schema_file import read_wishes
from xorflow.data.tables import open_table, write_table
from xorflow.errors import DataError, UserError
from xorflow.table_model import TableModel

BINARY = (".parquet", ".feather", ".arrow")
TEXT = (".csv", ".tsv", ".data")
WORDS = (
    "a",
    "b b",
    "c,d",
    "é",
    "日本",
    "🙂",
    "x;y",
    "#",
    "=1+1",
    "[b]",
    "-",
    "0",
    "true",
    'say "so"',
    "two\nlines",
)

# ---- what is written ----


def frame(chance: Chance, *, words: tuple[str, ...] = WORDS) -> pa.Table:
    """Up to five columns of any type that columns take, with gaps in some."""
    rows = chance.randrange(5, 60)
    columns: dict[str, pa.Array] = {}
    for place in range(chance.randrange(1, 6)):
        name = chance.choice(("word", "a.b", "é", "x y", "", "column", "[z]")) + str(place)
        kind, draw = chance.choice(_COLUMNS)
        few = [draw(chance, words) for _ in range(chance.choice((1, 2, 5, rows)))]
        gaps = chance.choice((0.0, 0.0, 0.2))
        cells = [None if chance.random() < gaps else chance.choice(few) for _ in range(rows)]
        columns[name] = pa.array(cells, kind)
        if chance.random() < 0.1 and pa.types.is_string(kind):
            columns[name] = columns[name].dictionary_encode()
    return pa.table(columns)


_COLUMNS: tuple[tuple[pa.DataType, Callable[[Chance, tuple[str, ...]], Any]], ...] = (
    (pa.string(), lambda chance, words: chance.choice(words)),
    (pa.large_string(), lambda chance, words: chance.choice(words)),
    (pa.bool_(), lambda chance, words: chance.random() < 0.5),
    (pa.int8(), lambda chance, words: chance.randrange(-128, 128)),
    (pa.int64(), lambda chance, words: chance.choice((0, 1, -5, 2**40, chance.randrange(100), 2**63 - 1, -(2**63)))),
    (pa.uint64(), lambda chance, words: chance.choice((0, 1, 7, 2**64 - 1, 2**63))),
    (pa.float64(), lambda chance, words: chance.choice((0.0, -0.0, 1.5, 1e-300, 1e300, -1e308, 5e-324, chance.gauss(0, 1)))),
    (pa.float64(), lambda chance, words: chance.choice((float("nan"), float("inf"), -float("inf"), 1.0, 2.5))),
    (pa.float32(), lambda chance, words: chance.gauss(0, 1e20)),
    (pa.float16(), lambda chance, words: np.float16(chance.gauss(0, 10))),
    (pa.date32(), lambda chance, words: datetime.date(chance.randrange(1, 9999), 1, 1)),
    (pa.timestamp("us"), lambda chance, words: datetime.datetime(chance.randrange(1, 9999), 1, 1)),
    (pa.timestamp("ns", "UTC"), lambda chance, words: datetime.datetime(chance.randrange(1700, 2200), 1, 1)),
    (pa.time32("s"), lambda chance, words: datetime.time(chance.randrange(24))),
    (pa.duration("ms"), lambda chance, words: datetime.timedelta(chance.randrange(-999, 999))),
    (pa.decimal128(20, 3), lambda chance, words: chance.randrange(10**6)),
    (pa.decimal128(5, 2), lambda chance, words: chance.randrange(1000)),
    (pa.list_(pa.int8()), lambda chance, words: [1] * chance.randrange(3)),
    (pa.binary(), lambda chance, words: chance.randbytes(3)),
    (pa.struct({"a": pa.int8()}), lambda chance, words: {"a": chance.randrange(3)}),
    (pa.null(), lambda chance, words: None),
)  # fmt: skip


def _write(case: Case, table: pa.Table, suffix: str) -> Path:
    path = case.folder / f"data{suffix}"
    case.note(suffix, table.schema.to_string().replace("\n", "; "))
    try:
        write_table(path, table, {})
    except (
        pa.ArrowInvalid,
        pa.ArrowNotImplementedError,
    ):  # lists and structs are no text, float16 not in every format
        write_table(path, pa.table({"a": ["x", "y"] * 9}), {})
    return path


# ---- doors ----


def whole(case: Case) -> None:
    """A binary table comes back as it was; every table is modelled, or refused for a reason, and its model has finite log p."""
    table = frame(case.chance)
    path = _write(case, table, case.chance.choice((*BINARY, *TEXT)))
    found = case.python(lambda: open_table(path).read())
    if isinstance(found, pa.Table):
        same = path.suffix in TEXT or found.num_rows != table.num_rows or _equal(found, table)
        require(same, "wrong", "another table came back")
    _model(case, found)
    dataset = case.python(lambda: xf.data.load(table))
    if not isinstance(dataset, UserError):
        require(sum(map(len, dataset.parts.values())) == len(table), "wrong", "rows were lost")


def damaged(case: Case) -> None:
    """A damaged file of a table."""
    chance = case.chance
    path = _write(case, frame(chance), chance.choice((*BINARY, *BINARY, *TEXT)))
    content, what = damaged_bytes(path.read_bytes(), chance)
    case.note(what)
    path.write_bytes(content)
    header = chance.choice((None, None, True, False)) if path.suffix in TEXT else None
    _model(case, case.python(lambda: open_table(path, header).read()))


def schema_json(case: Case) -> None:
    """A schema from a run's configuration, edited: refused, or it makes states of rows and rows of states."""
    table = frame(case.chance)
    schema = case.python(lambda: Schema.fit(table))
    if isinstance(schema, UserError):
        return
    kept = schema.to_json()
    again = case.python(lambda: Schema.from_json(json.loads(json.dumps(kept))))
    require(
        not isinstance(again, UserError) and again.to_json() == kept,
        "wrong",
        f"another schema came back: {again}",
    )
    for _ in range(case.chance.choice((1, 1, 2))):
        kept, what = damaged_json(kept, case.chance)
        case.note(what)
    text = json_bytes(kept, case.chance)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return
    again = case.python(lambda: Schema.from_json(content))
    if not isinstance(again, UserError):
        _use(case, again, table)


def schema_file(case: Case) -> None:
    """What a schema file says of columns: anything."""
    chance, table = case.chance, frame(case.chance)
    names = [*table.column_names, "none", ""]
    kinds = ("category", "boolean", "integer", "number", "moment", "constant", "left out", *TEXTS[:12])
    entries = {
        chance.choice(names): {
            key: chance.choice((*kinds, [], ["a"], ["", "0"], 0, 1, 3, *VALUES))
            for key in chance.sample(("kind", "gaps", "rare", "magic"), chance.randrange(4))
        }
        for _ in range(chance.randrange(3))
    }
    lines = []
    for name, entry in entries.items():
        lines.append(f"[columns.{json.dumps(name, ensure_ascii=False)}]")
        lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in entry.items()]
    content = ("\n".join(lines) or "[columns]").encode("utf-8", "surrogatepass")
    if chance.random() < 0.3:
        content, what = damaged_bytes(content, chance)
        case.note(what)
    case.note(content.decode("utf-8", "replace"))
    path = case.folder / "schema.toml"
    path.write_bytes(content)
    wishes = case.python(lambda: read_wishes(path))
    if not isinstance(wishes, UserError):
        schema = case.python(lambda: Schema.fit(table, wishes, rare=chance.choice((0, 2, 50))))
        if not isinstance(schema, UserError):
            _use(case, schema, table)


# ---- what is right ----


def _equal(found: pa.Table, table: pa.Table) -> bool:
    return found.column_names == table.column_names and all(
        repr(found[name].to_pylist()) == repr(table[name].to_pylist()) for name in table.column_names
    )


def _model(case: Case, table: Any) -> None:
    if isinstance(table, Exception):
        require(isinstance(table, DataError), "traceback", repr(table))
        return
    schema = case.python(lambda: Schema.fit(table))
    if not isinstance(schema, UserError):
        require(math.prod(schema.categories) > 0, "wrong", "no states")
        _use(case, schema, table)


def _use(case: Case, schema: Schema, table: pa.Table) -> None:
    """Rows become states, and states rows of the same states; log p of rows is finite."""
    codes = case.python(lambda: schema.encode(table))
    if isinstance(codes, UserError):
        return
    rows = case.python(lambda: schema.decode(codes))
    require(not isinstance(rows, UserError), "wrong", f"states that rows have are not decoded: {rows}")
    rng = np.random.default_rng(case.chance.randrange(2**32))
    drawn = case.python(lambda: schema.decode(rng.integers(0, schema.categories, (50, len(codes.T))), seed=1))
    require(not isinstance(drawn, UserError), "wrong", f"states that may be drawn are not decoded: {drawn}")
    sizes = schema.categories
    if min(sizes) < 1 or sum(sizes) > 20_000:
        return
    flow = xf.LatentFlow(
        [xf.Layer(xf.MADE(len(sizes), (4,), categories=sizes))],
        xf.FactorisedBase(len(sizes), categories=sizes, p0=0.9),
    )
    scores = case.python(lambda: TableModel(schema, flow).log_prob(table))
    require(not isinstance(scores, UserError), "wrong", f"rows with states have no log p: {scores}")
    require(
        bool(torch.from_numpy(scores).isfinite().all()),
        "wrong",
        f"log p is {scores[~np.isfinite(scores)][:3]}",
    )
