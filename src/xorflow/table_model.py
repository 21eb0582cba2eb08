"""A model of tables: a schema and a model of its states. Rows in, log p of rows out, as a density in stated units."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from xorflow import evaluate
from xorflow.data import Split
from xorflow.data.schema import Schema
from xorflow.errors import ModelError
from xorflow.evaluate import Kind, LogLikelihood
from xorflow.flows import LatentFlow, Model


@dataclass(frozen=True)
class RowScores:
    """log p of rows of a table, in nats.

    Attributes:
        values: (N,) float64: the density of each row, with respect to the product of the columns' measures.
        kind: `"exact"`, or `"lower bound"`.
        unseen: in how many rows each column has something that no training row has, for columns that have any.
        by_column: (N, D) log p of each cell given those before it in the model's ordering, if that was asked for.
    """

    values: np.ndarray
    kind: Kind
    unseen: dict[str, int]
    by_column: np.ndarray | None = None


_ROWS, _ALIKE = 512, 64
"""Rows of a pass, and what divides them. A product of matrices may round a row otherwise in other shapes, not in these."""


def row_by_row(
    model: Model, rows: Split, samples: int | None = None, memory: int | None = None
) -> LogLikelihood:
    """log p of rows, each of which depends on that row alone, whatever stands beside it; with `samples` a bound, if need be."""
    count = len(rows)
    filled = rows[torch.arange(-(-count // _ALIKE) * _ALIKE, device=rows.device) % count]
    if samples and isinstance(model, LatentFlow) and not model.has_closed_form:
        log_p = evaluate.importance(model, filled, samples=samples, memory=memory, noise="row")
    else:
        log_p = evaluate.exact(model, filled, batch_size=_ROWS, memory=memory)
    effective = None if log_p.effective_samples is None else log_p.effective_samples[:count]
    return replace(log_p, values=log_p.values[:count], effective_samples=effective)


class TableModel:
    r"""What a table's rows are distributed like: a `Schema`, which makes states of cells, and a `Model` of these states,

    .. math:: \log p(\text{row}) = \log p(\text{states}) + \sum_d \log p(\text{cell}_d \mid \text{state}_d).

    The second part is zero where a state is one value. It sums and integrates to one over all rows, with respect to the product
    of the columns' measures, which `measures` tells.

    Args:
        schema: of the columns.
        model: over the states of the schema, one feature for each column.
    """

    def __init__(self, schema: Schema, model: Model) -> None:
        if tuple(model.categories) != tuple(schema.categories):
            raise ModelError(
                f"the model of a table has the states of its schema, {list(schema.categories)}, and this one has "
                f"{model.states.short()}; build it with categories=schema.categories"
            )
        if model.context_features:
            raise ModelError(
                "the model of a table takes no context, and this one does; make the context columns"
            )
        self.schema, self.model = schema, model

    def __repr__(self) -> str:
        return f"TableModel({len(self.schema.columns)} columns, {self.model!r})"

    @property
    def measures(self) -> dict[str, str]:
        """What log p of each column's cells is the logarithm of."""
        return {column.name: column.measure for column in self.schema.columns}

    def log_prob(self, rows: Any) -> np.ndarray:
        """log p of each row, (N,) float64, in nats; see `score`."""
        return self.score(rows).values

    def score(
        self, rows: Any, *, by_column: bool = False, samples: int | None = None, memory: int | None = None
    ) -> RowScores:
        """log p of each row of a table, exact, or an error that names what to do; or, with `samples`, a lower bound if need be.

        Args:
            rows: an Arrow table, or a frame or other object with an Arrow C stream, that has the columns of the schema.
            by_column: whether to give each cell's part; an error where the likelihood does not factorise.
            samples: of the importance-sampled bound, for models whose likelihood has no closed form.
            memory: at most about how many bytes a pass takes.
        """
        cells = self.schema.cells(rows)
        codes = self.schema.states(cells)
        counts = {c.name: int((codes[:, d] == c.unseen).sum()) for d, c in enumerate(self.schema.columns)}
        unseen = {name: count for name, count in counts.items() if count}
        if by_column:
            added = [c.log_density(cells[c.name], codes[:, d]) for d, c in enumerate(self.schema.columns)]
            by_feature = self._by_feature(torch.from_numpy(codes), memory) + np.stack(added, 1)
            return RowScores(by_feature.sum(1), "exact", unseen, by_feature)
        density = torch.from_numpy(self.schema.log_density(cells, codes))
        split = Split(torch.from_numpy(codes), log_density=density)
        log_p = row_by_row(self.model, split, samples, memory)
        return RowScores(log_p.values.cpu().numpy(), log_p.kind, unseen)

    @torch.no_grad()
    def _by_feature(self, x: torch.Tensor, memory: int | None) -> np.ndarray:
        rows = evaluate.rows_at_a_time(self.model, memory)
        log_probs = [self.model().log_prob_by_feature(batch) for batch in x.split(rows)]
        return torch.cat(log_probs).double().cpu().numpy()

    def sample(self, count: int, seed: int = 0) -> pa.Table:
        """Rows drawn from the model, with the columns and types that came in; "something else" becomes a gap."""
        generator = torch.Generator(self.model.device).manual_seed(seed)
        codes = self.model().sample((count,), generator=generator).cpu().numpy()
        return self.schema.decode(codes, seed)
