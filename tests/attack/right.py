"""What is right, where something ended well: finite likelihoods, that sum to one where the space is small."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attack.rule import Case, require, strict_json
from xorflow import Intractable, evaluate
from xorflow.training import open_run

FEW = 4096
"""So many rows are a small space."""


def require_sums_to_one(flow: Any) -> None:
    """The probabilities of all rows, if they are few: of the model, or, where it has only bounds, of its deterministic flow."""
    sizes = flow.states.sizes
    if math.prod(sizes) > FEW or flow.context_features:
        return
    every = torch.tensor(list(itertools.product(*map(range, sizes))))
    try:
        log_p = evaluate.exact(flow, every).values
    except Intractable:
        log_p = evaluate.greedy(flow, every).values
    total = float(log_p.double().exp().sum())
    require(math.isfinite(total) and abs(total - 1) < 1e-4, "wrong", f"probabilities sum to {total}")


def require_trained(case: Case, run: Path) -> None:
    """The folder of a run that ended well can be opened, its model is a distribution, and its result has only numbers."""
    opened = case.python(lambda: open_run(run))
    require(not isinstance(opened, Exception), "wrong", f"the run is trained, and cannot be opened: {opened}")
    require_sums_to_one(opened.flow)
    result = strict_json((run / "result.json").read_text(encoding="utf-8"))
    require_finite(result)


def require_finite(value: Any) -> None:
    """No number in a JSON value is NaN or infinite."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            require_finite(item)
    elif isinstance(value, float):
        require(math.isfinite(value), "wrong", f"a number is {value}")


def require_finite_scores(scores: Mapping[str, Any]) -> None:
    """Of `score --json`: log p is finite and, where it is of masses alone, not above 0 but for rounding."""
    log_p = scores["log_prob"]
    require(len(log_p) == scores["rows"], "wrong", "not a number for each row")
    of_masses = set(scores.get("measures", {}).values()) <= {"mass"}
    bound = 1e-4 if scores["kind"] == "exact" and of_masses else math.inf
    require(all(math.isfinite(v) and v <= bound for v in log_p), "wrong", f"log p of {log_p[:5]}")
