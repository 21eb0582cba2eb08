"""The question of depth as an experiment: what a row's figures are, and what its plan says."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor

from research.budgets import Budget, Phase
from research.depth.codes import coded_flow
from research.depth.rows import DEPTH_ROWS, STARTS, DepthRow
from research.paper.published import PAPER_TABLE
from research.paper.score import limited, reference
from research.results import VERSION
from research.runner import Experiment
from xorflow import FactorisedBase, LatentFlow, Mixture, evaluate
from xorflow.data import Dataset, Split
from xorflow.flows import with_base
from xorflow.training import BASES, CONDITIONERS, Options, refitted

DEPTH_COUNTS = 0.001
"""A layer that flips a smaller part of the pixels than this is no depth."""

_TIMED_SAMPLES = 64
_OWN_SAMPLES = 100
"""Of the bound on the base that a flow was trained on, if it is rebased."""


def depth_score(
    row: DepthRow,
    flow: LatentFlow | Mixture,
    split: Split,
    known: dict[str, Any],
    budget: Budget,
    *,
    phase: Phase = "final",
    train: Split,
    pause: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """All figures of a trained flow on one part of its data.

    Args:
        row: the row it was trained for.
        flow: the model.
        split: the data.
        known: what the run itself found on these data, as `result.json` has it.
        budget: how many samples, of how many rows.
        phase: that of the run; a final one keeps the likelihood of every image.
        train: the training data, to which the base of the deterministic flow is refitted.
        pause: is called between steps, and may raise.

    Returns:
        `nll`, `kind` and `stderr` of the latent flow, exact or a bound with the last layer summed out; the exact likelihoods
        of the deterministic one; what each layer does; how many weights there are, and what sampling takes. Of a row that is
        rebased, `own` has the likelihood on its own.
    """
    keep = phase == "final"  # only then are models compared image by image
    if row.rebased == "fixed" and isinstance(flow, LatentFlow):
        rebased = with_base(flow, FactorisedBase(flow.features).to(flow.device, flow.dtype)).eval()
        own = _likelihood(row, flow, split, _roughly(budget), keep=False)
        figures = _rebased_figures(rebased, split, train) | {"own": own | _deterministic(known)}
    else:
        rebased, figures = flow, _deterministic(known)
    pause()
    figures |= _likelihood(row, rebased, split, budget, keep)
    pause()
    layers: Any = figures["layers"]
    return figures | {
        "rows": len(split),
        "effective_depth": min(
            effective_depth(layers), row.depth
        ),  # a mixture has the layers of all its flows
        "parameters": _weights(flow),
        "sampling_passes": sampling_passes(row, flow.features),
        "sampling_seconds": _seconds_of_samples(flow),
    }


def _roughly(budget: Budget) -> Budget:
    return replace(budget, samples=min(budget.samples, _OWN_SAMPLES))


def _likelihood(
    row: DepthRow, flow: LatentFlow | Mixture, split: Split, budget: Budget, keep: bool
) -> dict[str, Any]:
    if isinstance(flow, Mixture) or flow.has_closed_form:
        return _summary(evaluate.exact(flow, split), keep)
    proposal: Literal["p", "q"] = "q" if flow.has_posterior else "p"
    samples = min(budget.samples, row.samples)
    found = evaluate.importance(flow, limited(split, budget), samples=samples, proposal=proposal)
    return _summary(found, keep)


def _summary(found: evaluate.LogLikelihood, keep: bool) -> dict[str, Any]:
    known = {"samples": None, "ess": None} | found.summary()
    values = {"values": packed(found.values)} if keep else {}
    return {key: known[key] for key in ("nll", "kind", "stderr", "samples", "ess")} | values


def packed(values: Tensor) -> str:
    """The log-likelihoods of all images, as text: float32 in base 64."""
    return base64.b64encode(values.float().cpu().numpy().astype("<f4").tobytes()).decode()


def _deterministic(known: dict[str, Any]) -> dict[str, Any]:
    return {
        "greedy": known["greedy_nll"],
        "greedy_stderr": known["greedy_stderr"],
        "refit": known["refit_nll"],
        "refit_stderr": known["refit_stderr"],
        "layers": known["layers"],
    }


def _rebased_figures(flow: LatentFlow, split: Split, train: Split) -> dict[str, Any]:
    """The deterministic figures of a flow that is put on another base than its run's."""
    greedy, refit = evaluate.greedy(flow, split), evaluate.exact(refitted(flow, train), split)
    return {
        "greedy": greedy.nll,
        "greedy_stderr": greedy.stderr,
        "refit": refit.nll,
        "refit_stderr": refit.stderr,
        "layers": [asdict(use) for use in evaluate.layer_use(flow, split)],
    }


def effective_depth(layers: list[dict[str, Any]]) -> int:
    """How many layers do something: flips, drawn or greedy, of enough pixels."""
    return sum(max(layer["flip_rate"], layer["greedy_flip_rate"]) >= DEPTH_COUNTS for layer in layers)


def sampling_passes(row: DepthRow, features: int) -> int:
    """Passes of a network that follow one another in plain sampling: couplings one a layer, orderings one a pixel and layer."""
    return row.depth * (1 if row.family == "coupling" else features)


def _weights(flow: LatentFlow | Mixture) -> int:
    """Of what generates: networks, whether they were trained to the end or not, and a learned base; no posteriors."""
    parts = [part for part in flow if isinstance(part, LatentFlow)] if isinstance(flow, Mixture) else [flow]
    modules = [layer.conditioner for part in parts for layer in part.layers]
    modules += [part.base for part in parts if part.base.learned]
    return sum(p.numel() for module in modules for p in module.parameters())


def _seconds_of_samples(flow: LatentFlow | Mixture) -> float:
    """What some samples take, by the library's own sampler, after a first one."""
    generator = torch.Generator(flow.device).manual_seed(0)
    flow().sample((1,), generator=generator)
    began = time.monotonic()
    flow().sample((_TIMED_SAMPLES,), generator=generator).cpu()
    return round(time.monotonic() - began, 4)


def depth_plan(budget: Budget) -> dict[str, Any]:
    """What `plan.json` holds: all that a report must know about the rows, and the paper's own figures."""
    return {
        "version": VERSION,
        "experiment": "depth",
        "budget": budget.name,
        "words": budget.words,
        "samples": budget.samples,
        "paper": [
            {"depth": row.depth, "nll": row.nll} for row in PAPER_TABLE if row.words == "straight-through"
        ],
        "rows": [_planned(row) for row in DEPTH_ROWS],
    }


def _planned(row: DepthRow) -> dict[str, Any]:
    options = row.options("ours")
    coupled = row.family == "coupling"
    return {
        "id": row.id,
        "title": row.title,
        "family": row.family,
        "series": row.series,
        "base": "fixed" if row.rebased else BASES.read(options.base).name,
        "depth": row.depth,
        "estimator": options.estimator,
        "ordering": CONDITIONERS.read(options.conditioner)["mask"] if coupled else options.order,
        "flow": row.flow,
        "rebased": row.rebased,
        "init": row.init,
        "metric": row.metric,
    }


def _built(row: DepthRow, options: Options, dataset: Dataset) -> LatentFlow | None:
    """The flow of a row with a code; small images have few features to spare, so that groups are small there."""
    if row.code is None:
        return None
    groups = row.code.partition("x")[0]
    return coded_flow(row.code if dataset.features >= _LARGE else f"{groups}x2", options, dataset)


_LARGE = 784

DEPTH = Experiment("depth", depth_plan, depth_score, reference, STARTS, build=_built)
"""Whether depth pays."""
