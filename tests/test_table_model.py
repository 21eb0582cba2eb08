"""Tables: log p of rows is a density in stated units that sums and integrates to one, and samples have that law."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pytest
import torch

from xorflow import (
    MADE,
    FactorisedBase,
    Intractable,
    LatentFlow,
    Layer,
    Mixture,
    ModelError,
    evaluate,
    fit,
    training,
)
from xorflow.data import Dataset, Split, load
from xorflow.data.columns import Category, Column, Constant, Number
from xorflow.data.columns.bins import Tail
from xorflow.data.columns.tally import Tally
from xorflow.data.schema import Schema
from xorflow.table_model import TableModel


def _table() -> pa.Table:
    """A number with an atom and a gap, a rare word and a constant."""
    generator = np.random.default_rng(0)
    number = [0.0] * 15 + [*np.exp(generator.normal(size=24)).tolist(), None]
    words = ["a", "b"] * 18 + ["once", "c", "c", "c"]
    return pa.table(
        {
            "number": pa.array(generator.permutation(np.array(number, object)), pa.float64()),
            "word": generator.permutation(words),
            "constant": pa.array(["same"] * 40),
        }
    )


def _columns(table: pa.Table) -> tuple[Column, ...]:
    number, word, constant = (table.column(name) for name in table.column_names)
    return (
        Number.learn(Tally.of("number", number)),
        Category.learn(Tally.of("word", word), rare=4),
        Constant.learn(Tally.of("constant", constant)),
    )


def _made(sizes: tuple[int, ...], seed: int = 0) -> LatentFlow:
    torch.manual_seed(seed)
    base = FactorisedBase(len(sizes), categories=sizes, p0=0.9)
    flow = LatentFlow([Layer(MADE(len(sizes), hidden=(16,), categories=sizes))], base).double().eval()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.mul_(2)  # far from the identity; what is masked stays so
    return flow


def _deep(sizes: tuple[int, ...]) -> LatentFlow:
    torch.manual_seed(1)
    layers = [
        Layer(MADE(len(sizes), hidden=(16,), order=order, categories=sizes))
        for order in ("natural", "reversed")
    ]
    base = FactorisedBase(len(sizes), categories=sizes, p0=0.7, learned=True)
    return LatentFlow(layers, base).double().eval()


MODELS = {
    "MADE": _made,
    "latent flow of two layers": _deep,
    "deterministic flow": lambda sizes: _deep(sizes).greedy(),
    "mixture": lambda sizes: Mixture([_made(sizes, seed) for seed in (1, 2)]).double(),
}


def _tail_points(end: float, tail: Tail, sign: int) -> Iterator[tuple[float, float]]:
    """Points beyond an end with their weights: y = s / xi (v^-xi - 1) over v in (0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(12)
    for v, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        yield (
            end + sign * tail.scale / tail.shape * math.expm1(-tail.shape * math.log(v)),
            weight * tail.scale * v ** (-tail.shape - 1),
        )


def _points(column: Column) -> list[tuple[object, float]]:
    """Cells that stand for all that a column can hold, each with the weight of its quadrature; of masses, 1."""
    if not isinstance(column, Number):
        values = [*getattr(column, "values", ()), *getattr(column, "rare", ())]
        return [(value, 1.0) for value in [*values, "never seen"]]
    points: list[tuple[object, float]] = [
        (None, 1.0),
        (math.inf, 1.0),
        *((atom, 1.0) for atom in column.atoms),
    ]
    nodes, weights = np.polynomial.legendre.leggauss(4)
    for low, high in itertools.pairwise(column.bins.edges):
        inside = zip(low + (high - low) * (nodes + 1) / 2, weights * (high - low) / 2, strict=True)
        points += [(float(x), float(weight)) for x, weight in inside]
    points += _tail_points(column.bins.edges[0], column.bins.below, -1)
    points += _tail_points(column.bins.edges[-1], column.bins.above, 1)
    return points


@pytest.mark.parametrize("name", MODELS)
def test_log_p_sums_and_integrates_to_one(name: str) -> None:
    """Over all rows: a number with an atom and a gap, words with one that nobody has seen, and a constant that varies."""
    schema = Schema(_columns(_table()))
    model = TableModel(schema, MODELS[name](schema.categories))
    cells = list(itertools.product(*map(_points, schema.columns)))
    columns = {
        column.name: pa.array([row[d][0] for row in cells], column.type)
        for d, column in enumerate(schema.columns)
    }
    weights = np.array([math.prod(weight for _, weight in row) for row in cells])
    scores = model.score(pa.table(columns))
    assert scores.kind == "exact"
    assert scores.values.dtype == np.float64
    assert (weights * np.exp(scores.values)).sum() == pytest.approx(1, abs=1e-11)
    assert scores.unseen.keys() == {"number", "word", "constant"}


def test_parts_by_column_add_up() -> None:
    table = _table()
    schema = Schema(_columns(table))
    scores = TableModel(schema, _made(schema.categories)).score(table, by_column=True)
    assert scores.by_column is not None
    assert scores.by_column.shape == (40, 3)
    assert scores.by_column.sum(1) == pytest.approx(scores.values)
    assert scores.values == pytest.approx(TableModel(schema, _made(schema.categories)).log_prob(table))
    assert scores.unseen == {}


def test_a_model_without_an_exact_likelihood_says_so_or_gives_a_bound() -> None:
    schema = Schema(_columns(_table()))
    sizes = schema.categories
    layers = [
        Layer(MADE(3, hidden=(4,), categories=sizes, order=order)) for order in ("natural", "reversed")
    ] * 12
    model = TableModel(schema, LatentFlow(layers, FactorisedBase(3, categories=sizes)).eval())
    with pytest.raises(Intractable):
        model.log_prob(_table())
    scores = model.score(_table(), samples=4)
    assert scores.kind == "lower bound"
    assert np.isfinite(scores.values).all()


def test_rows_with_what_nobody_has_seen_are_scored_and_counted() -> None:
    schema = Schema(_columns(_table()))
    rows = pa.table(
        {"constant": ["same", "other", None], "word": ["a", "new", None], "number": [0.0, None, math.inf]}
    )
    scores = TableModel(schema, _made(schema.categories)).score(rows)
    assert np.isfinite(scores.values).all()
    assert scores.unseen == {"number": 1, "word": 2, "constant": 2}


def test_samples_have_the_columns_that_came_in_and_the_law_of_the_model() -> None:
    table = _table()
    schema = Schema(_columns(table), order=tuple(table.column_names))
    model = TableModel(schema, _made(schema.categories))
    drawn = model.sample(20_000, seed=3)
    assert drawn.schema.equals(table.schema)
    assert drawn.equals(model.sample(20_000, seed=3))
    assert not drawn.equals(model.sample(20_000, seed=4))
    states = torch.tensor(list(itertools.product(*map(range, schema.categories))))
    with torch.no_grad():
        expected = model.model().log_prob(states).exp().numpy()
    known = schema.columns[1]
    share = expected[(states[:, 1] == known.unseen).numpy()].sum()
    assert abs(drawn["word"].null_count / 20_000 - share) < 5 * math.sqrt(share / 20_000)
    atom = schema.columns[0].encode(pa.array([0.0]))[0]
    share = expected[(states[:, 0] == atom).numpy()].sum()
    assert abs((drawn["number"].to_numpy() == 0).mean() - share) < 5 * math.sqrt(share / 20_000)


def test_training_teaches_that_something_else_has_its_rate() -> None:
    """Two of 300 words occur once, so that three cells of 300 show "something else"."""
    words = pa.chunked_array([pa.array(["a", "b"] * 149 + ["once", "too"])])
    schema = Schema((Category.learn(Tally.of("word", words)),))
    codes = schema.shown(schema.encode(pa.table({"word": words})), 0)
    assert (codes == schema.columns[0].unseen).sum() == 3
    flow = _made(schema.categories).float()
    data = Dataset("words", Split(torch.from_numpy(codes)), None, None, schema.categories)
    fit(flow, data, init="data", epochs=40, lr=0.01)
    unseen = TableModel(schema, flow).log_prob(pa.table({"word": ["nobody wrote this"]}))
    assert math.exp(unseen[0]) == pytest.approx(3 / 300, rel=0.15)


def test_a_model_has_the_states_of_its_schema() -> None:
    schema = Schema(_columns(_table()))
    with pytest.raises(ModelError, match=r"categories=schema\.categories"):
        TableModel(schema, _made((9, 9, 9)))
    context = LatentFlow(
        [Layer(MADE(3, categories=schema.categories, context=2))],
        FactorisedBase(3, categories=schema.categories),
    )
    with pytest.raises(ModelError, match="no context"):
        TableModel(schema, context)


def test_measures_are_stated() -> None:
    schema = Schema(_columns(_table()))
    model = TableModel(schema, _made(schema.categories))
    number = "mass at 1 value, density per unit elsewhere"
    assert model.measures == {"number": number, "word": "mass", "constant": "mass"}
    assert "3 columns" in repr(model)


def _people(rows: int, seed: int) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    height = generator.normal(170, 10, rows).round(1)
    weight = np.where(generator.random(rows) < 0.2, np.nan, height - 100 + generator.normal(0, 8, rows))
    return pd.DataFrame(
        {"height": height, "weight": weight, "town": generator.choice(["Rome", "Oslo"], rows)}
    )


def test_likelihoods_of_held_out_rows_are_densities(tmp_path: Path) -> None:
    """What a run reports of a table is what its TableModel says of the same rows."""
    held_out = _people(80, 1)
    data = load(_people(400, 0), validation=0.2, test_data=held_out)
    flow = _made(data.categories).float()
    result = fit(flow, data, init="data", epochs=2, out=tmp_path / "run")
    model = TableModel(data.schema, flow)
    log_p = model.log_prob(held_out)
    assert data.test is not None
    assert evaluate.exact(flow, data.test).values.numpy() == pytest.approx(log_p, abs=1e-5)
    assert result["test"]["nll"] == pytest.approx(-log_p.mean(), abs=1e-5)
    assert result["test"]["stderr"] == pytest.approx(log_p.std(ddof=1) / math.sqrt(80), rel=1e-4)
    assert result["test"]["floor"] < result["test"]["nll"] < result["independent_nll"] + 1
    assert result["data"]["measures"] == model.measures
    opened = training.open_run(tmp_path / "run")
    again = TableModel(opened.schema, opened.flow)
    assert again.log_prob(held_out) == pytest.approx(log_p, abs=1e-5)
    assert again.measures == model.measures


def test_frames_of_polars_are_tables() -> None:
    frame = _people(100, 0)
    data, same = load(frame), load(polars.from_pandas(frame))
    assert torch.equal(data.train.values, same.train.values)
    assert same.schema is not None
    drawn = TableModel(same.schema, _made(same.categories)).sample(5)
    assert polars.from_arrow(drawn).columns == ["height", "weight", "town"]
