"""What a finished run reports: likelihoods of the latent and the deterministic flow, with what each number is."""

from __future__ import annotations

import dataclasses
from typing import Any

from xorflow import evaluate
from xorflow._memory import rows_at_a_time
from xorflow.bases import FactorisedBase
from xorflow.data import Dataset, Split
from xorflow.evaluate import LogLikelihood
from xorflow.flows import Flow, LatentFlow, Mixture, refit_base
from xorflow.training.init import category_counts, category_frequencies
from xorflow.training.precision import bf16_autocast
from xorflow.training.step import Trainable

_TRAIN_DRAW = 0
"""The seed of the one draw of stochastic training data on which a base is refitted."""


def likelihood(
    flow: Trainable, split: Split, samples: int, seed: int = 0, memory: int | None = None
) -> LogLikelihood:
    """The best likelihood there is: exact if in closed form, otherwise the importance-sampled bound."""
    if _is_exact(flow):
        return evaluate.exact(flow, split, memory=memory)
    assert isinstance(flow, LatentFlow)
    proposal = "q" if flow.has_posterior else "p"
    return evaluate.importance(flow, split, samples=samples, seed=seed, proposal=proposal, memory=memory)


def _is_exact(flow: Trainable) -> bool:
    """Whether its likelihood is one pass; in a mixture, always: nothing else can be trained."""
    return isinstance(flow, Mixture) or flow.has_closed_form


def refitted(
    flow: Trainable, train: Split, precision: str = "auto", memory: int | None = None
) -> Flow | Mixture:
    """The deterministic flow on a base fitted to its residuals on the training data; in a mixture, of each component."""
    with bf16_autocast(flow.device, precision):  # of residuals that are only counted
        if isinstance(flow, Mixture):
            return flow.of([_refitted(part, train, memory) for part in flow if isinstance(part, LatentFlow)])
        return _refitted(flow, train, memory)


def _refitted(flow: LatentFlow, train: Split, memory: int | None) -> Flow:
    hard = train.frozen(_TRAIN_DRAW) if train.stochastic else train
    greedy = flow.greedy()
    context = hard.context if flow.context_features else None
    rows = rows_at_a_time(greedy, memory)
    return Flow(greedy.layers, refit_base(greedy, hard.values, context, batch_size=rows))


def report(
    flow: Trainable,
    dataset: Dataset,
    samples: int,
    names: tuple[str, ...],
    precision: str = "auto",
    memory: int | None = None,
) -> dict[str, dict[str, Any]]:
    """For each named split that exists, every likelihood of this flow, in nats.

    Likelihoods are computed in the type of the weights. A `precision` of `bf16-mixed` rounds the products of passes over the
    training data and of those that say what the layers do, which would take longest. `memory` is about what any pass, or
    importance samples, may take at a time.
    """
    was_training = flow.training
    flow.eval()
    refit = refitted(flow, dataset.train, precision, memory)
    splits = {
        name: _report_split(flow, refit, split, samples, precision, memory)
        for name in names
        if (split := dataset.parts.get(name)) is not None
    }
    flow.train(was_training)
    return splits


def _report_split(
    flow: Trainable, refit: Flow | Mixture, split: Split, samples: int, precision: str, memory: int | None
) -> dict[str, Any]:
    components = (
        [part for part in flow if isinstance(part, LatentFlow)] if isinstance(flow, Mixture) else [flow]
    )
    deterministic = [flow.greedy(), refit]
    if _is_exact(flow):
        best, greedy, refitted_likelihood = evaluate.exact_each([flow, *deterministic], split, memory=memory)
    else:
        greedy, refitted_likelihood = evaluate.exact_each(deterministic, split, memory=memory)
        best = likelihood(flow, split, samples, memory=memory)
    with bf16_autocast(flow.device, precision):
        uses = [use for part in components for use in evaluate.layer_use(part, split, memory=memory)]
    figures = best.summary() | {
        "greedy_nll": greedy.nll,
        "greedy_stderr": greedy.stderr,
        "refit_nll": refitted_likelihood.nll,
        "refit_stderr": refitted_likelihood.stderr,
        "floor": float((flow.floor() if isinstance(flow, Mixture) else flow.base.floor()).detach()),
        "layers": [dataclasses.asdict(use) for use in uses],
    }
    if isinstance(flow, LatentFlow) and flow.has_posterior:
        figures["elbo_nll"] = evaluate.elbo(flow, split, memory=memory).nll
    return figures


def independent_nll(dataset: Dataset, split: Split) -> float:
    """The negative log-likelihood, in nats, of independent features with the training data's frequencies."""
    table = category_frequencies(dataset.train, dataset.categories)
    base = FactorisedBase(dataset.features, categories=dataset.categories, probabilities=table)
    expected = (base.log_table().double() * category_counts(split.values, dataset.categories)).sum()
    return -float(expected) / len(split)
