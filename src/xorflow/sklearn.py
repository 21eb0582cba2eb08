"""Densities and outliers of tables by scikit-learn's conventions; needs the extra `xorflow[sklearn]`."""

from __future__ import annotations

import copy
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch

from xorflow._files import inside, read_json, write_json
from xorflow.data import Dataset, Split
from xorflow.data.checks import narrow
from xorflow.data.columns.tally import Tally
from xorflow.data.columns.types import is_text
from xorflow.data.kinds import kind_of
from xorflow.data.parts import shuffled
from xorflow.data.schema import Schema
from xorflow.data.schema_file import Wish, read_wishes
from xorflow.errors import CheckpointError, ConfigError, DataError
from xorflow.flows import LatentFlow, Mixture
from xorflow.table_model import TableModel
from xorflow.training import auto_fit, open_run, resolve_device, save
from xorflow.training.registry import accepted_record

try:
    from sklearn.base import BaseEstimator, OutlierMixin
    from sklearn.utils import Tags, check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise ConfigError(
        "xorflow.sklearn needs scikit-learn 1.6 or later: pip install 'xorflow[sklearn]'"
    ) from None


@dataclass(kw_only=True, eq=False, repr=False)
class FlowDensity(BaseEstimator):
    """The density of a table's rows: log p of each, exact, and new rows like them; the best that `minutes` allow.

    Rows come as a frame of pandas or polars, an Arrow table or an array; columns hold numbers, dates, booleans or text, and may
    have gaps. log p is a mass for values that recur, and otherwise a density per unit of the column: see `measures_`. A cell
    that no training row has is scored as "something else" and is never an error.

    Args:
        minutes: of two cores, that `fit` may take; small tables take less.
        orderings: how many orderings of the columns are mixed, instead of as many as fit into `minutes`.
        validation: the share of rows that choose everything.
        rare: values that occur in fewer rows share a state.
        columns: kinds of columns, by name, that are not to be found out, such as {"year": "category"}.
        random_state: of the split, the weights and the batches; None is 0.
        device: where to train and score.

    Attributes:
        table_model_: the `TableModel`.
        record_: what was tried, chosen and why; with the `orderings` in it the same fit is made again.
        measures_: what log p of each column is the logarithm of.
        n_features_in_: how many columns there are.
        feature_names_in_: their names, if they are texts.

    >>> import numpy as np
    >>> rows = np.random.default_rng(0).integers(0, 3, (60, 2))
    >>> FlowDensity(orderings=1).fit(rows).score_samples(rows[:4]).shape
    (4,)
    """

    minutes: float = 2.0
    orderings: int | None = None
    validation: float = 0.1
    rare: int = 0
    columns: Mapping[str, str] | None = None
    random_state: Any = None
    device: str = "cpu"
    n_features_in_: int = field(init=False)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn the columns and their joint density from rows; `y` is ignored."""
        del y
        table = self._rows(X, reset=True)
        self._learn(table, self._split(len(table), {"validation": self.validation}))
        return self

    def score_samples(self, X: Any) -> np.ndarray:
        """log p of each row, in nats."""
        check_is_fitted(self)
        return self.table_model_.log_prob(self._rows(X))

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of log p over rows."""
        del y
        return float(self.score_samples(X).mean())

    def sample(self, n_samples: int = 1, random_state: Any = None) -> Any:
        """New rows, of the kind that `fit` was given: a frame of pandas or polars, an Arrow table, or an array.

        Columns that were left out are gaps.
        """
        check_is_fitted(self)
        drawn = self.table_model_.sample(n_samples, _seed(random_state))
        kind = pa.float64() if self.container_ == "array" else None
        table = self.table_model_.schema.with_left_out(drawn, kind)
        if self.container_ == "array":
            columns = [column.to_numpy() for column in table.columns]
            return np.stack(columns, 1)
        if self.container_ == "pandas":
            return table.to_pandas()
        if self.container_ == "polars":
            import polars  # pyright: ignore[reportMissingImports]

            return polars.from_arrow(table)
        return table

    # ---- as a folder ----

    def save(self, folder: str | Path) -> None:
        """Keep the fitted estimator as the folder of a run, new or empty, which every command takes; nothing is pickled."""
        check_is_fitted(self)
        model = copy.deepcopy(self.table_model_.model).float()  # the precision that it was trained in
        assert isinstance(model, LatentFlow | Mixture)
        save(model, folder, self.table_model_.schema)
        write_json(Path(folder) / _ESTIMATOR, self._kept())

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "cpu") -> Self:
        """The estimator that `save` kept, or that of any run on a table; executes nothing that is in the folder."""
        folder = Path(folder)
        run = open_run(folder, device=device)
        if run.schema is None:
            raise ConfigError(f"an estimator is of a table, and the run in {folder} is not; use xorflow.load")
        path = inside(folder, _ESTIMATOR)
        kept = read_json(path, "the estimator") if path.exists() else {}
        parameters = kept.get("parameters", {})
        if not isinstance(parameters, dict):
            raise CheckpointError(f"{path} is damaged: its parameters are {parameters!r:.100}; restore it")
        names = cls().get_params()
        given: dict[str, Any] = {  # `fit` checks their values
            name: tuple(value) if isinstance(value, list) else value
            for name, value in parameters.items()
            if name in names
        }
        estimator = cls(**given)
        estimator._set_model(run.schema, run.flow)
        estimator._names = [*run.schema.order]
        estimator.n_features_in_ = len(estimator._names)
        if kept.get("named", True):
            estimator.feature_names_in_ = np.array(estimator._names, object)
        estimator.container_ = str(kept.get("container", "pyarrow"))
        estimator._restore(kept, path)
        return estimator

    def _kept(self) -> dict[str, Any]:
        """What the folder of a run does not have."""
        parameters = {name: _plain(value) for name, value in self.get_params().items()}
        named = hasattr(self, "feature_names_in_")
        header = {"estimator": type(self).__name__, "parameters": parameters}
        return header | {"container": self.container_, "named": named}

    def _restore(self, kept: dict[str, Any], path: Path) -> None:
        """Take what a subclass kept."""

    # ---- rows ----

    def _rows(self, X: Any, reset: bool = False) -> pa.Table:
        """Rows as a table; scikit-learn's checks of names and number of columns apply."""
        framed = hasattr(X, "__arrow_c_stream__")
        if framed:
            names = self._check_frame(X, reset)
            columns = _columns_of_frame(X, names)
        else:
            X = validate_data(self, X, reset=reset, dtype=None, ensure_all_finite=False)
            names = [f"x{d}" for d in range(X.shape[1])]
            columns = [_cells(X[:, d]) for d in range(X.shape[1])]
        if reset:
            self.container_ = type(X).__module__.partition(".")[0] if framed else "array"
            self._names = names
        else:
            texts = {column.name for column in self.table_model_.schema.columns if is_text(column.type)}
            columns = [
                _array(cells.to_pylist(), str, pa.string())
                if name in texts and not is_text(cells.type)
                else cells
                for name, cells in zip(self._names, columns, strict=True)
            ]
        if not len(X):
            raise DataError("Found a frame with 0 sample(s) while a minimum of 1 is required.")
        return pa.table(columns, names=self._names)

    def _check_frame(self, X: Any, reset: bool) -> list[str]:
        """The names of a frame's columns, after scikit-learn's checks of them."""
        names = [*(getattr(X, "column_names", None) or X.columns)]
        known = [*getattr(self, "feature_names_in_", ())]
        with warnings.catch_warnings():
            if not reset and names == known:  # some versions see names of frames of pandas alone, and warn
                warnings.filterwarnings("ignore", "X does not have valid feature names", UserWarning)
            validate_data(self, X, reset=reset, skip_check_array=True)
        if reset and all(isinstance(name, str) for name in names):
            self.feature_names_in_ = np.array(names, object)
        return [str(name) for name in names]

    # ---- training ----

    def _split(self, rows: int, shares: Mapping[str, float]) -> dict[str, np.ndarray]:
        """Which rows do what: some for each share above zero, if there are enough, and the rest trains."""
        left, split = shuffled(rows, _seed(self.random_state)), {}
        for name, share in shares.items():
            if not isinstance(share, numbers.Real) or not 0 <= share < 1:
                raise ConfigError(f"{name} is a share of rows, at least 0 and below 1; got {share!r}")
            if name == "validation" and not share:
                raise ConfigError("validation rows choose everything: their share is above 0; got 0")
            count = min(max(1, round(share * rows)), len(left) // 2) if share else 0
            split[name], left = left[:count], left[count:]
        return split | {"train": left}

    def _learn(self, table: pa.Table, split: Mapping[str, np.ndarray]) -> None:
        if not isinstance(self.rare, numbers.Integral) or self.rare < 0:
            raise ConfigError(f"rare is a number of rows, at least 0; got {self.rare!r}")
        seed = _seed(self.random_state)
        train = table.take(np.sort(split["train"]))
        tallies = [Tally.of(name, train[name]) for name in train.column_names]
        schema = Schema.learn(tallies, self._wishes(tallies), rare=self.rare)
        # a row alone is its own validation
        chosen = split["validation"] if len(split["validation"]) else split["train"]
        rows, held_out = (
            Split(narrow(torch.from_numpy(codes), schema.categories))
            for codes in (
                schema.shown(schema.encode(train), seed),
                schema.encode(table.take(np.sort(chosen))),
            )
        )
        data = Dataset("rows", rows, held_out, None, schema.categories, schema=schema)
        searched = auto_fit(
            data.to(resolve_device(self.device)), minutes=self.minutes, orderings=self.orderings, seed=seed
        )
        self.record_ = searched.record
        self._set_model(schema, searched.model)

    def _set_model(self, schema: Schema, model: LatentFlow | Mixture) -> None:
        # in double precision, which MPS devices lack, a row's score does not depend on the rows that are scored with it
        model = model.to("cpu") if model.device.type == "mps" else model
        self.table_model_ = TableModel(schema, model.double().eval())
        self.measures_ = self.table_model_.measures

    def _wishes(self, tallies: Sequence[Tally]) -> dict[str, Wish]:
        """What `columns` says; a number that looks like an identifier is one of the data all the same."""
        if not isinstance(self.columns, Mapping | None):
            raise ConfigError(
                f'columns is kinds by names, such as {{"year": "category"}}; got {self.columns!r}'
            )
        numbers = [one.name for one in tallies if kind_of(one)[0] is None and not is_text(one.type)]
        wishes = {name: {"kind": "number"} for name in numbers}
        wishes |= {name: {"kind": kind} for name, kind in (self.columns or {}).items()}
        return read_wishes({"columns": wishes})


@dataclass(kw_only=True, eq=False, repr=False)
class FlowDetector(OutlierMixin, FlowDensity):
    """Rows that are improbable: outliers by a share of them, and p-values that hold for any model.

    Args:
        contamination: the share of the rows given to `fit` that count as outliers.
        calibration: the share of rows that neither train nor choose anything, against which p-values are taken.

    The other arguments are those of `FlowDensity`.

    Attributes:
        offset_: the log p below which a row is an outlier: `decision_function` is `score_samples` less this.
        calibration_scores_: log p of the calibration rows, rising.
    """

    contamination: float = 0.1
    calibration: float = 0.2

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn the density from some rows, and calibrate p-values by others; `y` is ignored."""
        del y
        if not isinstance(self.contamination, numbers.Real) or not 0 < self.contamination <= 0.5:
            raise ConfigError(
                f"contamination is a share of rows above 0, at most 0.5; got {self.contamination!r}"
            )
        table = self._rows(X, reset=True)
        split = self._split(len(table), {"calibration": self.calibration, "validation": self.validation})
        self._learn(table, split)
        scores = self.table_model_.log_prob(table)
        self.offset_ = float(np.percentile(scores, 100 * self.contamination))
        self.calibration_scores_ = np.sort(scores[split["calibration"]])
        return self

    def _kept(self) -> dict[str, Any]:
        return super()._kept() | {
            "offset": self.offset_,
            "calibration_scores": self.calibration_scores_.tolist(),
        }

    def _restore(self, kept: dict[str, Any], path: Path) -> None:
        try:
            own = accepted_record(kept, {"offset": float, "calibration_scores": Sequence[float]})
        except ValueError:
            raise CheckpointError(
                f"a FlowDetector has calibration scores, and {path} has none; load a FlowDensity"
            ) from None
        self.offset_, self.calibration_scores_ = own["offset"], np.sort(np.array(own["calibration_scores"]))

    def decision_function(self, X: Any) -> np.ndarray:
        """Below 0 for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> np.ndarray:
        """1, or -1 for outliers."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def p_values(self, X: Any, random_state: Any = None) -> np.ndarray:
        r"""How many calibration rows are at least as improbable, as a share: the conformal p-value of each row,

        .. math:: p = \frac{1 + \#\{i : s_i < s\}}{n + 1},

        with ties broken at random by the seed. Of a row from where the calibration rows are from,
        :math:`P(p \le k / (n + 1)) = k / (n + 1)`, whatever the model. Given the calibration rows that probability has a
        Beta(k, n + 1 - k) distribution, so it takes many of them to be sure about small p-values.
        """
        scores = self.score_samples(X)
        calibration = self.calibration_scores_
        if not len(calibration):
            raise ConfigError("p-values need calibration rows: fit more rows, with calibration above 0")
        below = calibration.searchsorted(scores, side="left")
        ties = calibration.searchsorted(scores, side="right") - below
        generator = np.random.default_rng(_seed(random_state))
        return (1 + below + generator.integers(0, ties + 1)) / (len(calibration) + 1)


def _seed(random_state: Any) -> int:
    """A seed that is always the same for None."""
    return 0 if random_state is None else int(check_random_state(random_state).randint(2**31 - 1))


# ---- files ----

_ESTIMATOR = "sklearn.json"
"""The file of what an estimator has beside its run."""


def _plain(value: Any) -> Any:
    """A parameter as JSON; the state of a generator is not kept."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else None


# ---- cells ----


def _columns_of_frame(frame: Any, names: Sequence[str]) -> list[Any]:
    """The columns of a frame, without an index; those of Python objects of several kinds as text."""
    try:
        columns = pa.table(frame).columns[: len(names)]  # pandas puts an index after them
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return [_cells(np.asarray(frame.iloc[:, d])) for d in range(len(names))]
    views = (pa.string_view(), pa.large_string())  # of polars; Arrow takes no rows of views
    return [column.cast(views[1]) if column.type == views[0] else column for column in columns]


def _cells(values: np.ndarray) -> pa.Array:
    """A column of an array: its numbers or booleans; of objects and texts, numbers if all are, and otherwise texts."""
    if values.dtype.kind in "biufmM":
        # types that Arrow, or its kernels, lack
        lacking = {np.dtype(np.float16): np.float32, np.dtype(np.longdouble): np.float64}
        native = values.dtype.newbyteorder("=")
        return pa.array(values.astype(lacking.get(native, native)), from_pandas=True)
    given = values.tolist()
    there = [value for value in given if not _is_gap(value)]
    for of, read, kind in ((bool | np.bool_, bool, pa.bool_()), (numbers.Real, float, pa.float64())):
        if there and all(isinstance(value, of) for value in there):
            return _array(given, read, kind)
    return _array(
        given, lambda value: value.decode() if isinstance(value, bytes) else str(value), pa.string()
    )


def _array(values: Sequence[Any], read: Callable[[Any], Any], kind: pa.DataType) -> pa.Array:
    return pa.array([None if _is_gap(value) else read(value) for value in values], kind)


def _is_gap(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)
