"""The rows of strong conditioners, as data: which recipes are trained, and which of them are mixed.

Each row is a named recipe of a flow of depth 1 with a learned base, whose likelihood is exact whatever its conditioner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from research.budgets import BUDGETS, Budget, narrowed
from research.rows import ComputedRow, TrainedRow
from xorflow.training import CONDITIONERS, Options


@dataclass(frozen=True)
class MixedRow(ComputedRow):
    """A row whose networks are those of another, of all of its seeds, mixed with equal weights: its `part`."""

    part: TrainedRow

    @property
    def recipe(self) -> str:
        """That of its part, with its version, and how often it was trained."""
        return f"{self.part.options().recipe} x {self.part.seeds}"


def _row(id: str, title: str, named: str, seeds: int = 1) -> TrainedRow:
    return TrainedRow(id, title, {"ours": {"recipe": named}}, seeds=seeds)


STRONG_ROWS: tuple[TrainedRow, ...] = (
    _row("made", "MADE, one hidden layer of 1,024", "demo"),
    _row("made-strong", "MADE, two hidden layers of 4,096", "made-strong"),
    _row("recurrent", "recurrent network", "recurrent"),
    _row("transformer", "causal transformer, by rows and by columns", "transformer-10min"),
    _row(
        "transformer-pair",
        "two causal transformers, one by rows and one by columns",
        "transformer-pair",
        seeds=2,
    ),
    _row(
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
        STRONG_ROWS[4],
    ),
)


def _tiny(options: Options) -> dict[str, Any]:
    network = CONDITIONERS.read(narrowed(CONDITIONERS, options.conditioner, 16))
    small = {"width": 16, "depth": 1, "heads": 2}
    return {
        "conditioner": CONDITIONERS.text({key: small.get(key, value) for key, value in network.items()}),
        "skip": 0.05 if options.skip else 0.0,  # of few images
        "warmup": 1,
        "epochs": 1,
        "validate_every": 1,
        "precision": "auto",
        "recipe": "none",  # which is for the whole of MNIST
    }


def _on_digits(options: Options) -> dict[str, Any]:
    """Without soft targets: the small digits have no grey values, only MNIST has."""
    estimator = options.estimator.replace("soft_targets=true", "soft_targets=false")
    return _tiny(options) | {"batch_size": 50, "estimator": estimator}


_SMOKE, _QUICK, _FULL = (replace(budget, seeds=2, samples=1) for budget in BUDGETS)
STRONG_BUDGETS: tuple[Budget, ...] = (
    replace(_SMOKE, changes=_on_digits),
    replace(
        _QUICK,
        description="Quick run with small networks and one epoch: not converged, and not to be compared with anything "
        "published.",
        changes=_tiny,
    ),
    replace(_FULL, description="Every recipe as it stands."),
)
