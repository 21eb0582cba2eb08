"""The receptive field of each step along an ordering, and where the steps lie."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from xorflow.conditioners.base import Dependence
from xorflow.conditioners.orderings import ranks
from xorflow.errors import ModelError


def receptive_fields(
    order: tuple[int, ...],
    shape: tuple[int, int] | None,
    reach: int,
    dependences: list[Dependence],
    skipped: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """For each source and step the features of its receptive field, and whether each is seen: both (sources, D, R).

    The first is the feature visited before the step's own, or the own one where a source is seen up to it. If some
    are skipped, the second is the last one before it that is not, so that every value of those enters the core. The others
    are the pixels around it: those that the ordering visits later, or that are not there, are not seen.
    """
    visits, rank = torch.tensor(order), ranks(order)
    before = torch.cat([visits[:1], visits[:-1]])
    around, visible = _neighbours(visits, shape, reach)
    visible = visible & (rank[around] < rank[visits, None])
    begun = (torch.arange(len(order)) > 0)[:, None]
    if skipped:
        last, there = _last_active(visits, skipped)
        around, visible = torch.cat([last[:, None], around], 1), torch.cat([there[:, None], visible], 1)
    fields, seen = [], []
    for dependence in dependences:
        up_to = dependence is Dependence.UP_TO
        fields.append(torch.cat([(visits if up_to else before)[:, None], around], 1))
        seen.append(torch.cat([torch.ones_like(begun) if up_to else begun, visible], 1))
    return torch.stack(fields), torch.stack(seen)


def _last_active(visits: Tensor, skipped: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """For each rank the last feature before it that is not skipped, and whether there is one beyond the one just before."""
    ranks, active = torch.arange(len(visits)), ~torch.isin(visits, torch.tensor(skipped))
    latest = torch.where(active, ranks, -1).cummax(0).values.roll(1)
    latest[0] = -1
    return visits[latest.clamp(min=0)], (latest >= 0) & (latest < ranks - 1)


def _neighbours(visits: Tensor, shape: tuple[int, int] | None, reach: int) -> tuple[Tensor, Tensor]:
    """The pixels around each, (D, n), and whether they lie in the image; those that do not are replaced by the pixel."""
    if shape is None or reach == 0:
        return visits.new_zeros(len(visits), 0), torch.zeros(len(visits), 0, dtype=torch.bool)
    rows, columns = shape
    span = range(-reach, reach + 1)
    offsets = torch.tensor([pair for pair in itertools.product(span, span) if pair != (0, 0)])
    row, column = visits[:, None] // columns + offsets[:, 0], visits[:, None] % columns + offsets[:, 1]
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    return torch.where(inside, row * columns + column, visits[:, None]), inside


def coordinates(visits: Tensor, shape: tuple[int, int] | None) -> Tensor:
    """Where each rank lies: (D, 2), its pixel's row and column; or (D, 1), how many were visited before."""
    if shape is None:
        return torch.arange(len(visits))[:, None]
    return torch.stack([visits // shape[1], visits % shape[1]], 1)


def checked_skipped(skipped: Sequence[int], features: int) -> tuple[int, ...]:
    """In increasing order."""
    try:
        given = [operator.index(d) for d in skipped]
    except TypeError:
        raise ModelError(f"skipped is a list of whole numbers, those of features; got {skipped!r}") from None
    names = tuple(sorted(set(given)))
    if len(names) != len(given) or not all(0 <= d < features for d in names):
        raise ModelError(f"skipped names features, from 0 to {features - 1}, once each; got {given}")
    if len(names) == features:
        raise ModelError(
            f"skipped names all {features} features, and at least one must take a step; leave some out"
        )
    return names
