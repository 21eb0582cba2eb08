"""Every likelihood of what the recipes with strong conditioners become, and the mixtures of what was trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from research import results
from research.budgets import Budget, Phase
from research.files import RunName, read_trained
from research.runner import Experiment
from research.samples import SAMPLES, draw_samples
from research.strong.rows import MIXED_ROWS, STRONG_ROWS, MixedRow, StrongRow
from xorflow import ConfigError, FactorisedBase, Flow, LatentFlow, Mixture, data, evaluate
from xorflow.data import Split
from xorflow.training import RECIPES, mixture_of, open_run, report, resolve_device

DRAWS = (0, 1, 2, 3, 4)
"""The seeds of the draws of the binarised test images; their mean is reported."""

_TRAIN_ROWS = 10_000
_TRAIN_DRAW = 0
"""So many training images, of this draw, say how far a model knows them better than others."""

_FIXED_P0 = 0.9
"""Of the paper's base."""


# ---- figures ----


def strong_score(
    row: StrongRow,
    flow: LatentFlow | Mixture,
    split: Split,
    known: Mapping[str, Any],
    budget: Budget,
    *,
    phase: Phase,
    train: Split,
    pause: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """All figures of a trained model on the test data; of a selection, what the run itself found."""
    del row
    if phase == "select":
        return {key: known[key] for key in ("nll", "kind", "stderr", "rows")}
    return strong_figures(flow, split, known, budget, train=train, pause=pause)


def strong_figures(
    flow: LatentFlow | Mixture,
    split: Split,
    known: Mapping[str, Any],
    budget: Budget,
    *,
    train: Split,
    pause: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """All figures of a model on the test data.

    Args:
        flow: the model.
        split: the test data, of the first draw.
        known: what `training.report` says of these data.
        budget: whether the data are MNIST, which can be drawn again.
        train: the training data.
        pause: is called between steps, and may raise.
    """
    draws = [known["nll"]]
    for again in _other_draws(split, budget):
        draws.append(evaluate.exact(flow, again).nll)
        pause()
    *components, greedy_fixed = [
        found.nll for found in evaluate.exact_each([*components_of(flow), greedy_on_fixed_base(flow)], split)
    ]
    rounded = evaluate.exact(flow, split, autocast=torch.bfloat16).nll
    seen = train.subset(min(_TRAIN_ROWS, len(train)))
    hard = seen.frozen(_TRAIN_DRAW) if seen.stochastic else seen
    pause()
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
        "bf16": {"nll": rounded, "difference": rounded - draws[0]},
        "sampling": {"samples": SAMPLES, "seconds": round(_seconds_of_samples(flow), 3)},
        "rows": len(split),
        "layers": known["layers"],
    }


def components_of(flow: LatentFlow | Mixture) -> list[LatentFlow]:
    """The components of a mixture, or the flow itself."""
    return flow.latent_components() if isinstance(flow, Mixture) else [flow]


def _other_draws(split: Split, budget: Budget) -> list[Split]:
    """The test data in every draw after the first; data that are drawn once have none."""
    others = [] if budget.digits else [data.mnist(validation=0, seed=seed).test for seed in DRAWS[1:]]
    return [other.to(split.device) for other in others if other is not None]


def greedy_on_fixed_base(flow: LatentFlow | Mixture) -> Flow | Mixture:
    """The deterministic flow on the paper's base instead of the one that was learned."""
    if isinstance(flow, Mixture):
        return flow.of([_on_fixed_base(part) for part in components_of(flow)])
    return _on_fixed_base(flow)


def _on_fixed_base(flow: LatentFlow) -> Flow:
    base = FactorisedBase(flow.features, _FIXED_P0, categories=flow.states.sizes)
    return Flow(flow.greedy().layers, base.to(flow.device, flow.dtype))


def _seconds_of_samples(flow: LatentFlow | Mixture) -> float:
    """After a first one, for which kernels may have to be built."""
    generator = torch.Generator(flow.device).manual_seed(0)
    flow().sample((1,), generator=generator)
    began = time.monotonic()
    flow().sample((SAMPLES,), generator=generator).cpu()
    return time.monotonic() - began


# ---- mixtures of what was trained ----


def mix_rows(rows: Sequence[MixedRow], budget: Budget, out: Path, work: Path, device: str) -> list[str]:
    """Evaluate the mixtures whose parts are finished; the names of those that have to wait.

    Args:
        rows: the mixtures.
        budget: of the runs.
        out: the folder of results.
        work: the folder of the runs, for their weights.
        device: where to evaluate.
    """
    waiting = []
    for row in rows:
        path = out / "runs" / f"{row.id}.json"
        if results.exists(path):
            _require_current(row, path)
            continue
        parts = [RunName(row.trained, "ours", seed, "final") for seed in range(row.trained.seeds)]
        folders = [part.folder(work / budget.name) for part in parts]
        if all(results.exists(part.file(out)) for part in parts) and all(
            (f / "result.json").exists() for f in folders
        ):
            results.write(path, _mixed(row, folders, budget, device))
        else:
            waiting.append(row.id)
    return waiting


def _require_current(row: MixedRow, path: Path) -> None:
    """A mixture of other recipes than those of now is not passed off as theirs."""
    before = results.read(path, STRONG.command).get("recipe")
    if before != row.recipe:
        raise ConfigError(
            f"{path} mixes {before}, and row {row.id} now is {row.recipe}: remove that record, or choose another --out"
        )


def _mixed(row: MixedRow, folders: Sequence[Path], budget: Budget, device: str) -> dict[str, Any]:
    runs = [open_run(folder, device=str(resolve_device(device))) for folder in folders]
    model = mixture_of([run.flow for run in runs]).eval()
    dataset = runs[0].data().to(model.device)
    assert dataset.test is not None
    began = time.monotonic()
    known = report(model, dataset, 1, ("test",), runs[0].options.precision)["test"]
    figures = strong_figures(model, dataset.test, known, budget, train=dataset.train)
    trained = [read_trained(folder, "test") for folder in folders]
    return {
        "version": results.VERSION,
        "budget": budget.name,
        "row": row.id,
        "phase": "mixed",
        "seed": 0,
        "config": None,
        "recipe": row.recipe,
        "seeds": list(range(row.trained.seeds)),
        "evaluation": {"part": "test", "draw": dataset.describe()["sha256"]["test"], **figures},
        "samples": draw_samples("latent", model, runs[0].shape),
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "seconds": round(sum(result["seconds"] for result in trained), 3),
        "evaluation_seconds": round(time.monotonic() - began, 3),
        "together": 1,
        "device": trained[0]["device"],
        "device_name": results.device_name(model.device),
        "versions": results.versions(),
    }


# ---- the experiment ----


def strong_plan(budget: Budget) -> dict[str, Any]:
    """What `plan.json` holds."""
    trained = [
        {
            "id": row.id,
            "title": row.title,
            "recipe": RECIPES[row.named].label,
            "part": None,
            "family": "trained",
        }
        for row in STRONG_ROWS
    ]
    mixed = [
        {
            "id": row.id,
            "title": row.title,
            "recipe": row.recipe,
            "part": row.part,
            "family": "mixed",
        }
        for row in MIXED_ROWS
    ]
    return {
        "version": results.VERSION,
        "experiment": "strong",
        "budget": budget.name,
        "words": budget.words,
        "rows": [*trained, *mixed],
    }


def _selection(name: RunName) -> RunName:
    """A recipe is selected once, by its first seed."""
    assert isinstance(name.row, StrongRow)
    return RunName(name.row, name.variant, 0, "select")


STRONG = Experiment("strong", strong_plan, strong_score, selection=_selection)
