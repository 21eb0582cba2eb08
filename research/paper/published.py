"""The table of Hesselink & Aziz (2020), Latent Transformations for Discrete-Data Normalising Flows.

Negative log-likelihood in nats on stochastically binarised MNIST, base fixed at 0.9 / 0.1, best of three.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PaperRow:
    """One row: `nll` is exact for straight-through rows and a 1,000-sample bound otherwise."""

    id: str
    title: str
    depth: int
    nll: float
    greedy: float | None = None


PAPER_TABLE = tuple(
    PaperRow(**row) for row in json.loads(Path(__file__).with_name("paper.json").read_text("utf-8"))
)
