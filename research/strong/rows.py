"""The rows of strong conditioners, as data: which recipes are trained, and which of them are mixed.

Each row is a named recipe of a flow of depth 1 with a learned base, whose likelihood is exact whatever its conditioner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from research.budgets import Budget, narrowed
from research.files import Variant
from xorflow import ConfigError
from xorflow.training import CONDITIONERS, RECIPES, Options


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
    def flow(self) -> Literal["deterministic", "latent"]:
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
    network = CONDITIONERS.read(narrowed(CONDITIONERS, options.conditioner, 16))
    return {
        "conditioner": str(network.having(width=16, depth=1, heads=2)),
        "skip": 0.05 if options.skip else 0.0,  # of few images
        "warmup": 1,
        "epochs": epochs,
        "validate_every": 1,
        "precision": "auto",
        "recipe": "none",  # which is for the whole of MNIST
    }


def _on_fixed_values(estimator: str) -> str:
    """The estimator without grey values, which only MNIST has."""
    return estimator.replace("soft_targets=true", "soft_targets=false")


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
