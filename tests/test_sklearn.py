"""scikit-learn's own checks, and what its conventions do not ask."""

import copy
import datetime
import importlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pytest
from scipy.stats import betabinom, kstest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

import xorflow as xf
from xorflow.errors import CheckpointError, DataError, UserError
from xorflow.sklearn import FlowDensity, FlowDetector

_TINY: dict[str, Any] = {"orderings": 1}


@parametrize_with_checks([FlowDensity(), FlowDetector(), FlowDensity(orderings=2)])
def test_by_the_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


def _frame(rows: int = 200, seed: int = 0) -> pd.DataFrame:
    """Text, numbers with gaps, dates, booleans, categories and an index that is no column."""
    generator = np.random.default_rng(seed)
    amount = generator.gamma(2, 10, rows)
    amount[generator.random(rows) < 0.1] = np.nan
    word = generator.choice(["red", "green", "blue"], rows).astype(object)
    word[0] = None
    start = datetime.date(2024, 1, 1)
    return pd.DataFrame(
        {
            "amount": amount,
            "word": word,
            "day": [start + datetime.timedelta(int(n)) for n in generator.integers(0, 300, rows)],
            "member": generator.random(rows) < 0.3,
            "size": pd.Categorical(generator.choice(["S", "M"], rows)),
            "age": generator.integers(18, 90, rows),
            "constant": 1,
        },
        index=generator.permutation(rows) + 7,
    )


@pytest.fixture(scope="module")
def fitted() -> FlowDetector:
    return FlowDetector(**_TINY).fit(_frame())


def test_frames_come_in_and_go_out(fitted: FlowDetector) -> None:
    frame = _frame()
    assert list(fitted.feature_names_in_) == list(frame.columns)
    assert fitted.score_samples(frame).shape == (200,)
    assert fitted.score(frame) == pytest.approx(fitted.score_samples(frame).mean())
    assert fitted.measures_["day"].endswith("density per day")
    drawn = fitted.sample(50, random_state=1)
    assert isinstance(drawn, pd.DataFrame)
    assert list(drawn.columns) == list(frame.columns)
    assert np.isfinite(fitted.score_samples(drawn)).all()
    table = pa.table({name: pa.array(frame[name].tolist(), from_pandas=True) for name in frame})
    assert fitted.score_samples(table) == pytest.approx(fitted.score_samples(frame))
    assert isinstance(FlowDensity(**_TINY).fit(table).sample(3), pa.Table)
    other = polars.from_arrow(table)
    assert fitted.score_samples(other) == pytest.approx(fitted.score_samples(frame))
    assert isinstance(FlowDensity(**_TINY).fit(other).sample(3), polars.DataFrame)


@pytest.mark.parametrize("framed", [True, False])
def test_samples_have_the_columns_that_are_left_out_as_gaps(framed: bool) -> None:
    rows: Any = pd.DataFrame({"key": [f"key {n}" for n in range(60)], "word": ["a", "b", "a"] * 20})
    density = FlowDensity(orderings=1).fit(rows if framed else rows.to_numpy())
    drawn = density.sample(4)
    assert drawn.shape == (4, 2)
    cells = drawn.to_numpy() if framed else drawn
    assert pd.isna(cells[:, 0]).all()
    assert set(cells[:, 1]) <= {"a", "b", None}
    assert np.isfinite(density.score_samples(drawn)).all()


def test_what_was_never_seen_is_no_error(fitted: FlowDetector) -> None:
    odd = _frame(3)
    odd["word"] = ["violet", None, "red"]
    odd["amount"] = [np.inf, -1e300, np.nan]
    odd["size"] = pd.Categorical(["XXL", "S", None])
    odd["constant"] = [2, 1, 1]
    odd["day"] = [datetime.date(1, 1, 1), datetime.date(9999, 1, 1), None]
    scores = fitted.score_samples(odd)
    assert np.isfinite(scores).all()
    assert scores[0] < fitted.score_samples(_frame()).min()
    assert fitted.predict(odd)[0] == -1


