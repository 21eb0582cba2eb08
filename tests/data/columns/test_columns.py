"""Columns: what they learn, what they make of cells, counts batch by batch, and that log p integrates to one."""

import dataclasses
import datetime
import json
import math
from collections import Counter
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from xorflow.data import Schema
from xorflow.data.columns import (
    KINDS,
    Category,
    Column,
    Constant,
    Integer,
    Moment,
    Number,
    column_from_json,
    tally,
)
from xorflow.data.columns.tally import Counting, Tally
from xorflow.data.columns.types import python_values
from xorflow.errors import DataError


def _generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def _examples() -> dict[str, tuple[str, pa.Array, int]]:
    """A kind, cells and the least rows of a value, by what is special about them."""
    generator = _generator()
    normal = generator.normal(size=400)
    inflated = np.where(generator.random(400) < 0.4, 0.0, np.exp(normal))
    days = [datetime.date(2020, 1, 1) + datetime.timedelta(int(n)) for n in generator.integers(0, 900, 300)]
    times = [
        datetime.datetime(2020, 1, 1) + datetime.timedelta(seconds=int(n))
        for n in generator.integers(0, 10**8, 300)
    ]
    words = [*("ab" * 50), "once", "00123", None, *("rare" for _ in range(4))]
    return {
        "words": ("category", pa.array(words), 0),
        "rare words": ("category", pa.array(words), 5),
        "views": ("category", pa.array(words, pa.string_view()), 0),
        "dictionary": ("category", pa.array(words).dictionary_encode(), 0),
        "numbers as categories": ("category", pa.array([1.5, 2.5, None, 1.5, math.nan]), 0),
        "dates as categories": ("category", pa.array(days[:5] * 2), 0),
        "bits": ("boolean", pa.array([True, False, True, None]), 0),
        "ages": ("integer", pa.array([3, 10, 2, 3, 3], pa.int8()), 0),
        "constant": ("constant", pa.array(["x"] * 7), 0),
        "only gaps": ("constant", pa.nulls(5), 0),
        "normal": ("number", pa.array(normal), 0),
        "single precision": ("number", pa.array(normal.astype(np.float32)), 0),
        "inflated": ("number", pa.array(inflated), 0),
        "prices": ("number", pa.array(np.round(np.exp(normal) * 10, 2)), 0),
        "counts": ("number", pa.array(generator.poisson(1000, 400), pa.int16()), 0),
        "few numbers": ("number", pa.array([0.25, 0.5, 0.75] * 10), 0),
        "one number": ("number", pa.array([4.0, None, 4.0]), 0),
        "huge": ("number", pa.array([-1.7e308, 1.7e308, 0.0, 1.0, *normal]), 0),
        "tiny": ("number", pa.array([5e-324, 1e-323, 0.0, 2e-323] * 4), 0),
        "the least of all": ("number", pa.array([0.0, 0.0, 0.0, 5e-324, 5e-324, *[1e-300, 1e300] * 6]), 0),
        "with infinity": ("number", pa.array([math.inf, *normal, None]), 0),
        "decimals": ("number", pa.array(map(Decimal, [*range(300), *range(100)]), pa.decimal128(6, 2)), 0),
        "decimals as categories": ("category", pa.array([Decimal(1), Decimal(2), None] * 5, pa.decimal128(20, 3)), 0),
        "dictionary of times": ("category", pa.array(times[:5] * 2, pa.timestamp("us", "UTC")).dictionary_encode(), 0),
        "days": ("moment", pa.array(days), 0),
        "times": ("moment", pa.array(times, pa.timestamp("us", "UTC")), 0),
        "hours": ("moment", pa.array([datetime.time(hour % 24) for hour in range(5, 60)]), 0),
    }  # fmt: skip


EXAMPLES = _examples()


def _fitted(name: str) -> tuple[Column, pa.Array]:
    kind, cells, rare = EXAMPLES[name]
    return KINDS[kind].learn(Tally.of(name, pa.chunked_array([cells])), rare=rare), cells


@pytest.mark.parametrize("name", EXAMPLES)
def test_json_round_trip(name: str) -> None:
    column, _ = _fitted(name)
    assert column_from_json(json.loads(json.dumps(column.to_json(), allow_nan=False))) == column


@pytest.mark.parametrize("name", EXAMPLES)
def test_damaged_json_is_refused_or_another_column(name: str) -> None:
    content = _fitted(name)[0].to_json()
    bad = [None, -1, 2.5, "x", True, [], {}, [None], ["x", "x"], [2, 1], [0.0], 10**400, [10**30]]
    for key in content:
        for value in bad:
            try:
                column = column_from_json(content | {key: value})
            except DataError:
                continue
            codes = np.arange(column.categories)
            assert len(column.decode(codes, np.full(len(codes), 0.5))) == len(codes)


