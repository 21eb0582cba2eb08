"""Scores as engines ask for them: of batches cut anywhere, on workers that read the run for themselves."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from tiny_runs import call, people_file, rows_file, tiny_options, train_run
from xorflow import TableModel, evaluate
from xorflow.batch import Scorer
from xorflow.data.tables import open_table
from xorflow.errors import CheckpointError, ConfigError, DataError
from xorflow.training import open_run

KINDS = {
    "made": {},
    "wide": {"conditioner": call("made", hidden=(64, 32))},
    "transformer": {"conditioner": call("transformer", width=8, depth=1, heads=2)},
    "mixture": {"mixture": "natural,reversed"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batch")
    people_file(folder / "people.csv")
    return folder


def made(folder: Path, kind: str, **options: object) -> Path:
    run = folder / kind
    if not run.exists():
        train_run(tiny_options(folder / "people.csv", **options), run)
    return run


def rows(folder: Path, count: int = 500) -> pa.Table:
    return open_table(people_file(folder / "new.csv", rows=count, seed=1)).read()


def scores(scorer: Scorer, table: pa.Table, cut: int) -> np.ndarray:
    """Of batches of so many rows."""
    pieces = [scorer(table.slice(first, cut)) for first in range(0, len(table), cut)]
    return pa.concat_tables(pieces)[scorer.column].to_numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_exact_log_p_and_have_the_same_bits_however_rows_are_batched(
    folder: Path, kind: str
) -> None:
    run, table = made(folder, kind, **KINDS[kind]), rows(folder, 1500)
    scorer, opened = Scorer(run), open_run(run)
    assert opened.schema is not None
    expected = evaluate.exact(opened.flow, torch.from_numpy(opened.schema.encode(table))).values.numpy()
    whole = scores(scorer, table, len(table))
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-5)
    order = np.random.default_rng(0).permutation(len(table))
    for cut in (1, 7, 64, 100, 1024):
        count = 20 * cut if cut < 20 else len(table)
        assert np.array_equal(scores(scorer, table.slice(0, count), cut), whole[:count]), cut
    assert np.array_equal(scores(scorer, table.take(order), 300), whole[order])


def test_a_bound_has_noise_that_follows_from_the_row_alone(folder: Path) -> None:
    run, table = made(folder, "deep", layers=2), rows(folder, 200)
    scorer = Scorer(run, samples=8)
    assert scorer.column == "lower_bound"
    whole = scores(scorer, table, len(table))
    for cut in (1, 30, 150):
        np.testing.assert_allclose(scores(scorer, table, cut), whole, rtol=0, atol=1e-5)
    assert len(np.unique(whole.round(4))) <= len(table.to_pandas().drop_duplicates())


def test_the_noise_of_rows_is_unbiased(folder: Path) -> None:
    """The weights' mean is p(x): over 400 seeds, within 4.5 standard errors in each row."""
    run = made(folder, "deep", layers=2)
    opened = open_run(run)
    assert opened.schema is not None
    x = torch.from_numpy(np.unique(opened.schema.encode(rows(folder)), axis=0))
    flow = opened.latent.double()
    expected = evaluate.exact(flow, x).values.exp()
    drawn = [
        evaluate.importance(flow, x, samples=1, seed=seed, noise="row").values.exp() for seed in range(400)
    ]
    weights = torch.stack(drawn)
    stderr = weights.std(0) / len(weights) ** 0.5
    z = (weights.mean(0) - expected) / stderr
    assert float(z.abs().max()) < 4.5
    assert abs(float(z.mean())) < 4 / len(x) ** 0.5
    assert len(torch.unique(weights[:, 0])) > 10


def test_a_pickled_scorer_is_a_path_and_a_digest(folder: Path, tmp_path: Path) -> None:
    run, table = made(folder, "made"), rows(folder)
    scorer = Scorer(run)
    scorer(table)
    content = pickle.dumps(scorer)
    assert len(content) < 1000
    assert pickle.loads(content)(table).equals(scorer(table))
    assert pickle.loads(content) == scorer
    shutil.copytree(run, tmp_path / "run")
    stale = pickle.dumps(Scorer(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(made(folder, "other", seed=1), tmp_path / "run")
    with pytest.raises(CheckpointError, match="another here"):
        pickle.loads(stale)(table)


def test_what_came_stays_and_scores_are_a_column_more(folder: Path) -> None:
    scorer, table = Scorer(made(folder, "made"), flow="deterministic"), rows(folder)
    named = table.append_column("id", pa.array(range(len(table))))
    scored = scorer(named)
    assert scored.drop_columns(["log_prob"]).equals(named)
    assert scored.schema.field("log_prob").type == pa.float64()
    assert scorer(named.slice(0, 0)).schema == scored.schema
    opened = open_run(Path(scorer.run))
    assert opened.schema is not None
    of_table = TableModel(opened.schema, opened.flow.greedy()).log_prob(table)
    assert np.array_equal(scored["log_prob"].to_numpy(), of_table)
    with pytest.raises(DataError, match="rename it"):
        scorer(scored)
    with pytest.raises(DataError, match="no 'pet'"):
        scorer(table.drop_columns(["pet"]))


def test_runs_without_a_table_or_that_are_none_are_refused(folder: Path, tmp_path: Path) -> None:
    train_run(tiny_options(rows_file(tmp_path / "rows.npy")), tmp_path / "run")
    with pytest.raises(ConfigError, match="takes tables"):
        Scorer(tmp_path / "run")(rows(folder))
    with pytest.raises(CheckpointError, match="index of the weights is missing"):
        Scorer(tmp_path / "none")
    with pytest.raises(ConfigError, match="refitted base needs"):
        Scorer(tmp_path / "run", flow="refitted")
