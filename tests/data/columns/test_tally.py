"""Counts of a column's cells, batch by batch, are those of all cells at once."""

import datetime

import numpy as np
import pyarrow as pa
import pytest

from xorflow.data.columns import Category, Number, tally
from xorflow.data.columns.tally import Counting, Tally

CELLS = {
    "text": pa.array(["b", None, "a", "b", "c"] * 40),
    "dictionary": pa.array(["b", None, "a", "b", "c"] * 40).dictionary_encode(),
    "number": pa.array([0.5, float("nan"), -0.0, 0.0, None] * 40),
    "integer": pa.array([3, 1, None, 2, 2] * 40, pa.int16()),
    "date": pa.array([datetime.date(2020, 1, 1), None, datetime.date(1999, 1, 1)] * 60),
    "boolean": pa.array([True, None, False] * 60),
    "nothing": pa.nulls(200),
    "rising": pa.array(range(200)),
    "nested": pa.array([[1], [2]] * 90),
}


def told(one: Tally) -> tuple:
    return one.values.to_pylist(), one.counts.tolist(), one.rows, one.gaps, one.one_way, one.type


@pytest.mark.parametrize("kind", CELLS)
def test_batches_count_as_all_cells_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = CELLS[kind]
    whole = Tally.of("x", cells)
    monkeypatch.setattr(tally, "_WAITING", 16)
    counting = Counting("x", cells.type)
    for first in range(0, len(cells), 7):
        counting.add(cells.slice(first, 7))
    assert told(counting.tally()) == told(whole)
    assert whole.counts.sum() + whole.gaps == (0 if kind == "nested" else len(cells))
    assert kind not in ("rising", "integer") or whole.one_way == (kind == "rising")


def test_of_very_many_values_a_share_of_the_rows_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half, then a quarter: the counts of 0.5, in 3,000 of 9,000 rows, are binomial, so within five standard deviations."""
    rng = np.random.default_rng(0)
    numbers = np.where(np.arange(9_000) % 3 == 0, 0.5, rng.standard_normal(9_000))
    monkeypatch.setattr(tally, "_WAITING", 500)
    monkeypatch.setattr(tally, "_MOST_VALUES", 2_000)
    counting = Counting("x", pa.float64())
    for part in np.array_split(numbers, 30):
        counting.add(pa.array(part))
    counted = counting.tally()
    assert counting.share == 0.25
    assert counted.rows == 9_000
    assert abs(counted.counts.sum() - 2_250) < 5 * np.sqrt(9_000 * 0.25 * 0.75)
    assert abs(counted.counts.max() - 750) < 5 * np.sqrt(3_000 * 0.25 * 0.75)
    column, whole = Number.learn(counted), Number.fit("x", pa.array(numbers))
    assert column.atoms == whole.atoms == (0.5,)
    assert column.rows == whole.rows


def test_a_schema_learns_the_same_from_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    words = pa.array(["a", "a", "b", "c", None] * 20)
    monkeypatch.setattr(tally, "_WAITING", 3)
    counting = Counting("word", words.type)
    for first in range(0, 100, 9):
        counting.add(words.slice(first, 9))
    assert Category.learn(counting.tally(), rare=30) == Category.fit("word", words, rare=30)
