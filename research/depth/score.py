"""What a row of the question of depth is worth on held-out data."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from torch import Tensor

from research.budgets import Budget
from research.depth.rows import DepthRow
from research.experiment import Trained
from research.paper.score import deterministic
from research.results import Record
from research.samples import seconds_of_samples
from xorflow import FactorisedBase, LatentFlow, Mixture, evaluate
from xorflow.data import Split
from xorflow.flows import with_base
from xorflow.training import refitted

DEPTH_COUNTS = 0.001
"""A layer that flips a smaller part of the pixels than this is no depth."""

_TIMED_SAMPLES = 64
_OWN_SAMPLES = 100
"""Of the bound on the base that a flow was trained on, if it is rebased."""


def score(run: Trained) -> Record:
    """All figures of a trained flow on one part of its data; of a final run also the likelihood of every image.

    Returns:
        `nll`, `kind` and `stderr` of the latent flow, exact or a bound with the last layer summed out; the exact likelihoods
        of the deterministic one; what each layer does; how many weights there are, and what sampling takes. Of a row that is
        rebased, `own` has the likelihood on its own.
    """
    row, flow, figures = run.row, run.flow, deterministic(run.known)
    rebased = flow
    if row.rebased == "fixed" and isinstance(flow, LatentFlow):
        rebased = with_base(flow, FactorisedBase(flow.features).to(flow.device, flow.dtype)).eval()
        roughly = replace(run.budget, samples=min(run.budget.samples, _OWN_SAMPLES))
        on_its_own = _likelihood(row, flow, run.split, roughly) | figures
        figures = _rebased_figures(rebased, run) | {"own": on_its_own}
    figures |= _likelihood(row, rebased, run.split, run.budget, keep=run.phase == "final")
    layers: Any = figures["layers"]
    return figures | {
        "rows": len(run.split),
        # a mixture has the layers of all its flows
        "effective_depth": min(effective_depth(layers), row.depth),
        "parameters": _weights(run.components),
        "sampling_passes": sampling_passes(row, flow.features),
        "sampling_seconds": round(seconds_of_samples(flow, _TIMED_SAMPLES), 4),
    }


def _likelihood(
    row: DepthRow, flow: LatentFlow | Mixture, split: Split, budget: Budget, *, keep: bool = False
) -> Record:
    """Of the latent flow, and of every image if models are compared image by image."""
    if isinstance(flow, Mixture) or flow.has_closed_form:
        likelihood = evaluate.exact(flow, split)
    else:
        proposal: Literal["p", "q"] = "q" if flow.has_posterior else "p"
        samples = min(budget.samples, row.samples)
        likelihood = evaluate.importance(flow, budget.limited(split), samples=samples, proposal=proposal)
    summary = {"samples": None, "ess": None} | likelihood.summary()
    values = {"values": packed(likelihood.values)} if keep else {}
    return {key: summary[key] for key in ("nll", "kind", "stderr", "samples", "ess")} | values


def packed(values: Tensor) -> str:
    """The log-likelihoods of all images, as text: float32 in base 64."""
    return base64.b64encode(values.float().cpu().numpy().astype("<f4").tobytes()).decode()


def _rebased_figures(flow: LatentFlow, run: Trained) -> Record:
    """The deterministic figures of a flow that is put on another base than its run's."""
    greedy, refit = evaluate.greedy(flow, run.split), evaluate.exact(refitted(flow, run.train), run.split)
    return {
        "greedy": greedy.nll,
        "greedy_stderr": greedy.stderr,
        "refit": refit.nll,
        "refit_stderr": refit.stderr,
        "layers": [asdict(use) for use in evaluate.layer_use(flow, run.split)],
    }


def effective_depth(layers: list[Record]) -> int:
    """How many layers do something: flips, drawn or greedy, of enough pixels."""
    return sum(max(layer["flip_rate"], layer["greedy_flip_rate"]) >= DEPTH_COUNTS for layer in layers)


def sampling_passes(row: DepthRow, features: int) -> int:
    """Passes of a network that follow one another in plain sampling: couplings one a layer, orderings one a pixel and layer."""
    return row.depth * (1 if row.family == "coupling" else features)


def _weights(flows: Sequence[LatentFlow]) -> int:
    """Of what generates: networks, whether they were trained to the end or not, and a learned base; no posteriors."""
    modules = [layer.conditioner for flow in flows for layer in flow.layers]
    modules += [flow.base for flow in flows if flow.base.learned]
    return sum(p.numel() for module in modules for p in module.parameters())
