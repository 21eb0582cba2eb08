"""The door of scikit-learn: rows of any kind are fitted, scored and sampled, or refused as its conventions have it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from attack.damage import VALUES
from attack.data_files import integers, odd_array
from attack.rule import Case, require
from attack.tables import frame

THERE = importlib.util.find_spec("sklearn") is not None
_REFUSED = (ValueError, TypeError)
"""What scikit-learn raises, and its tests ask for, where rows are no rows."""


def estimators(case: Case) -> None:
    """Fit an estimator on any rows, then score others."""
    from xorflow.sklearn import FlowDensity, FlowDetector

    chance = case.chance
    options: dict[str, Any] = {"minutes": 0}
    names = ("minutes", "orderings", "validation", "rare", "columns", "random_state")
    for name in chance.sample(names, chance.choice((0, 0, 1, 2))):
        options[name] = chance.choice((*VALUES, 1, 2, 3, 0.5, (4, 4)))
    case.note(options)
    rows, others = _rows(case), _rows(case)
    estimator = chance.choice((FlowDensity, FlowDetector))(**options)
    if isinstance(_told(case, lambda: estimator.fit(rows)), Exception):
        return
    scores = _told(case, lambda: estimator.score_samples(rows))
    require(
        isinstance(scores, np.ndarray) and bool(np.isfinite(scores).all()),
        "wrong",
        f"its own rows have {scores!r}",
    )
    if chance.random() < 0.5:
        drawn = _told(case, lambda: estimator.sample(chance.choice((1, 3, 50))))
        require(not isinstance(drawn, Exception), "wrong", f"no samples: {drawn!r}")
        again = _told(case, lambda: estimator.score_samples(drawn))
        require(isinstance(again, np.ndarray), "wrong", f"samples have no log p: {again!r}")
    scores = _told(case, lambda: estimator.score_samples(others))
    if isinstance(scores, np.ndarray):
        require(bool(np.isfinite(scores).all()), "wrong", f"log p of {scores[~np.isfinite(scores)][:3]}")


def _rows(case: Case) -> Any:
    chance, table = case.chance, frame(case.chance)
    makers: tuple[Callable[[], Any], ...] = (
        lambda: table,
        lambda: table.slice(0, chance.choice((0, 1, 3))),
        lambda: integers(chance),
        lambda: integers(chance).astype(float) * chance.choice((1.0, 1e300, 1e-300, 0.1)),
        lambda: odd_array(chance),
        lambda: np.array(
            [[chance.choice((None, "a", 1, 2.5, float("nan"), True)) for _ in range(3)] for _ in range(20)],
            object,
        ),
        lambda: None,
    )
    rows = chance.choice(makers[:3] * 3 + makers)()
    case.note("rows", rows.schema.to_string()[:200] if isinstance(rows, pa.Table) else repr(rows)[:200])
    return rows


def _told(case: Case, call: Callable[[], Any]) -> Any:
    found = case.python(call, also=_REFUSED)
    arrow = isinstance(found, pa.ArrowException) and "sklearn" not in str(found)
    require(not arrow, "traceback", f"of pyarrow, not ours: {found!r}"[:300])
    return found
