"""Arrow types: as text in a file, and the few plain types that columns compute with."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.types import (
    is_boolean,
    is_date32,
    is_date64,
    is_decimal,
    is_dictionary,
    is_floating,
    is_integer,
    is_large_string,
    is_null,
    is_primitive,
    is_string,
    is_string_view,
    is_temporal,
    is_time32,
)

from xorflow.errors import DataError

Cells: TypeAlias = pa.Array | pa.ChunkedArray

_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""How many ticks a second has."""

_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, tz=([\w/+:-]{1,40}))?\]")
_DECIMAL = re.compile(r"(decimal(?:32|64|128|256))\((\d{1,2}), (-?\d{1,2})\)")
_DICTIONARY = re.compile(r"dictionary\[(u?int(?:8|16|32|64)), ([^\[]+(?:\[[^\[]+\])?)\]")
_ALIASES = (
    "null", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "halffloat", "float", "double",
    "string", "large_string", "string_view", "date32[day]", "date64[ms]", "time32[s]", "time32[ms]", "time64[us]", "time64[ns]",
    "duration[s]", "duration[ms]", "duration[us]", "duration[ns]",
)  # fmt: skip


def type_text(kind: pa.DataType) -> str:
    """A type as `type_of_text` reads it."""
    if is_dictionary(kind):
        return f"dictionary[{kind.index_type}, {kind.value_type}]"
    return str(kind)


def type_of_text(text: Any) -> pa.DataType:
    """The inverse of `type_text`, for types that columns take."""
    if isinstance(text, str):
        if text in _ALIASES:
            return pa.string_view() if text == "string_view" else pa.type_for_alias(text)
        if match := _TIMESTAMP.fullmatch(text):
            return pa.timestamp(match[1], match[2])
        if match := _DECIMAL.fullmatch(text):
            with suppress(AttributeError, ValueError):  # of a newer pyarrow; of so many digits that none has
                return getattr(pa, match[1])(int(match[2]), int(match[3]))
        elif match := _DICTIONARY.fullmatch(text):
            return pa.dictionary(pa.type_for_alias(match[1]), type_of_text(match[2]))
    raise DataError(f"a column has an Arrow type such as 'string' or 'timestamp[us]', got {text!r}")


def value_type(kind: pa.DataType) -> pa.DataType:
    """What a type's values are of, whether each is written out or stands in a dictionary."""
    return kind.value_type if is_dictionary(kind) else kind


def is_text(kind: pa.DataType) -> bool:
    return is_string(kind) or is_large_string(kind) or is_string_view(kind)


def is_nested(kind: pa.DataType) -> bool:
    """Whether cells of this type are no single values."""
    kind = value_type(kind)
    flat = is_primitive(kind) or is_null(kind) or is_decimal(kind) or is_text(kind)
    return not flat


def plain(values: Cells, name: str) -> pa.Array:
    """The cells as text, bool, int64, float64 or null; dates and times as their ticks. NaN is a gap."""
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    kind = array.type
    if is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if is_null(kind) or is_boolean(kind):
        return array
    try:
        if is_text(kind):
            return array.cast(pa.large_string())
        if is_integer(kind):
            return array.cast(pa.int64())
        if is_floating(kind) or is_decimal(kind):
            array = pc.call_function("add", [array.cast(pa.float64(), safe=False), 0.0])  # -0.0 is 0.0
            return pc.call_function("if_else", [array.is_nan(), None, array])
        if is_date32(kind) or is_time32(kind):
            return array.cast(pa.int32()).cast(pa.int64())
        if is_temporal(kind):
            return array.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise DataError(f"column {name!r} has a value that cannot be kept ({error}); convert it") from None
    raise DataError(
        f"columns hold text, numbers, booleans, dates or times; column {name!r} holds {kind}: convert it or leave it out"
    )


def restored(cells: pa.Array, kind: pa.DataType) -> pa.Array:
    """Plain cells in the type that came in."""
    if is_dictionary(kind):
        return restored(cells, kind.value_type).dictionary_encode().cast(kind)
    if is_date32(kind) or is_time32(kind):
        return cells.cast(pa.int32()).cast(kind)
    return cells.cast(kind, safe=False)


def python_values(cells: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Cells as Python has them; dates and times beyond its years as texts."""
    try:
        return cells.to_pylist()
    except (OverflowError, ValueError):
        return cells.cast(pa.string()).to_pylist()


def ticks_per_day(kind: pa.DataType) -> int:
    """Of a type that holds dates or times."""
    return 1 if is_date32(kind) else 86_400 * (1000 if is_date64(kind) else _UNITS[kind.unit])
