"""Which kind a column is of, by what its training rows hold, and of which type texts are."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from pyarrow.types import is_boolean, is_integer, is_temporal

from xorflow.data.arrow import compute as pc
from xorflow.data.columns import Boolean, Category, Column, Constant, Integer, Moment, Number
from xorflow.data.columns.tally import Tally
from xorflow.data.columns.types import is_nested, is_text, value_type
from xorflow.data.schema_file import LEFT_OUT, Wish
from xorflow.data.texts import read_texts, type_of_texts

_FEW_ROWS = 20
"""Of so few rows nobody can say that values never recur."""

_MOST_TEXTS = 10_000
_MOST_STEP = 10
"""An index rises by so much on average, at most; what rises faster was sorted."""

_OTHER_DATE = r"^([0-9]{1,2}[/.-][0-9]{1,2}[/.-][0-9]{2,4}|[A-Z][a-z]{2} [0-9]{1,2},? [0-9]{4})( |$)"
_OF_FRAMES = re.compile(r"__index_level_\d+__")
_NAMED_SO = re.compile(r"(^|_| )(id|uuid|guid|index|key)$|[a-z]Id$|ID$")


def kind_of(tally: Tally) -> tuple[type[Column] | None, str]:
    """The kind of a column by what its training rows hold; None, and why, if it is to be left out."""
    if _OF_FRAMES.fullmatch(tally.name):
        return None, "the index of a frame"
    if is_nested(tally.type):
        return None, f"no kind of column is for {tally.type}"
    kind, distinct, rows = tally.values.type, len(tally.values), int(tally.counts.sum())
    if distinct <= 1 and (tally.gaps == 0 or rows == 0):
        return Constant, ""
    different = distinct == rows and rows > _FEW_ROWS
    if is_boolean(kind):
        return Boolean, ""
    if is_text(kind):
        return _kind_of_texts(tally.values, rows, different)
    if is_temporal(value_type(tally.type)):
        return Moment, ""
    whole = is_integer(kind) or _all_whole(tally.values)
    if whole and different and _NAMED_SO.search(tally.name):
        return None, "an identifier: its numbers are all different, and it is named so"
    if whole and different and tally.one_way and _span(tally.values) <= _MOST_STEP * rows:
        return None, "an identifier: its numbers are all different, and in order from row to row"
    few = (distinct <= 10 and distinct < rows) or (distinct <= 64 and 5 * distinct <= rows)
    return (Integer, "") if whole and few else (Number, "")


def _kind_of_texts(texts: pa.Array, rows: int, different: bool) -> tuple[type[Column] | None, str]:
    if rows <= _FEW_ROWS or (2 * len(texts) <= rows and len(texts) <= _MOST_TEXTS):
        return Category, ""
    if pc.all(pc.match_substring_regex(texts, _OTHER_DATE)).as_py():
        return None, "dates are read as 2020-01-31 or 2020/01/31: rewrite them"
    if different:
        return None, "an identifier: its texts are all different"
    return None, f"free text: {len(texts):,} different texts in {rows:,} rows"


def typed(table: pa.Table, wishes: Mapping[str, Wish] | None = None) -> pa.Table:
    """The columns of a file of text in the types that their cells are of; texts where a schema file says category."""
    cells = {}
    for name in table.column_names:
        wish = (wishes or {}).get(name, Wish())
        texts = wish.kind in (Category.kind, LEFT_OUT)
        kind = pa.bool_() if wish.kind == Boolean.kind else type_of_texts(table[name], name, wish.gaps)
        cells[name] = read_texts(table[name], pa.string() if texts else kind, name, wish.gaps)
    return pa.table(cells)


def _span(numbers: pa.Array) -> float:
    """From the least to the largest of sorted numbers."""
    return float(numbers[-1].as_py()) - float(numbers[0].as_py())


def _all_whole(numbers: pa.Array) -> bool:
    values = numbers.to_numpy(zero_copy_only=False)
    return bool((np.isfinite(values) & (np.floor(values) == values)).all())
