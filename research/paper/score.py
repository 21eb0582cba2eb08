"""What a trained row is worth on held-out data: every figure of the table, each with what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from research import results
from research.budgets import Budget, Phase
from research.files import VARIANTS
from research.paper.rows import REFERENCES, ROWS, Reference, Row, choices
from research.runner import Experiment
from xorflow import FactorisedBase, LatentFlow, evaluate
from xorflow.data import Dataset, Split
from xorflow.flows import GREEDY
from xorflow.training import independent_nll

_ELBO_SAMPLES = 10
_BATCH = 2000


def score(
    row: Row,
    flow: LatentFlow,
    split: Split,
    known: dict[str, Any],
    budget: Budget,
    *,
    phase: Phase = "final",
    train: Split | None = None,
    pause: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """All figures of a trained flow on one part of its data.

    Args:
        row: the row it was trained for.
        flow: the model.
        split: the data.
        known: what the run itself found on these data, as `result.json` has it.
        budget: how many samples, of how many rows.
        phase: that of the run, and
        train: the data that it was trained on; other experiments need them.
        pause: is called between steps, and may raise.

    Returns:
        `nll`, `kind` and `stderr`, which are the row's headline, and what else is known: for a deterministic row the figures of
        the latent flow lie in `latent`.
    """
    del phase, train
    part = limited(split, budget)
    proposal: Literal["p", "q"] = "q" if flow.has_posterior else "p"
    found = evaluate.importance(flow, part, samples=budget.samples, proposal=proposal, sum_last=False)
    bound = found.summary() | {"proposal": proposal}
    pause()
    samples = min(budget.samples, _ELBO_SAMPLES)
    elbo = evaluate.elbo(flow, part, samples=samples, proposal=proposal).nll
    pause()
    latent = {
        "exact": known["nll"] if known["kind"] == "exact" else None,
        "exact_stderr": known["stderr"] if known["kind"] == "exact" else None,
        "elbo": elbo,
        "bound": bound,
    }
    shared = {
        "rows": known["rows"],
        "greedy": known["greedy_nll"],
        "greedy_stderr": known["greedy_stderr"],
        "refit": known["refit_nll"],
        "refit_stderr": known["refit_stderr"],
        "layers": known["layers"],
        "argmax_posterior": _labelled(posterior_argmax(flow, split)) if flow.has_posterior else None,
    }
    return _headline(row, latent, shared) | shared


def limited(split: Split, budget: Budget) -> Split:
    """The rows of a part that a budget evaluates."""
    return split if budget.rows is None or budget.rows >= len(split) else split.subset(budget.rows)


def _headline(row: Row, latent: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The row's own likelihood: of the bijection, exact, or the sampled bound as in the paper."""
    if row.family == "straight-through":
        return {
            "nll": shared["greedy"],
            "kind": "exact",
            "stderr": shared["greedy_stderr"],
            "samples": None,
            "exact": shared["greedy"],
            "elbo": None,
            "latent": latent,
        }
    if row.family == "maximum likelihood":
        own = {"nll": latent["exact"], "kind": "exact", "stderr": latent["exact_stderr"], "samples": None}
    else:
        own = {key: latent["bound"][key] for key in ("nll", "kind", "stderr", "samples")}
    return own | latent


@torch.no_grad()
def posterior_argmax(flow: LatentFlow, split: Split) -> float:
    """The mean of -log p_Y at the most probable choice of the posterior: a score, and no likelihood.

    A posterior that sees all of x may lead every x to the same y, so that these "probabilities" sum to far more than one:
    with u = x the score is the floor of the base for every image. The paper's column "Greedy" is defined in this way for
    its full-posterior rows; here it only serves to explain that column.
    """
    total = 0.0
    for batch in split.batches(_BATCH):
        x = flow.encode(batch.x.to(flow.device))
        reached = flow.run(x, draws=GREEDY, proposal="q").end.state
        total -= float(flow.base.log_prob(reached).double().sum())
    return total / len(split)


def _labelled(value: float) -> dict[str, Any]:
    return {"value": value, "is": "not a likelihood"}


def reference(row: Reference, dataset: Dataset) -> dict[str, Any]:
    """The figure of a row that needs no training, exact, on the test data."""
    assert dataset.test is not None
    base = FactorisedBase(dataset.features, categories=dataset.categories)
    if row.id == "independent-pixels":
        nll, stderr = independent_nll(dataset, dataset.test), None
    elif row.id == "identity":
        with torch.no_grad():
            x = base.states.encode(dataset.test.values.cpu(), torch.float64)
            values = -base.double().log_prob(x).sum(-1)
        nll, stderr = float(values.mean()), float(values.std()) / len(values) ** 0.5
    else:
        nll, stderr = float(base.double().floor()), None
    return {"nll": nll, "kind": "exact", "stderr": stderr, "samples": None, "rows": len(dataset.test)}


# ---- the experiment ----

_NOTHING = {"nll": None, "greedy": None}


def plan(budget: Budget) -> dict[str, Any]:
    """What `plan.json` holds: all that a table must know about the rows."""
    rows = [_planned(row) for row in ROWS]
    rows += [
        {"id": r.id, "title": r.title, "words": r.words, "family": "reference", "paper": _NOTHING}
        for r in REFERENCES
    ]
    return {
        "version": results.VERSION,
        "budget": budget.name,
        "words": budget.words,
        "samples": budget.samples,
        "rows": rows,
    }


def _planned(row: Row) -> dict[str, Any]:
    recipes = {v: row.options(v) for v in VARIANTS if row.recipe(v) is not None}
    return {
        "id": row.id,
        "title": row.title,
        "family": row.family,
        "depth": row.depth,
        "flow": row.flow,
        "metric": row.metric,
        "paper": row.paper,
        "choices": {variant: choices(options) for variant, options in recipes.items()},
        "improvement": row.improvement or None,
        "attempts": list(row.attempts),
    }


PAPER = Experiment("paper", plan, score, reference)
"""The paper's table."""
