"""Every likelihood of what the recipes with strong conditioners become, and the mixtures of what was trained."""

from __future__ import annotations

import time

import torch

from research import results
from research.experiment import Request, Trained
from research.files import RunName, read_trained
from research.results import Record
from research.samples import SAMPLES, draw_samples, seconds_of_samples
from research.strong.rows import MixedRow
from xorflow import FactorisedBase, Flow, LatentFlow, Mixture, data, evaluate
from xorflow.data import Dataset, Split
from xorflow.training import mixture_of, open_run, report, resolve_device

DRAWS = (0, 1, 2, 3, 4)
"""The seeds of the draws of the binarised test images; their mean is reported."""

_TRAIN_ROWS = 10_000
_TRAIN_DRAW = 0
"""So many training images, of this draw, say how far a model knows them better than others."""

_FIXED_P0 = 0.9
"""Of the paper's base."""


def score(run: Trained) -> Record:
    """All figures of a model on the test data, here of the first draw; of a selection, what the run itself reports."""
    flow, split, known = run.flow, run.split, run.known
    if run.phase == "select":
        return {key: known[key] for key in ("nll", "kind", "stderr", "rows")}
    draws = [known["nll"], *(evaluate.exact(flow, again).nll for again in _other_draws(run))]
    likelihoods = evaluate.exact_each([*run.components, greedy_on_fixed_base(run)], split)
    *components, greedy_fixed = [likelihood.nll for likelihood in likelihoods]
    bf16 = evaluate.exact(flow, split, autocast=torch.bfloat16).nll
    seen = run.train.subset(min(_TRAIN_ROWS, len(run.train)))
    hard = seen.frozen(_TRAIN_DRAW) if seen.stochastic else seen
    return {
        "nll": sum(draws) / len(draws),
        "kind": "exact",
        "stderr": known["stderr"],
        "components": components,
        "draws": {"seeds": list(DRAWS[: len(draws)]), "nll": draws, "spread": max(draws) - min(draws)},
        "greedy": known["greedy_nll"],
        "greedy_fixed": greedy_fixed,
        "refit": known["refit_nll"],
        "train_nll": evaluate.exact(flow, hard).nll,
        "train_rows": len(hard),
        "bf16": {"nll": bf16, "difference": bf16 - draws[0]},
        "sampling": {"samples": SAMPLES, "seconds": round(seconds_of_samples(flow, SAMPLES), 3)},
        "rows": len(split),
        "layers": known["layers"],
    }


def _other_draws(run: Trained) -> list[Split]:
    """The test data in every draw after the first; data that are drawn once have none."""
    others = [] if run.budget.digits else [data.mnist(validation=0, seed=seed).test for seed in DRAWS[1:]]
    return [other.to(run.split.device) for other in others if other is not None]


def greedy_on_fixed_base(run: Trained) -> Flow | Mixture:
    """The deterministic flow on the paper's base instead of the one that was learned."""
    fixed = [_on_fixed_base(flow) for flow in run.components]
    return run.flow.of(fixed) if isinstance(run.flow, Mixture) else fixed[0]


def _on_fixed_base(flow: LatentFlow) -> Flow:
    base = FactorisedBase(flow.features, _FIXED_P0, categories=flow.states.sizes)
    return Flow(flow.greedy().layers, base.to(flow.device, flow.dtype))


def mix(row: MixedRow, request: Request, dataset: Dataset) -> Record | None:
    """The record of a mixture of finished runs; None as long as one of them, or its weights, is missing."""
    names = [RunName(row.part, "ours", seed, "final") for seed in range(row.part.seeds)]
    folders = [name.folder(request.work / request.budget.name) for name in names]
    if not all(
        results.exists(name.file(request.out)) and (folder / "result.json").exists()
        for name, folder in zip(names, folders, strict=True)
    ):
        return None
    runs = [open_run(folder, device=str(resolve_device(request.device))) for folder in folders]
    model = mixture_of([run.flow for run in runs]).eval()
    dataset = dataset.to(model.device)
    assert dataset.test is not None
    began = time.monotonic()
    known = report(model, dataset, 1, ("test",), runs[0].options.precision)["test"]
    figures = score(Trained(row, model, dataset.test, dataset.train, known, request.budget))
    trained = [read_trained(folder, "test") for folder in folders]
    return {
        "phase": "mixed",
        "seed": 0,
        "config": None,
        "recipe": row.recipe,
        "seeds": list(range(row.part.seeds)),
        "evaluation": figures,
        "samples": draw_samples("latent", model, runs[0].shape),
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "seconds": round(sum(result["seconds"] for result in trained), 3),
        "evaluation_seconds": round(time.monotonic() - began, 3),
        "device": trained[0]["device"],
        "device_name": results.device_name(model.device),
    }
