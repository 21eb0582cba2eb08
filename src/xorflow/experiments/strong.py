"""Strong conditioners: which recipes are trained, and every likelihood of what they become.

Each row is a named recipe of a flow of depth 1 with a learned base, whose likelihood is exact whatever its conditioner. One row
is not trained: it mixes the networks of others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from xorflow import data, evaluate
from xorflow.bases import FactorisedBase
from xorflow.data import Split
from xorflow.errors import ConfigError
from xorflow.experiments.budgets import Budget, Phase
from xorflow.experiments.files import RESULT_VERSION, RunName, device_name, read_trained, versions, write_run
from xorflow.experiments.reproduction import Experiment
from xorflow.experiments.rows import Variant
from xorflow.experiments.scores import SAMPLES, draw_samples
from xorflow.flows import Flow, LatentFlow, Mixture
from xorflow.training import Options, mixture_of, open_run, report
from xorflow.training.devices import resolve_device
from xorflow.training.recipes import NONE as NO_RECIPE
from xorflow.training.recipes import RECIPES
from xorflow.training.storage import read_json

DRAWS = (0, 1, 2, 3, 4)
"""The seeds of the draws of the binarised test images; their mean is reported."""

_TRAIN_ROWS = 10_000
_TRAIN_DRAW = 0
"""So many training images, of this draw, say how far a model knows them better than others."""

_FIXED_P0 = 0.9
"""Of the paper's base."""


@dataclass(frozen=True)
class StrongRow:
    """A recipe that is trained.

    Attributes:
        id: its name on the command line and in files.
        title: its name in tables.
        named: the recipe.
        seeds: how many of them are trained.
    """

    id: str
    title: str
    named: str
    seeds: int = 1

    @property
    def metric(self) -> Literal["greedy", "likelihood"]:
        return "likelihood"

    @property
    def reading(self) -> Literal["deterministic", "latent"]:
        return "latent"

    def recipe(self, variant: Variant) -> Mapping[str, Any] | None:
        return {"recipe": self.named} if variant == "ours" else None

    def options(self, variant: Variant) -> Options:
        recipe = self.recipe(variant)
        if recipe is None:
            raise ConfigError(f"row {self.id} has no variant {variant!r}")
        return Options().replace(**recipe)


@dataclass(frozen=True)
class MixedRow:
    """A row whose networks, of all of its seeds, are mixed with equal weights.

    Attributes:
        id: its name on the command line and in files.
        title: its name in tables.
        part: the row.
    """

    id: str
    title: str
    part: str

    @property
    def trained(self) -> StrongRow:
        """The row that it mixes."""
        return next(row for row in STRONG_ROWS if row.id == self.part)

    @property
    def recipe(self) -> str:
        """That of its part, and how often it was trained."""
        return f"{RECIPES[self.trained.named].label} x {self.trained.seeds}"


STRONG_ROWS: tuple[StrongRow, ...] = (
    StrongRow("made", "MADE, one hidden layer of 1,024", "demo"),
    StrongRow("made-strong", "MADE, two hidden layers of 4,096", "made-strong"),
    StrongRow("recurrent", "recurrent network", "recurrent"),
    StrongRow("transformer", "causal transformer, by rows and by columns", "transformer-10min"),
    StrongRow(
        "transformer-pair",
        "two causal transformers, one by rows and one by columns",
        "transformer-pair",
        seeds=2,
    ),
    StrongRow(
        "transformer-four",
        "four causal transformers: by rows and by columns, from either end",
        "transformer-four",
        seeds=2,
    ),
)
MIXED_ROWS: tuple[MixedRow, ...] = (
    MixedRow(
        "transformer-mixed",
        "four causal transformers: both seeds of the two, all mixed",
        "transformer-pair",
    ),
)


