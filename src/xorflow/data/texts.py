"""What type a column of texts is of: integers, numbers, dates, or texts that they stay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import pyarrow as pa
from pyarrow.types import is_decimal, is_floating, is_integer, is_null, is_temporal

from xorflow.data.arrow import compute as pc
from xorflow.data.arrow import emptied
from xorflow.data.columns.types import Cells, is_text
from xorflow.errors import DataError

GAPS = (
    "",
    "?",
    "-",
    "NA",
    "N/A",
    "n/a",
    "na",
    "NaN",
    "nan",
    "NaT",
    "NULL",
    "Null",
    "null",
    "None",
    "none",
    "<NA>",
    "#N/A",
    ".",
)
"""What stands for a gap in columns that else hold numbers or dates; among texts these are words like any other."""

_INTEGER = r"^-?(0|[1-9][0-9]{0,17})$"
NUMBER = r"^-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_DATE = r"^[0-9]{4}[-/][01][0-9][-/][0-3][0-9]$"
_TIME = r"^[0-9]{4}[-/][01][0-9][-/][0-3][0-9][ T][0-2][0-9]:[0-5][0-9](:[0-5][0-9])?"
_FRACTION = r"(\.[0-9]{1,6})?"
_ZONE = r"(Z|[+-][0-9]{2}:?[0-9]{2})$"

_DIGITS = r"^[+-]?[0-9]+$"

_SLIPS = 0.01
"""So many cells of another kind, or a single one among dates, are a slip; more make a column of texts."""


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def type_of_texts(cells: pa.ChunkedArray, name: str, gaps: Sequence[str] = ()) -> pa.DataType:
    """The type that all cells but gaps are of; very few that are not are refused: they would turn numbers into texts.

    `00123` and `+7` are codes, and make a column of texts; so do integers of more than 18 digits.

    >>> type_of_texts(pa.chunked_array([["1", "-2", "NA", None]]), "a"), type_of_texts(pa.chunked_array([["00123"]]), "b")
    (DataType(int64), DataType(string))
    """
    counts = cells.drop_null().value_counts()
    texts, occurs = counts.field("values"), counts.field("counts")
    kept = pc.invert(_is_gap(texts, gaps))
    texts, occurs = texts.filter(kept), occurs.filter(kept)
    codes = pc.and_not(pc.match_substring_regex(texts, _DIGITS), pc.match_substring_regex(texts, _INTEGER))
    for pattern, kind, what in () if len(texts) == 0 or pc.any(codes).as_py() else _TYPES:
        odd = pc.invert(pc.match_substring_regex(texts, pattern))
        if not pc.any(odd).as_py():
            return kind
        count, total = pc.sum(occurs.filter(odd)).as_py(), pc.sum(occurs).as_py()
        few = count <= _SLIPS * total or (count == 1 and total > 2 and what == "dates")
        if few and what:
            raise DataError(
                f"cells of a column are of one type: column {name!r} holds {what}, but {texts.filter(odd)[0].as_py()!r} is "
                f'none; mend it or leave it empty, or give the column gaps = [...] or kind = "category" by a schema file'
            )
    return pa.string()


def read_texts(
    cells: pa.ChunkedArray, kind: pa.DataType, name: str, gaps: Sequence[str] = ()
) -> pa.ChunkedArray:
    """Texts as values of a type, or of the widest one like it; what stands for a gap becomes one."""
    if is_text(kind) or is_null(kind):
        return emptied(cells, pc.is_in(cells, pa.array(gaps, pa.string()))) if gaps else cells
    known = emptied(cells, _is_gap(cells, gaps))
    if is_integer(kind):
        with suppress(pa.ArrowInvalid):
            return pc.cast(known, pa.int64())
    if is_integer(kind) or is_floating(kind) or is_decimal(kind):
        kind = pa.float64()  # 1.5 among whole numbers is no mistake, but something new
    if is_temporal(kind):
        known = pc.replace_substring(known, "/", "-")
    try:
        values = pc.cast(known, kind)
    except pa.ArrowNotImplementedError:
        raise DataError(
            f"column {name!r} holds {kind}, which text is not read as; give it in a .parquet or .feather file, or as a frame"
        ) from None
    except pa.ArrowInvalid as error:
        raise DataError(
            f"column {name!r} holds {_NAMES.get(str(kind), str(kind))}, and a cell is none ({error}); mend or empty it"
        ) from None
    if is_floating(kind) and not pc.all(pc.is_finite(values)).as_py() and values.null_count < len(values):
        largest = cells.filter(pc.invert(pc.is_finite(values)))[0].as_py()
        raise DataError(
            f"numbers are finite: column {name!r} holds {largest!r}, which no float64 is; leave it empty"
        )
    return values


def _is_gap(texts: Cells, gaps: Sequence[str]) -> Cells:
    return pc.is_in(texts, pa.array([*GAPS, *gaps], pa.string()))


_TYPES = (
    (_INTEGER, pa.int64(), ""),  # a slip among integers is one among numbers
    (NUMBER, pa.float64(), "numbers"),
    (_DATE, pa.date32(), "dates"),
    (_TIME + "$", pa.timestamp("s"), "dates"),
    (_TIME + _ZONE, pa.timestamp("s", "UTC"), "dates"),
    (_TIME + _FRACTION + "$", pa.timestamp("us"), "dates"),
    (_TIME + _FRACTION + _ZONE, pa.timestamp("us", "UTC"), "dates"),
)
_NAMES = {"double": "numbers", "date32[day]": "dates", "bool": "true or false"}
