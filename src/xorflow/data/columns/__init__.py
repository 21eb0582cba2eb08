"""The columns of a table, one class for each kind: how cells become states of a model, and what their log p is of."""

from typing import Any

from xorflow.data.columns.base import Column, damaged
from xorflow.data.columns.discrete import Boolean, Category, Constant, Integer
from xorflow.data.columns.number import Moment, Number

KINDS: dict[str, type[Column]] = {
    column.kind: column for column in (Category, Boolean, Integer, Number, Moment, Constant)
}
"""By name."""


def column_from_json(data: Any) -> Column:
    """A column of any kind from what its `to_json` gave, checked."""
    kind = KINDS.get(data["kind"]) if isinstance(data, dict) and isinstance(data.get("kind"), str) else None
    if kind is None:
        raise damaged(data)
    return kind.from_json(data)


__all__ = [
    "KINDS",
    "Boolean",
    "Category",
    "Column",
    "Constant",
    "Integer",
    "Moment",
    "Number",
    "column_from_json",
]
