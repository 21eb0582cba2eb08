"""Scores for engines: a function of a run's folder and an Arrow table, which Ray, Dask or Spark call on their workers."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from torch import Tensor

from xorflow._files import inside, read_json
from xorflow.data import Split
from xorflow.errors import CheckpointError, ConfigError, DataError, EvaluationError
from xorflow.flows import Flow, LatentFlow, Mixture
from xorflow.table_model import RowScores, TableModel, row_by_row
from xorflow.training import Run, open_run, read_config_file


@dataclass(frozen=True)
class RunModel:
    """The model of a run that is read when it is first asked for, once in each process; pickled, it is a path and a digest.

    Attributes:
        run: the folder of a finished run, on every machine that is to read it.
        flow: `"latent"`, or `"deterministic"`, the most probable bijection.
        device: where to compute.
        sha256: of the run's configuration and weights: a folder that holds another run by then is refused.
    """

    run: str | Path
    flow: str = "latent"
    device: str = "cpu"
    sha256: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.flow not in ("latent", "deterministic"):
            raise ConfigError(
                f"flow is 'latent' or 'deterministic' here, got {self.flow!r}: a refitted base needs the training data, which "
                "workers do not have"
            )
        object.__setattr__(self, "run", os.path.abspath(self.run))
        object.__setattr__(self, "sha256", _digest(Path(self.run)))

    def opened(self) -> tuple[Run, Flow | LatentFlow | Mixture]:
        """The run and its model."""
        return _opened(self.run, self.flow, self.device, self.sha256)


def _digest(run: Path) -> str:
    index = read_json(inside(run, "weights.index.json"), "the index of the weights")
    return hashlib.sha256(json.dumps([read_config_file(run), index], sort_keys=True).encode()).hexdigest()


@functools.lru_cache(maxsize=1)  # engines unpickle what they call, batch after batch
def _opened(run: str, flow: str, device: str, sha256: str) -> tuple[Run, Flow | LatentFlow | Mixture]:
    opened = open_run(Path(run), device=device)
    if _digest(Path(run)) != sha256:
        raise CheckpointError(f"all workers read one run, and {run} holds another here; copy it anew")
    model = opened.flow
    return opened, model if flow == "latent" else model.greedy()


@dataclass(frozen=True)
class Scorer(RunModel):
    """log p of a table's rows: called with an Arrow table, it returns the table with one column more.

    The column is `log_prob`, in nats, or `lower_bound` where there is no exact likelihood. A row's score depends neither on
    other rows nor on how they are batched. For `map_batches(..., batch_format="pyarrow")` of Ray Data, `map_partitions` of
    Dask, `mapInArrow` of Spark: see docs/scale.md.

    Attributes:
        samples: importance samples, where there is no exact likelihood.
        memory: at most about how many bytes a pass takes.
    """

    samples: int = 64
    memory: int | None = None

    @property
    def column(self) -> str:
        """The name of the column that is added."""
        _, model = self.opened()
        exact = model.has_closed_form or not isinstance(model, LatentFlow)
        return "log_prob" if exact else "lower_bound"

    def __call__(self, table: pa.Table) -> pa.Table:
        opened, _ = self.opened()
        if opened.schema is None:
            raise ConfigError(f"a Scorer takes tables, and the run in {self.run} was trained on an array")
        if self.column in table.column_names:
            raise DataError(f"scores are a new column, {self.column!r}, and the table has one; rename it")
        values = self.scores(table).values if len(table) else []
        return table.append_column(self.column, pa.array(values, pa.float64()))

    def scores(self, rows: pa.Table | pa.RecordBatch | Tensor) -> RowScores:
        """log p of rows of a table, or of an array's states."""
        opened, model = self.opened()
        if isinstance(rows, Tensor):
            log_p = row_by_row(model, Split(rows), self.samples, self.memory)
            scores = RowScores(log_p.values.cpu().numpy(), log_p.kind, {})
        else:
            assert opened.schema is not None
            scores = TableModel(opened.schema, model).score(rows, samples=self.samples, memory=self.memory)
        if not np.isfinite(scores.values).all():
            raise EvaluationError(
                "log p is a finite number, and that of some rows is not; train again with a smaller lr"
            )
        return scores
