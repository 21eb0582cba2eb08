"""What a finished run reports: likelihoods of the latent and the deterministic flow, and how it was trained."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xorflow import evaluate
from xorflow._devices import bf16_autocast, out_of_memory_as_error
from xorflow._distributed import add_up, process_count, rank
from xorflow.data import Dataset, Split
from xorflow.errors import EvaluationError, UserError
from xorflow.evaluate import LogLikelihood, rows_at_a_time
from xorflow.flows import Flow, LatentFlow, Mixture, refit_base
from xorflow.training.build import category_counts, category_frequencies
from xorflow.training.config import Options
from xorflow.training.folder import HELD_OUT, INCOMPLETE, reported_part
from xorflow.training.registry import Trainable

if TYPE_CHECKING:
    from xorflow.training.trainer import Trainer

_TRAIN_DRAW = 0
"""The seed of the one draw of stochastic training data on which a base is refitted."""


def result_of(trainer: Trainer) -> dict[str, Any]:
    """What `result.json` holds of a run whose training has ended."""
    flow, dataset, options, progress = trainer.flow, trainer.dataset, trainer.options, trainer.progress
    failed: dict[str, str] = {}
    result: dict[str, Any] = report(
        flow, dataset, options.evaluation_samples, precision=options.precision, failed=failed
    )
    if failed:
        result[INCOMPLETE] = failed
    held_out = dataset.test or dataset.validation
    result |= {
        "independent_nll": None if held_out is None else independent_nll(dataset, held_out),
        "seed": options.seed,
        "epochs": progress.epoch,
        "best_epoch": progress.best_epoch,
        "steps": progress.step,
        "weights": "average" if options.average else "last" if trainer.best is None else "best on validation",
        "seconds": round(progress.seconds, 3),
        **about(flow, dataset),
        **({} if trainer.not_captured is None else {"not_captured": trainer.not_captured}),
    }
    return with_warning(result, options)


def about(model: Trainable, dataset: Dataset) -> dict[str, Any]:
    """What every result says of its model and its data."""
    return {
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "device": str(model.device),
        "data": dataset.describe(),
    }


def with_warning(result: dict[str, Any], options: Options) -> dict[str, Any]:
    """The result, and what to try if its model is no better than one that ignores how features depend on each other."""
    part = reported_part(result | result.get(INCOMPLETE, {}))
    figures, independent = result.get(part or ""), result["independent_nll"]
    if figures is None or independent is None or figures["nll"] <= independent:
        return result
    exact = figures["kind"] == "exact"
    remedies = {
        "train longer (epochs)": True,
        "let the base learn (base=learned)": not options.base.startswith("learned"),
        "begin at independent columns (init=data)": options.init != "data",
        "evaluate with more samples (evaluation_samples), for a bound may be loose": not exact,
        "train by estimator=maximum-likelihood": not options.estimator.startswith("maximum-likelihood"),
    }
    warning = (
        f"this model {'has' if exact else 'has at most'} {figures['nll']:.2f} nats, and independent columns have "
        f"{independent:.2f}: it has learned nothing of how columns depend on each other. Try to "
        f"{', or to '.join(remedy for remedy, helps in remedies.items() if helps)}"
    )
    return result | {"warning": warning}


def require_complete(result: dict[str, Any], run: Path | None = None) -> dict[str, Any]:
    """The result, unless something in it could not be computed."""
    failed = result.get(INCOMPLETE)
    if not failed:
        return result
    kept = "the flow is trained" if run is None else f"the run in {run} is trained, and its weights are kept"
    advice = "use xorflow.evaluate" if run is None else f"complete it with: xorflow evaluate {run}"
    raise EvaluationError(
        f"{kept}, but its likelihood on {' and '.join(failed)} data could not be computed: {next(iter(failed.values()))}; "
        f"{advice}"
    )


def likelihood(flow: Trainable, split: Split, samples: int, memory: int | None = None) -> LogLikelihood:
    """The best likelihood there is: exact if in closed form, otherwise the importance-sampled bound."""
    if flow.has_closed_form:
        return evaluate.exact(flow, split, memory=memory)
    assert isinstance(flow, LatentFlow)
    proposal = "q" if flow.has_posterior else "p"
    return evaluate.importance(flow, split, samples=samples, proposal=proposal, memory=memory)


def validation_nll(flow: Trainable, split: Split, *, greedy: bool) -> float:
    """The mean negative log-likelihood, or a cheap bound; several processes take a share of the rows each, if all are exact."""
    count, rows = process_count(), split
    shared = 1 < count <= len(split) and (greedy or flow.has_closed_form)
    if shared:
        first, last = (len(split) * number // count for number in (rank(), rank() + 1))
        rows = split[first:last]
    log_p = evaluate.greedy(flow, rows) if greedy else likelihood(flow, rows, samples=4)
    if count == 1:
        return log_p.nll
    mean = log_p.values.sum() / (len(split) if shared else count * len(split))
    add_up([mean])
    return -float(mean)


def refitted(
    flow: Trainable, train: Split, precision: str = "auto", memory: int | None = None
) -> Flow | Mixture:
    """The deterministic flow on a base fitted to its residuals on the training data; in a mixture, of each component."""
    refit: list[Flow] = []
    with bf16_autocast(flow.device, precision):  # of residuals that are only counted
        hard = train.frozen(_TRAIN_DRAW)
        for component in latent_components(flow):
            greedy = component.greedy()
            context = hard.context if component.context_features else None
            rows = rows_at_a_time(greedy, memory)
            base = refit_base(greedy, hard.values, context, batch_size=rows)
            refit.append(Flow(greedy.layers, base))
    return flow.of(refit) if isinstance(flow, Mixture) else refit[0]


def latent_components(flow: Trainable) -> list[LatentFlow]:
    """Of a mixture; a flow is the only one of itself."""
    return flow.latent_components() if isinstance(flow, Mixture) else [flow]


def report(
    flow: Trainable,
    dataset: Dataset,
    samples: int,
    names: tuple[str, ...] = HELD_OUT,
    precision: str = "auto",
    memory: int | None = None,
    *,
    failed: dict[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """For each named split that exists, every likelihood of this flow, in nats.

    Likelihoods are computed in the type of the weights. A `precision` of `bf16-mixed` rounds the products of passes over the
    training data and of those that say what the layers do, which would take longest. `memory` is about what any pass, or
    importance samples, may take at a time. Where there is a dict `failed`, it takes the reasons why splits have no likelihood,
    and the others are still there.
    """
    was_training = flow.training
    figures: dict[str, dict[str, Any]] = {}
    refit: Flow | Mixture | None = None
    parts = {name: dataset.parts[name] for name in names if name in dataset.parts}
    for name, split in parts.items():
        flow.eval()
        try:
            with out_of_memory_as_error("lower --memory of xorflow evaluate, or use --device cpu"):
                refit = refit or refitted(flow, dataset.train, precision, memory)
                figures[name] = _report_split(flow, refit, split, samples, precision, memory)
        except UserError as error:
            if failed is None:
                raise
            failed[name] = str(error)
        finally:
            flow.train(was_training)
    return figures


def require_finite(log_p: LogLikelihood, what: str) -> LogLikelihood:
    """Likelihoods as they are, if all are finite numbers."""
    bad = (~log_p.values.isfinite()).nonzero()
    if len(bad):
        row = int(bad[0, -1])
        raise EvaluationError(
            f"log p is a finite number, and that of {len(bad):,} of {log_p.values.shape[-1]:,} rows of {what} is not (first "
            f"row {row}, from 0: {float(log_p.values[..., row].flatten()[0])}); train again with a smaller lr, or with clip=1"
        )
    return log_p


def _report_split(
    flow: Trainable, refit: Flow | Mixture, split: Split, samples: int, precision: str, memory: int | None
) -> dict[str, Any]:
    deterministic = [flow.greedy(), refit]
    if flow.has_closed_form:
        best, greedy, refitted_likelihood = evaluate.exact_each([flow, *deterministic], split, memory=memory)
    else:
        greedy, refitted_likelihood = evaluate.exact_each(deterministic, split, memory=memory)
        best = likelihood(flow, split, samples, memory=memory)
    likelihoods = {"": best, " (most probable choices)": greedy, " (refitted base)": refitted_likelihood}
    for of, log_p in likelihoods.items():
        require_finite(log_p, f"this split{of}")
    with bf16_autocast(flow.device, precision):
        uses = [
            use for part in latent_components(flow) for use in evaluate.layer_use(part, split, memory=memory)
        ]
    figures = best.summary() | {
        "greedy_nll": greedy.nll,
        "greedy_stderr": greedy.summary()["stderr"],
        "refit_nll": refitted_likelihood.nll,
        "refit_stderr": refitted_likelihood.summary()["stderr"],
        "floor": float(flow.floor()) - split.mean_log_density,
        "layers": [dataclasses.asdict(use) for use in uses],
    }
    if isinstance(flow, LatentFlow) and flow.has_posterior:
        figures["elbo_nll"] = evaluate.elbo(flow, split, memory=memory).nll
    _require_numbers(figures)
    return figures


def _require_numbers(figures: dict[str, Any]) -> None:
    """Numbers overflow within a network, and a likelihood may still be finite."""
    of_layers = {
        f"{key} of layer {n}": value
        for n, use in enumerate(figures["layers"], 1)
        for key, value in use.items()
    }
    for name, value in (figures | of_layers).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise EvaluationError(
                f"figures are finite numbers, and {name} on this split is none; train again with a smaller lr, or with clip=1"
            )


def independent_nll(dataset: Dataset, split: Split) -> float:
    """The negative log-likelihood, in nats, of independent features with the training data's frequencies."""
    frequencies = category_frequencies(dataset.train, dataset.categories)
    counts = category_counts(split.values, dataset.categories)
    expected = sum(float((p.log() * n).sum()) for p, n in zip(frequencies, counts, strict=True))
    return -expected / len(split) - split.mean_log_density