def test_arrays_of_objects_are_numbers_or_texts() -> None:
    generator = np.random.default_rng(0)
    rows = np.stack([generator.choice(["a", "b", "7"], 60), generator.normal(size=60)], 1).astype(object)
    rows[:, 1] = rows[:, 1].astype(float)
    rows[3, 1], rows[4, 0] = None, np.nan
    model = FlowDensity(**_TINY).fit(rows)
    assert model.measures_ == {"x0": "mass", "x1": "density per unit"}
    assert np.isfinite(model.score_samples(np.array([[7, 0.5], ["c", None]], object))).all()
    assert model.sample(5).dtype == object
    truth = np.where(generator.random((60, 2)) < 0.2, None, generator.random((60, 2)) < 0.5)
    model = FlowDensity(**_TINY).fit(truth)
    assert np.isfinite(model.score_samples(model.sample(50))).all()


def test_long_doubles_are_doubles() -> None:
    rows = _rows(40, 0, 3)
    same = [FlowDensity(**_TINY).fit(x).score_samples(x) for x in (rows, rows.astype(np.longdouble))]
    np.testing.assert_array_equal(*same)


def test_columns_are_of_the_kind_that_is_said() -> None:
    rows = np.random.default_rng(0).normal(size=(60, 1)).round(1)
    assert FlowDensity(**_TINY).fit(rows).measures_["x0"] != "mass"
    assert FlowDensity(columns={"x0": "category"}, **_TINY).fit(rows).measures_ == {"x0": "mass"}
    rising = np.arange(100.0)[:, None]  # what a table would call an identifier
    assert FlowDensity(**_TINY).fit(rising).measures_ == {"x0": "density per unit"}


def test_scores_do_not_depend_on_the_rows_beside_them(fitted: FlowDetector) -> None:
    frame = _frame()
    one_by_one = [fitted.score_samples(frame.iloc[[n]])[0] for n in range(20)]
    assert fitted.score_samples(frame)[:20] == pytest.approx(one_by_one, abs=1e-10)


def test_pipelines_searches_clones_and_pickles(fitted: FlowDetector, tmp_path: Path) -> None:
    frame = _frame(90)
    search = GridSearchCV(
        make_pipeline(FunctionTransformer(), FlowDensity(**_TINY)),
        {"flowdensity__rare": [0, 5]},
        cv=2,
    )
    search.fit(frame)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert clone(fitted).get_params() == fitted.get_params()
    joblib.dump(fitted, tmp_path / "fitted.joblib")
    for again in (pickle.loads(pickle.dumps(fitted)), joblib.load(tmp_path / "fitted.joblib")):
        assert np.array_equal(again.score_samples(frame), fitted.score_samples(frame))
    refit = clone(fitted).fit(_frame())
    assert np.array_equal(refit.score_samples(frame), fitted.score_samples(frame))


def test_a_fitted_estimator_is_the_folder_of_a_run(fitted: FlowDetector, tmp_path: Path) -> None:
    frame = _frame(50, seed=1)
    fitted.save(tmp_path / "run")
    again = FlowDetector.load(tmp_path / "run")
    assert again.get_params() == fitted.get_params()
    assert np.array_equal(again.score_samples(frame), fitted.score_samples(frame))
    assert np.array_equal(again.predict(frame), fitted.predict(frame))
    assert np.array_equal(again.p_values(frame), fitted.p_values(frame))
    assert again.sample(3, 0).equals(fitted.sample(3, 0))
    assert clone(again).fit(_frame()).offset_ == fitted.offset_
    with pytest.raises(UserError, match="empty"):
        fitted.save(tmp_path / "run")
    flow = xf.load(tmp_path / "run")
    assert xf.TableModel(fitted.table_model_.schema, flow).log_prob(frame) == pytest.approx(
        fitted.score_samples(frame), abs=1e-3
    )


