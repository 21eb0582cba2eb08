"""The rows of the question of depth: which flows are compared, and how each is trained; `rows.toml` has them, as data.

Two settings. On the paper's fixed base, flows in orderings of depth 1, 2, 4 and 8 are compared at equal weights: about
12.9 million, as of 8,192 hidden units in all, whichever layers they are in. On a learned base, couplings of depth 2 to 16,
which sample in as many passes, must build the model from layers that leave most of the pixels alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from research.rows import TrainedRow


@dataclass(frozen=True)
class DepthRow(TrainedRow):
    """A row that is trained.

    Attributes:
        family: of its conditioners.
        series: rows that differ in their depth alone; a line of the figure.
        samples: at most so many of the importance-sampled bound.
        rebased: the base, `fixed`, that the trained flow is put on; None for the base that it was trained on.
        code: how many groups of how many features hand-made layers before the last write; see `codes`.
    """

    family: Literal["autoregressive", "coupling"]
    series: str
    samples: int = 1000
    rebased: Literal["fixed"] | None = None
    code: tuple[int, int] | None = None


def _rows() -> Iterator[DepthRow]:
    content = tomllib.loads(Path(__file__).with_name("rows.toml").read_text("utf-8"))
    for entry in content["rows"]:
        widths, like, training = (entry.pop(key, {}) for key in ("widths", "like", "training"))
        for depth, width in widths.items():
            recipe: dict[str, Any] = {"layers": int(depth)}
            for options in (*(content["like"][name] for name in like), training):
                recipe |= options
            recipe["conditioner"] = recipe["conditioner"].format(width=width)
            names = {key: entry[key].format(depth=depth) for key in ("id", "title")}
            yield DepthRow(**entry | names, recipes={"ours": recipe})


DEPTH_ROWS = tuple(_rows())
