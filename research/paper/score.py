"""What a trained row is worth on held-out data: every figure of the table, each with what it is."""

from __future__ import annotations

from typing import Literal

import torch

from research.experiment import Request, Trained
from research.paper.rows import Reference
from research.results import Record
from xorflow import FactorisedBase, LatentFlow, evaluate
from xorflow.data import Dataset, Split
from xorflow.flows import GREEDY
from xorflow.training import independent_nll

_ELBO_SAMPLES = 10
_BATCH = 2000


def score(run: Trained) -> Record:
    """All figures of a trained flow on one part of its data.

    Returns:
        `nll`, `kind` and `stderr`, which are the row's headline, and what else is known: for a deterministic row the figures of
        the latent flow lie in `latent`.
    """
    flow, known = run.flow, run.known
    assert isinstance(flow, LatentFlow)
    part, samples = run.budget.limited(run.split), run.budget.samples
    proposal: Literal["p", "q"] = "q" if flow.has_posterior else "p"
    bound = evaluate.importance(flow, part, samples=samples, proposal=proposal, sum_last=False)
    is_exact = known["kind"] == "exact"
    latent = {
        "exact": known["nll"] if is_exact else None,
        "exact_stderr": known["stderr"] if is_exact else None,
        "elbo": evaluate.elbo(flow, part, samples=min(samples, _ELBO_SAMPLES), proposal=proposal).nll,
        "bound": bound.summary() | {"proposal": proposal},
    }
    argmax = (
        {"value": posterior_argmax(flow, run.split), "is": "not a likelihood"} if flow.has_posterior else None
    )
    shared = {"rows": known["rows"]} | deterministic(known) | {"argmax_posterior": argmax}
    return _headline(run.row.family, latent, shared) | shared


def deterministic(known: Record) -> Record:
    """What a run itself reports of its deterministic flow, and of its layers."""
    copied = {key: known[key] for key in ("greedy_stderr", "refit_stderr", "layers")}
    return {"greedy": known["greedy_nll"], "refit": known["refit_nll"]} | copied


def _headline(family: str, latent: Record, shared: Record) -> Record:
    """The row's own likelihood: of the bijection, exact, or the sampled bound as in the paper."""
    greedy, error = shared["greedy"], shared["greedy_stderr"]
    if family == "straight-through":
        headline = {"nll": greedy, "kind": "exact", "stderr": error, "samples": None}
        return headline | {"exact": greedy, "elbo": None, "latent": latent}
    if family == "maximum likelihood":
        return {
            "nll": latent["exact"],
            "kind": "exact",
            "stderr": latent["exact_stderr"],
            "samples": None,
        } | latent
    return {key: latent["bound"][key] for key in ("nll", "kind", "stderr", "samples")} | latent


@torch.no_grad()
def posterior_argmax(flow: LatentFlow, split: Split) -> float:
    """The mean of -log p_Y at the most probable choice of the posterior: a score, and no likelihood.

    A posterior that sees all of x may lead every x to the same y, so that these "probabilities" sum to far more than one:
    with u = x the score is the floor of the base for every image. The paper's column "Greedy" is defined in this way for
    its full-posterior rows; here it only serves to explain that column.
    """
    total = 0.0
    for batch in split.batches(_BATCH):
        reached = flow.run(batch.x.to(flow.device), draws=GREEDY, proposal="q").end.state
        total -= float(flow.base.log_prob(reached).double().sum())
    return total / len(split)


def reference(row: Reference, dataset: Dataset) -> Record:
    """The figure of a row that needs no training, exact, on the test data."""
    assert dataset.test is not None
    base = FactorisedBase(dataset.features, categories=dataset.categories)
    if row.id == "independent-pixels":
        nll, stderr = independent_nll(dataset, dataset.test), None
    elif row.id == "identity":
        with torch.no_grad():
            values = -base.double().log_prob(dataset.test.values.cpu()).sum(-1)
        nll, stderr = float(values.mean()), float(values.std()) / len(values) ** 0.5
    else:
        nll, stderr = float(base.double().floor()), None
    return {"nll": nll, "kind": "exact", "stderr": stderr, "samples": None, "rows": len(dataset.test)}


def compute(row: Reference, request: Request, dataset: Dataset) -> Record:
    """The record of a row that needs no training."""
    del request
    return {"phase": "reference", "evaluation": reference(row, dataset.to("cpu"))}