def test_any_run_on_a_table_is_a_density(fitted: FlowDetector, tmp_path: Path) -> None:
    table = fitted.table_model_
    xf.save(copy.deepcopy(table.model).float(), tmp_path / "run", table.schema)
    density = FlowDensity.load(tmp_path / "run")
    assert np.array_equal(density.score_samples(_frame()), fitted.score_samples(_frame()))
    with pytest.raises(CheckpointError, match="load a FlowDensity"):
        FlowDetector.load(tmp_path / "run")
    for bad in (
        {"parameters": 3},
        {"parameters": {"lr": []}, "container": {}, "named": 1},
        {"offset": 1, "calibration_scores": 2},
    ):
        (tmp_path / "run" / "sklearn.json").write_text(json.dumps(bad))
        with pytest.raises(CheckpointError):
            FlowDetector.load(tmp_path / "run")


def _rows(count: int, seed: int, distinct: int) -> np.ndarray:
    """Rows with many ties where few values are distinct, and none otherwise."""
    generator = np.random.default_rng(seed)
    if distinct:
        return generator.integers(0, distinct, (count, 2)) ** 2
    return generator.normal(size=(count, 2)) @ np.array([[1, 0.8], [0, 0.6]])


@pytest.mark.parametrize("distinct", [0, 3])
def test_p_values_hold_at_the_size_of_the_calibration(distinct: int) -> None:
    """How many of fresh rows have p <= k / (n + 1), given n calibration rows, is beta-binomial with k and n + 1 - k."""
    detector = FlowDetector(calibration=0.5, **_TINY).fit(_rows(400, 0, distinct))
    n = len(detector.calibration_scores_)
    assert n == 200
    p_values = detector.p_values(_rows(3000, 1, distinct))
    for k in (1, 2, 10, 40, 100):
        alarms = int((p_values <= k / (n + 1) + 1e-12).sum())
        low, high = betabinom.interval(0.9999, 3000, k, n + 1 - k)
        assert low <= alarms <= high
    assert np.array_equal(p_values, detector.p_values(_rows(3000, 1, distinct)))
    assert not distinct or not np.array_equal(
        p_values, detector.p_values(_rows(3000, 1, distinct), random_state=1)
    )


def test_p_values_are_uniform_over_calibrations() -> None:
    """Of one fresh row for each of many calibrations, all by one model, as where rows are exchangeable."""
    detector = FlowDetector(calibration=0.5, **_TINY).fit(_rows(60, 0, 3))
    generator, values = np.random.default_rng(0), []
    scores = detector.score_samples(_rows(31 * 400, 5, 3)).reshape(400, 31)
    rows = _rows(31 * 400, 5, 3).reshape(400, 31, 2)
    for n in range(400):
        detector.calibration_scores_ = np.sort(scores[n, 1:])
        values.append(detector.p_values(rows[n, :1], random_state=n)[0])
    jittered = np.array(values) - generator.random(400) / 31  # p takes the values 1/31 ... 31/31
    assert kstest(jittered, "uniform").pvalue > 1e-4


def test_bad_arguments_are_errors_of_one_line() -> None:
    rows = _rows(40, 0, 3)
    for bad in ({"contamination": 0.7}, {"calibration": 1.0}, {"validation": 0}, {"orderings": 0}, {"orderings": 1.5},
                {"columns": {"x0": "colour"}}, {"columns": {"zip": "category"}}, {"columns": 3}, {"minutes": -1},
                {"minutes": "2"}, {"rare": []}, {"rare": -1}):  # fmt: skip
        with pytest.raises(UserError) as error:
            FlowDetector(**_TINY | bad).fit(rows)
        assert isinstance(error.value, ValueError)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="need calibration rows"):
        FlowDetector(calibration=0, **_TINY).fit(rows).p_values(rows)
    with pytest.raises(DataError, match="column 'age' holds numbers"):
        FlowDensity(**_TINY).fit(_frame()).score_samples(_frame().assign(age="old"))


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "xorflow.sklearn")
    with pytest.raises(UserError, match=r"pip install 'xorflow\[sklearn\]'"):
        importlib.import_module("xorflow.sklearn")
