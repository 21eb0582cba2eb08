"""Schema files: what people say of columns where the rule of `kinds` has it wrong."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xorflow._files import read_bytes
from xorflow.data.columns import KINDS
from xorflow.errors import DataError

LEFT_OUT = "left out"
"""The kind of a column that is no part of the model."""

_MOST_BYTES = 2**20


@dataclass(frozen=True)
class Wish:
    """What a schema file says of a column."""

    kind: str | None = None
    gaps: tuple[str, ...] = ()
    rare: int | None = None


def read_wishes(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Wish]:
    """What a schema file, or the same as mappings, says of columns.

    >>> read_wishes({"columns": {"zip": {"kind": "category", "gaps": ["unknown"]}}})
    {'zip': Wish(kind='category', gaps=('unknown',), rare=None)}
    """
    content, label = (
        (source, "the schema") if isinstance(source, Mapping) else (_read_toml(Path(source)), str(source))
    )
    columns = content.get("columns")
    if (
        not isinstance(columns, Mapping)
        or len(content) > 1
        or not all(isinstance(c, Mapping) for c in columns.values())
    ):
        raise DataError(
            f"a schema file has a table [columns.NAME] for each column that it is about, and {label} has {[*content]}; put all "
            "that it says there"
        )
    return {name: _wish(name, entry, label) for name, entry in columns.items()}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bytes(path, _MOST_BYTES).decode())
    except FileNotFoundError:
        raise DataError(f"there is no schema file {path}; check the path") from None
    except OSError as error:
        raise DataError(f"the schema file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"the schema file {path} is no readable TOML: {error}") from None


def _wish(name: str, entry: Mapping[str, Any], label: str) -> Wish:
    kinds, kind, gaps, rare = (*KINDS, LEFT_OUT), entry.get("kind"), entry.get("gaps", []), entry.get("rare")
    known = {*entry} <= {"kind", "gaps", "rare"} and kind in (None, *kinds)
    texts = isinstance(gaps, list) and all(isinstance(text, str) for text in gaps)
    if known and texts and (rare is None or (type(rare) is int and 0 <= rare < 2**31)):
        return Wish(kind, tuple(gaps), rare)
    raise DataError(
        f"{label} says of column {name!r}: {dict(entry)!r}; it can say kind, one of {', '.join(kinds)}; gaps, a list of texts; "
        "and rare, a number of rows"
    )
