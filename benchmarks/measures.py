"""What is measured: functions from a `Setup` to figures, each declared with the ids of its figures and its device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

import xorflow as xf
from models import read_flow, train_flow
from timing import Figure


@dataclass(frozen=True)
class Setup:
    """The device, and flows that are trained when they are first asked for: sampling's cost depends on the weights.

    Attributes:
        device: what is measured.
        run: a finished run of depth 1 and width 1024 on MNIST, to be read instead of training one.
    """

    device: torch.device
    run: Path | None = None

    @functools.cached_property
    def flow(self) -> xf.LatentFlow:
        """Depth 1, width 1024."""
        if self.run is not None:
            return read_flow(self.run, self.device)
        print("training a flow to sample from ...", flush=True)
        return train_flow(self.device)

    @functools.cached_property
    def small_flow(self) -> xf.LatentFlow:
        """Depth 1, width 64."""
        print("training a small flow to sample from ...", flush=True)
        return train_flow(self.device, conditioner="made:hidden=64")


@dataclass(frozen=True)
class Measure:
    """A function that measures.

    Attributes:
        act: makes the figures.
        device: `cpu` or `cuda`.
        ids: of the figures, in their order.
        optional: those that are left out where zuko is not installed.
    """

    act: Callable[[Setup], list[Figure]]
    device: str
    ids: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.act.__name__


MEASURES: list[Measure] = []
"""In the order in which they are made."""


def measure(
    device: str, *ids: str, optional: tuple[str, ...] = ()
) -> Callable[[Callable[[Setup], list[Figure]]], Callable[[Setup], list[Figure]]]:
    """Declare a function that measures."""

    def declare(act: Callable[[Setup], list[Figure]]) -> Callable[[Setup], list[Figure]]:
        MEASURES.append(Measure(act, device, ids, optional))
        return act

    return declare


def mismatch(ids: Iterable[str], measures: Iterable[Measure]) -> str | None:
    """What is wrong with the ids of results of all these measures, in words; None if nothing is."""
    made, declared = list(ids), [(m, id) for m in measures for id in m.ids]
    needed = [id for m, id in declared if id in made or id not in m.optional]
    if made == needed:
        return None
    missing, unknown = sorted(set(needed) - set(made)), sorted(set(made) - set(needed))
    faults = [f"without {', '.join(missing)}"] * bool(missing) + [f"with {', '.join(unknown)}"] * bool(
        unknown
    )
    return " and ".join(faults) or "in another order"