@pytest.mark.parametrize("name", EXAMPLES)
def test_cells_become_states_and_states_cells(name: str) -> None:
    column, cells = _fitted(name)
    codes = column.encode(cells)
    assert codes.dtype == np.int64
    assert codes.min() >= 0
    assert codes.max() < column.categories
    back = column.decode(codes, _generator().random(len(codes)))
    assert back.type == cells.type
    lost = [code == column.unseen for code in codes]
    assert [cell is None for cell in back.to_pylist()] == [
        bool(g or u) for g, u in zip(codes == column.gap, lost, strict=True)
    ]
    if column.measure == "mass" and "rare" not in name:
        expected = [cell if cell == cell else None for cell in cells.to_pylist()]
        assert column.decode(codes, np.zeros(len(codes))).to_pylist() == expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_drawn_cells_are_in_their_state(name: str) -> None:
    column, _ = _fitted(name)
    codes = np.repeat(np.arange(column.categories), 50)
    drawn = column.decode(codes, _generator().random(len(codes)))
    again = column.encode(drawn)
    expected = np.where(codes == column.unseen, column.gap, codes)
    atoms = set(getattr(column, "atoms", ()))
    rounds_to_atom = np.array([column.to_json()["kind"] in ("number", "moment") and bool(atoms)] * len(codes))
    moved = (again != expected) & ~rounds_to_atom
    assert moved.mean() <= 0.02  # single precision, and the ends of what a type holds
    assert np.isfinite(column.log_density(drawn, again)).all()


