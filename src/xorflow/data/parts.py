"""The parts of a data set: rows drawn by a seed, or named by a column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xorflow._math import philox_raw
from xorflow.data.dataset import ORDER
from xorflow.errors import DataError

_SHARE = 0.1
"""Of rows that validate, and of those that test, unless it is said."""

_NAMES = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
"""How a column names parts."""


def drawn(
    rows: int, validation: float | int | None, test: float | int | None, seed: int
) -> dict[str, np.ndarray]:
    """Rows in the order of the seed: first those that test, then those that validate; the rest trains, and is not empty."""
    counts = []
    for name, share in (("validation", validation), ("test", test)):
        share = _SHARE if share is None else share
        if isinstance(share, bool) or not share >= 0 or (isinstance(share, float) and share >= 1):
            raise DataError(f"{name}= is a fraction in [0, 1) or a number of rows, got {share!r}")
        # A part that was asked for is never empty, however small the fraction.
        counts.append(max(1, round(rows * share)) if isinstance(share, float) and share else int(share))
    needed = 1 + sum(counts)
    if rows < needed:
        raise DataError(
            f"the split needs {needed} rows or more, 1 to train, {counts[0]} to validate and {counts[1]} to "
            f"test, got {rows}; lower validation= and test=, or bring more rows"
        )
    ends = np.cumsum(counts[::-1])
    parts = dict(zip(("test", "validation", "train"), np.split(shuffled(rows, seed), ends), strict=True))
    return {name: each for name, each in parts.items() if len(each)}


def shuffled(count: int, seed: int) -> np.ndarray:
    """A permutation of 0..count - 1 from the seed: the order of `count` raw words."""
    return np.argsort(philox_raw(seed, ORDER, count), kind="stable")


def named(cells: Sequence[str | None], column: str) -> dict[str, np.ndarray]:
    """The rows of each part that a column names."""
    odd = next((cell for cell in cells if cell is None or cell.strip().lower() not in _NAMES), "")
    if odd != "":
        raise DataError(
            f"column {column!r} names the part of each row, one of {', '.join(_NAMES)}; one row has {odd!r}: mend it"
        )
    parts = np.array([_NAMES[cell.strip().lower()] for cell in cells if cell is not None])
    rows = {name: np.flatnonzero(parts == name) for name in ("train", "validation", "test")}
    if not len(rows["train"]):
        raise DataError(f"column {column!r} names the part of each row, and no row is to train; mend it")
    return {name: each for name, each in rows.items() if len(each)}
