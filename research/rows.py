"""The rows of an experiment: those that are trained, those that are computed, and how they are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from xorflow import ConfigError
from xorflow.training import Options

Variant = Literal["ours", "improved"]
VARIANTS = ("ours", "improved")
Recipe = Mapping[str, Any]
"""Training options, by name; what is left out has its default."""


@dataclass(frozen=True)
class TrainedRow:
    """A row that is trained.

    Attributes:
        id: its name on the command line and in files.
        title: its name in tables.
        recipes: how its variants are trained.
        seeds: how many are trained, unless the command line says otherwise.
        init: the row whose run of the same seed gives it its initial weights.
    """

    id: str
    title: str
    recipes: Mapping[Variant, Recipe]
    seeds: int = field(default=1, kw_only=True)
    init: str | None = field(default=None, kw_only=True)

    def options(self, variant: Variant = "ours") -> Options:
        """All options of a variant, before a budget or a phase changes any; initial weights are named by their row."""
        if variant not in self.recipes:
            raise ConfigError(f"row {self.id} has no variant {variant!r}")
        init = {} if self.init is None else {"init": f"rows/{self.init}"}
        return Options().replace(**{**self.recipes[variant], **init})

    @property
    def depth(self) -> int:
        return self.options().layers or 1

    @property
    def metric(self) -> str:
        """By which likelihood of validation data its seeds are compared: greedy, or likelihood."""
        return self.options().select

    @property
    def flow(self) -> Literal["deterministic", "latent"]:
        """Which model the row is about: the one bijection, or the distribution over bijections."""
        return "deterministic" if self.options().estimator.startswith("straight-through") else "latent"


@dataclass(frozen=True)
class ComputedRow:
    """A row that is not trained, but computed from data, or from the runs of another row.

    Attributes:
        id: its name on the command line and in files.
        title: its name in tables.
    """

    id: str
    title: str

    @property
    def recipe(self) -> str | None:
        """That of the runs."""
        return None


Row = TrainedRow | ComputedRow


def picked(names: str | None, known: Sequence[str], rule: str) -> list[str]:
    """Those of the known names that a comma-separated list names, in their order; all of them for None.

    A name with a star stands for all that fit it.
    """
    if names is None:
        return list(known)
    patterns = [name for part in names.split(",") if (name := part.strip())]
    for pattern in patterns or [names]:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ConfigError(f"{rule} {', '.join(known)}, or several with a *; got {pattern!r}")
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


def chosen(names: str | None, rows: Sequence[Row]) -> list[Row]:
    """The rows that a comma-separated list names, with those whose weights they begin with; all of them for None."""
    wanted = {*picked(names, [row.id for row in rows], "--rows names rows of")}
    inits = {row.id: row.init for row in rows if isinstance(row, TrainedRow) and row.init is not None}
    while more := {inits[name] for name in wanted & inits.keys()} - wanted:
        wanted |= more
    return [row for row in rows if row.id in wanted]