STRONG_BUDGETS: tuple[Budget, ...] = (
    Budget(
        name="smoke",
        words="Smoke test on a few hundred digits of 8 x 8 pixels: that everything runs, and nothing about the models.",
        seeds=1,
        samples=1,
        rows=None,
        changes=lambda options: (
            _tiny(options, 1) | {"batch_size": 50, "estimator": _on_fixed_values(options.estimator)}
        ),
        validation=60,
        digits=True,
    ),
    Budget(
        name="quick",
        words="Quick run with small networks and one epoch: not converged, and not to be compared with anything published.",
        seeds=1,
        samples=1,
        rows=None,
        changes=lambda options: _tiny(options, 1),
    ),
    Budget(
        name="full",
        words="Every recipe as it stands.",
        seeds=2,
        samples=1,
        rows=None,
        changes=lambda options: {},  # noqa: ARG005
    ),
)


def _tiny(options: Options, epochs: int) -> dict[str, Any]:
    return {
        "hidden": [min(16, width) for width in options.hidden],
        "width": None if options.width is None else 16,
        "blocks": None if options.blocks is None else 1,
        "heads": 2,
        "quiet": 0.05 if options.quiet else 0.0,  # of few images
        "warmup": 1,
        "epochs": epochs,
        "validate_every": 1,
        "precision": "auto",
        "recipe": NO_RECIPE,  # which is for the whole of MNIST
    }


def _on_fixed_values(estimator: str) -> str:
    """The estimator without grey values, which only MNIST has."""
    return estimator.replace("grey=true", "grey=false")


def find_strong_budget(name: str) -> Budget:
    """A budget by its name."""
    found = next((budget for budget in STRONG_BUDGETS if budget.name == name), None)
    if found is None:
        raise ConfigError(f"--budget is one of {', '.join(b.name for b in STRONG_BUDGETS)}; got {name!r}")
    return found


def chosen_strong(names: str | None) -> tuple[tuple[StrongRow, ...], tuple[MixedRow, ...]]:
    """The rows that a comma-separated list names, those first that are trained; all of them for None.

    >>> [row.id for row in chosen_strong("recurrent,made")[0]]
    ['made', 'recurrent']
    """
    if names is None:
        return STRONG_ROWS, MIXED_ROWS
    known = [row.id for row in (*STRONG_ROWS, *MIXED_ROWS)]
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ConfigError(
            f"--rows names rows of {', '.join(known)}; got {unknown[0] if unknown else names!r}"
        )
    return (
        tuple(row for row in STRONG_ROWS if row.id in wanted),
        tuple(row for row in MIXED_ROWS if row.id in wanted),
    )


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
    """The deterministic reading on the paper's base instead of the one that was learned."""
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
        if path.exists():
            _require_current(row, path)
            continue
        parts = [RunName(row.trained, "ours", seed, "final") for seed in range(row.trained.seeds)]
        folders = [part.folder(work / budget.name) for part in parts]
        if all(part.file(out).exists() for part in parts) and all(
            (f / "result.json").exists() for f in folders
        ):
            write_run(path, _mixed(row, folders, budget, device), STRONG.command, folders[0].parent)
        else:
            waiting.append(row.id)
    return waiting


def _require_current(row: MixedRow, path: Path) -> None:
    """A mixture of other recipes than those of now is not passed off as theirs."""
    before = read_json(path, "the result of a mixture").get("recipe")
    if before != row.recipe:
        raise ConfigError(
            f"{path} mixes {before}, and row {row.id} now is {row.recipe}: remove that file, or choose another --out"
        )


def _mixed(row: MixedRow, folders: Sequence[Path], budget: Budget, device: str) -> dict[str, Any]:
    runs = [open_run(folder, device=str(resolve_device(device))) for folder in folders]
    model = mixture_of([run.flow for run in runs]).eval()
    dataset = runs[0].data().to(model.device)
    assert dataset.test is not None
    began = time.monotonic()
    known = report(model, dataset, 1, ("test",), runs[0].options.precision)["test"]
    figures = strong_figures(model, dataset.test, known, budget, train=dataset.train)
    results = [read_trained(folder, "test") for folder in folders]
    return {
        "version": RESULT_VERSION,
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
        "seconds": round(sum(result["seconds"] for result in results), 3),
        "evaluation_seconds": round(time.monotonic() - began, 3),
        "together": 1,
        "device": results[0]["device"],
        "device_name": device_name(model.device),
        "versions": versions(),
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
        "version": RESULT_VERSION,
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
