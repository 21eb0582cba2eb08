"""The rows of strong conditioners, as data: which recipes are trained, and which of them are mixed.

Each row is a named recipe of a flow of depth 1 with a learned base, whose likelihood is exact whatever its conditioner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from research.budgets import BUDGETS
from research.rows import ComputedRow, TrainedRow


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


STRONG_ROWS = (
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
MIXED_ROWS = (
    MixedRow(
        "transformer-mixed",
        "four causal transformers: both seeds of the two, all mixed",
        STRONG_ROWS[4],
    ),
)


_SMOKE, _QUICK, _FULL = (replace(budget, seeds=2, samples=1) for budget in BUDGETS)
STRONG_BUDGETS = (
    _SMOKE,
    _QUICK,
    replace(_FULL, description="Every recipe as it stands."),
)