@pytest.mark.parametrize("name", EXAMPLES)
def test_unseen_is_shown_at_its_rate(name: str) -> None:
    column, cells = _fitted(name)
    codes = column.encode(cells)
    shown = column.with_unseen(codes, _generator(3))
    assert np.array_equal(shown, column.with_unseen(codes, _generator(3)))
    for state, rate in column.reserved.items():
        assert 0 < rate < 1
        assert (shown == state).sum() >= max(1, round(rate * len(codes)))
    assert (shown != codes).sum() <= sum(max(1, round(r * len(codes))) for r in column.reserved.values())
    if column.measure == "mass":
        counts = Counter(cell for cell in cells.to_pylist() if cell is not None and cell == cell)
        assert column.shown == min(list(counts.values()).count(1) + 1, max(1, len(cells) // 2))


@pytest.mark.parametrize(
    "name", [name for name, example in EXAMPLES.items() if example[0] in ("number", "moment")]
)
def test_density_integrates_to_one(name: str) -> None:
    """Within each state, by quadrature: inside bins, and over tails after a substitution that makes them finite."""
    column, _ = _fitted(name)
    assert isinstance(column, Number)
    bins = column.bins
    nodes, weights = np.polynomial.legendre.leggauss(60)
    nodes, weights = (nodes + 1) / 2, weights / 2
    for k in range(len(bins)):
        low, high = bins.edges[k], bins.edges[k + 1]
        x = low * (1 - nodes) + high * nodes
        inside = bins.log_density(x, np.full(len(x), k))
        log_width = math.log(high / 2 - low / 2) + math.log(2)
        total = (weights * np.exp(inside + log_width)).sum()
        for side, tail in enumerate((bins.below, bins.above)):
            if (k, side) in ((0, 0), (len(bins) - 1, 1)):
                # y = s / xi (1 / v^xi - 1) with v in (0, 1]: the integrand becomes the constant share
                v = nodes
                log_y = math.log(tail.scale / tail.shape) + np.log(np.expm1(-tail.shape * np.log(v)))
                log_slope = math.log(tail.scale) - (tail.shape + 1) * np.log(v)
                density = tail.log_density(log_y) + np.log(bins.tail_shares[side, k])
                total += (weights * np.exp(density + log_slope)).sum()
        assert total == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", ["normal", "inflated", "prices", "one number", "huge", "tiny"])
def test_every_finite_number_has_a_finite_density(name: str) -> None:
    column, _ = _fitted(name)
    extreme = [0.0, -0.0, 5e-324, 1e-300, 1e300, 1.7e308, math.pi]
    cells = pa.array([*extreme, *(-x for x in extreme), 4.0])
    codes = column.encode(cells)
    assert (codes < column.states).all()
    assert np.isfinite(column.log_density(cells, codes)).all()
    infinite = pa.array([math.inf, -math.inf])
    assert (column.encode(infinite) == column.unseen).all()
    assert (column.log_density(infinite, column.encode(infinite)) == 0).all()


def test_tails_join_the_law_of_the_draws() -> None:
    """Draws from all states by their training shares have the density that is claimed: by a test of uniformity."""
    column, _ = _fitted("normal")
    assert isinstance(column, Number)
    draws = column.decode(np.full(20_000, column.states - 1), _generator().random(20_000)).to_numpy()
    end = column.bins.edges[-1]
    share = column.bins.tail_shares[1, -1]
    assert abs((draws > end).mean() - share) < 5 * math.sqrt(share / 20_000)
    excess = draws[draws > end] - end
    tail = column.bins.above
    above = (1 + tail.shape * excess / tail.scale) ** (-1 / tail.shape)
    assert abs(above.mean() - 0.5) < 5 / math.sqrt(12 * len(above))


def test_atoms_are_values_that_recur() -> None:
    inflated, _ = _fitted("inflated")
    assert isinstance(inflated, Number)
    assert inflated.atoms == (0.0,)
    assert inflated.measure == "mass at 1 value, density per unit elsewhere"
    assert _fitted("normal")[0].atoms == ()  # pyright: ignore[reportAttributeAccessIssue]
    assert _fitted("few numbers")[0].atoms == (0.25, 0.5, 0.75)  # pyright: ignore[reportAttributeAccessIssue]
    codes = inflated.encode(pa.array([0.0, 1.0, 2.0, 50.0]))
    assert list(codes) == sorted(codes)


def test_bins_are_not_narrower_than_the_resolution() -> None:
    prices, _ = _fitted("prices")
    assert isinstance(prices, Number)
    assert prices.lattice == 0.01
    assert np.diff(prices.bins.edges).min() >= 0.01 * (1 - 1e-9)
    drawn = prices.decode(np.arange(prices.states), np.full(prices.states, 0.123)).to_pylist()
    assert all(value == round(value, 2) for value in drawn)
    far = dataclasses.replace(
        prices, bins=dataclasses.replace(prices.bins, edges=(*prices.bins.edges[:-1], 1.7e308))
    )
    drawn = far.decode(np.arange(far.states), np.full(far.states, 0.9)).to_pylist()
    assert max(value for value in drawn if value is not None) > 1e300  # and no number overflows on its way


def test_values_that_python_lacks_are_texts() -> None:
    days = pa.array([0, 5_000_000, -(2**31)], pa.int32()).cast(pa.date32())
    assert python_values(days[:1]) == [datetime.date(1970, 1, 1)]
    assert python_values(days) == ["1970-01-01", "15659-07-15", "<value out of range: -2147483648>"]
    assert "15659" in str(
        Schema.fit(pa.table({"day": pa.array([*range(99), 5_000_000], pa.int32()).cast(pa.date32())}))
    )


def test_unseen_cells_are_something_else() -> None:
    words, _ = _fitted("words")
    codes = words.encode(pa.array(["new", "a", None]))
    assert list(codes) == [words.unseen, 0 + words.encode(pa.array(["a"]))[0], words.gap]
    assert words.gap == words.unseen - 1
    ages, _ = _fitted("ages")
    assert list(ages.encode(pa.array([2.0, 2.5, 3.0, None]))) == [0, ages.unseen, 1, ages.unseen]
    constant, _ = _fitted("constant")
    assert constant.categories == 2
    assert list(constant.encode(pa.array(["x", "y", None]))) == [0, 1, 1]


def test_rare_values_share_a_state_and_keep_their_shares() -> None:
    column, _ = _fitted("rare words")
    assert isinstance(column, Category)
    assert column.values == ("a", "b")
    assert dict(zip(column.rare, column.rare_rows, strict=True)) == {"00123": 1, "once": 1, "rare": 4}
    codes = column.encode(pa.array(["once", "rare", "a"]))
    assert codes[0] == codes[1] == 2
    assert column.log_density(pa.array(["once", "rare", "a"]), codes) == pytest.approx(
        [math.log(1 / 6), math.log(4 / 6), 0]
    )
    drawn = column.decode(np.full(6000, 2), _generator().random(6000)).to_pylist()
    assert abs(drawn.count("rare") / 6000 - 4 / 6) < 0.03
    assert column.shown == 3


def test_numbers_of_another_width_are_the_same_numbers() -> None:
    column = Number.learn(
        Tally.of("x", pa.chunked_array([pa.array(np.array([0.1] * 20 + [0.25, 0.7, 0.9], np.float32))]))
    )
    assert column.encode(pa.array([0.1]))[0] == column.encode(pa.array([0.1], pa.float32()))[0]
    assert math.isclose(column.atoms[0], 0.1, rel_tol=1e-6)


def test_moments_have_densities_per_day() -> None:
    days, cells = _fitted("days")
    assert days.measure.endswith("density per day") or days.measure.endswith("density per day elsewhere")
    hours = Moment.learn(Tally.of("t", pa.chunked_array([cells.cast(pa.timestamp("ns"))])))
    a, b = (
        column.log_density(given, column.encode(given))
        for column, given in ((days, cells), (hours, cells.cast(pa.timestamp("ns"))))
    )
    assert a == pytest.approx(b)


@pytest.mark.parametrize(
    ("name", "cells"),
    [("words", pa.array([1])), ("ages", pa.array(["1"])), ("normal", pa.array(["1"])), ("bits", pa.array(["yes"])),
     ("days", pa.array(["2020-13-01"])), ("normal", pa.array([b"x"]))],
)  # fmt: skip
def test_a_wrong_type_is_an_error(name: str, cells: pa.Array) -> None:
    with pytest.raises(DataError, match="convert it"):
        _fitted(name)[0].encode(cells)


def test_columns_need_rows_and_numbers() -> None:
    empty = pa.chunked_array([pa.array([], pa.float64())])
    with pytest.raises(DataError, match="no rows"):
        Number.learn(Tally.of("x", empty))
    with pytest.raises(DataError, match="no finite number"):
        Number.learn(Tally.of("x", pa.chunked_array([pa.array([math.inf, None])])))
    with pytest.raises(DataError, match="must hold numbers"):
        Number.learn(Tally.of("x", pa.chunked_array([pa.array(["a"])])))
    with pytest.raises(DataError, match="--rare 5"):
        Category.learn(Tally.of("x", pa.chunked_array([pa.array(range(70_000))])))
    assert Integer.learn(Tally.of("x", pa.chunked_array([pa.array(range(70_000))])), rare=5).categories == 2
    assert Constant.learn(Tally.of("x", pa.chunked_array([pa.nulls(3, pa.string())]))).categories == 2


def test_minus_zero_is_zero() -> None:
    column = Integer.learn(Tally.of("n", pa.array([-0.0, 0.0, 1.0] * 3)))
    assert column.values == (0.0, 1.0)
    assert len(set(column.encode(pa.array([-0.0, 0.0])))) == 1


def test_states_of_one_byte_are_decoded_to_more_rare_values_than_a_byte_counts() -> None:
    common, rare = [f"common {n}" for n in range(100)] * 3, [f"rare {n}" for n in range(300)]
    column = Category.learn(Tally.of("word", pa.array(common + rare)), rare=2)
    states = np.full(900, len(column.values), np.uint8)
    drawn = column.decode(states, np.linspace(0, 1, 900, endpoint=False)).to_pylist()
    assert set(drawn) == set(rare)


@pytest.mark.parametrize(
    "text", ["decimal128(0, 0)", "decimal128(99, 2)", "decimal999(5, 2)", "dictionary[int8, list[x]]"]
)
def test_types_that_no_column_has_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="a column has an Arrow type"):
        column_from_json(_fitted("words")[0].to_json() | {"type": text})


def test_numbers_beyond_single_precision_are_scored_in_a_column_of_it() -> None:
    column, _ = _fitted("single precision")
    cells = pa.array([1e300, -1e300, math.inf])
    codes = column.encode(cells)
    assert list(codes < column.states) == [True, True, False]
    assert np.isfinite(column.log_density(cells, codes)).all()


@pytest.mark.parametrize("kind", ["integer", "category", "constant"])
def test_no_state_is_infinite(kind: str) -> None:
    column = KINDS[kind].learn(Tally.of("n", pa.array([math.inf, 1.0, 1.0, -math.inf, None])))
    assert column.encode(pa.array([math.inf, 1.0]))[0] == column.unseen
    assert column_from_json(json.loads(json.dumps(column.to_json(), allow_nan=False))) == column


# ---- counts of cells, batch by batch, are those of all cells at once ----


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
    column, whole = Number.learn(counted), Number.learn(Tally.of("x", pa.array(numbers)))
    assert column.atoms == whole.atoms == (0.5,)
    assert column.rows == whole.rows


def test_a_schema_learns_the_same_from_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    words = pa.array(["a", "a", "b", "c", None] * 20)
    monkeypatch.setattr(tally, "_WAITING", 3)
    counting = Counting("word", words.type)
    for first in range(0, 100, 9):
        counting.add(words.slice(first, 9))
    assert Category.learn(counting.tally(), rare=30) == Category.learn(Tally.of("word", words), rare=30)
