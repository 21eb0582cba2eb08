"""Product spaces of integers, and how numbers for their values lie side by side.

A state is integers (..., D), in the smallest type that holds them; networks embed it themselves. Numbers that belong to the
values of features are packed, so that one wide feature costs what it has and no other is padded to it: features of equal
size lie together, group by group. Two such layouts:

* logits: a log-odds for a feature of two values, and K_d logits otherwise, (..., `flat`). Relaxed states have it too: a bit
  is one number in [0, 1], a category a point of the simplex;
* values: a number for each value of each feature, by group (..., n, K).

Shape legend of the whole package: S samples, B batch, L layers, D features, K categories, U values of u.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from xorflow.errors import ModelError

NEVER = -1e4
"""A log-probability whose exponential is exactly zero in every float type, and which, unlike -inf, gives 0
and not nan when it is multiplied by a zero."""

_MOST_SHOWN = 4
"""Of so many sizes it is shown how many features have each."""


@dataclass(frozen=True)
class Group:
    """The features of one size: which, and where their numbers begin in the layout of logits."""

    size: int
    features: tuple[int, ...]
    first: int

    @property
    def binary(self) -> bool:
        return self.size == 2

    @property
    def each(self) -> int:
        """How many logits a feature has."""
        return 1 if self.binary else self.size

    @property
    def flat(self) -> int:
        """How many logits all of them have."""
        return self.each * len(self.features)

    @property
    def logits(self) -> slice:
        return slice(self.first, self.first + self.flat)


class Alphabet:
    """The sizes K_1..K_D of a product space."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(int(k) for k in sizes)
        if not self.sizes:
            raise ModelError("a model needs at least one feature, and got none")
        if min(self.sizes) < 1:
            raise ModelError(f"every feature needs at least one category, and got {min(self.sizes)}")
        self.features = len(self.sizes)
        self.width = max(self.sizes)
        self.binary = set(self.sizes) == {2}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alphabet) and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __str__(self) -> str:
        if len(self.groups) > _MOST_SHOWN:
            return f"{self.features} of {min(self.sizes)} to {self.width} categories"
        groups = sorted(self.groups, key=lambda group: group.size)
        return ", ".join(f"{len(group.features)} of {group.size}" for group in groups) + " categories"

    def __repr__(self) -> str:
        return f"Alphabet({self})"

    def short(self) -> int | list[int]:
        """The sizes as JSON: one number if all are alike."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else list(self.sizes)

    @property
    def dtype(self) -> torch.dtype:
        """The smallest type that holds the values."""
        return torch.uint8 if self.width <= 2**8 else torch.int16 if self.width <= 2**15 else torch.int32

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Features by size, in the order in which their numbers lie: bits first."""
        of_size: dict[int, list[int]] = {}
        for feature, size in enumerate(self.sizes):
            of_size.setdefault(size, []).append(feature)
        groups: list[Group] = []
        for size in sorted(of_size, key=lambda size: (size != 2, size)):
            groups.append(Group(size, tuple(of_size[size]), groups[-1].logits.stop if groups else 0))
        return tuple(groups)

    def grouped(self, *by_group: Sequence[Any]) -> zip[tuple[Any, ...]]:
        """Each group, and what there is of it."""
        return zip(self.groups, *by_group, strict=True)

    @property
    def flat(self) -> int:
        """How many logits stand for one state."""
        return self.groups[-1].logits.stop

    @cached_property
    def logit_features(self) -> Tensor:
        """Whose each logit is, (flat,)."""
        return torch.cat([torch.tensor(g.features).repeat_interleave(g.each) for g in self.groups])

    @cached_property
    def first_logits(self) -> tuple[int, ...]:
        """Where each feature's logits begin, by feature."""
        first = {d: g.first + n * g.each for g in self.groups for n, d in enumerate(g.features)}
        return tuple(first[d] for d in range(self.features))

    def certain_zero(self) -> Tensor:
        """Packed logits (flat,) that are certain of the value 0."""
        logits = torch.full((self.flat,), NEVER)
        logits[[first for first, size in zip(self.first_logits, self.sizes, strict=True) if size != 2]] = 0
        return logits

    def positions(self, features: Sequence[int]) -> Tensor:
        """Where the packed logits of the space of some `features` (see `of`) lie among all."""
        part = self.of(features)
        firsts = [(self.first_logits[features[n]], g.each) for g in part.groups for n in g.features]
        return torch.cat([torch.arange(first, first + each) for first, each in firsts])

    def integers(self, x: Tensor) -> Tensor:
        """Integers of any type in that of states."""
        return x.to(self.dtype)

    def of(self, features: Sequence[int]) -> Alphabet:
        """The space of some of the features."""
        return Alphabet([self.sizes[d] for d in features])


class Layout(nn.Module):
    """Takes numbers of an alphabet apart by group, and joins them by feature, on the device that it is on.

    With one group, as where all features are bits, these are views.
    """

    visited: Tensor  # the features in the order of groups
    place: Tensor | None  # the inverse of that order, if it is another

    def __init__(self, alphabet: Alphabet) -> None:
        super().__init__()
        self.alphabet = alphabet
        self.counts = [len(group.features) for group in alphabet.groups]
        visited = torch.tensor([d for group in alphabet.groups for d in group.features])
        place = visited.argsort() if len(self.counts) > 1 else None
        add_buffers(self, visited=visited, place=place)

    def logits(self, packed: Tensor) -> list[Tensor]:
        """By group: (..., n) for bits, and otherwise (..., n, K)."""
        by_group = [packed] if self.place is None else [packed[..., g.logits] for g in self.alphabet.groups]
        return [
            part if group.binary else part.unflatten(-1, (len(group.features), group.size))
            for group, part in self.alphabet.grouped(by_group)
        ]

    def packed(self, by_group: Sequence[Tensor]) -> Tensor:
        """The inverse of `logits`."""
        flat = [part if group.binary else part.flatten(-2) for group, part in self.alphabet.grouped(by_group)]
        return flat[0] if len(flat) == 1 else torch.cat(flat, -1)

    def corners(self, integers: Tensor, dtype: torch.dtype) -> Tensor:
        """Integers (..., D) as the corners of relaxed states that they stand for, (..., `flat`)."""
        by_group = self.alphabet.grouped(self.split(integers))
        return self.packed(
            [v.to(dtype) if g.binary else one_hot(v.long(), g.size).to(dtype) for g, v in by_group]
        )

    def split(self, by_feature: Tensor) -> list[Tensor]:
        """Numbers of features (..., D), by group (..., n)."""
        if self.place is None:
            return [by_feature]
        return list(by_feature.index_select(-1, self.visited).split(self.counts, -1))

    def joined(self, by_group: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        return (
            by_group[0] if self.place is None else torch.cat(list(by_group), -1).index_select(-1, self.place)
        )

    def summed(self, packed: Tensor) -> Tensor:
        """The sum of each feature's numbers, (..., D)."""
        by_group = self.alphabet.grouped(self.logits(packed))
        return self.joined([part if group.binary else part.sum(-1) for group, part in by_group])

    def spread(self, by_feature: Tensor) -> Tensor:
        """Numbers of features, for each of their logits, (..., flat)."""
        if self.alphabet.binary:
            return by_feature
        return by_feature.index_select(-1, self.alphabet.logit_features.to(by_feature.device))

    def of(self, features: Sequence[int]) -> Layout:
        """The layout of the space of some features, on the same device."""
        return Layout(self.alphabet.of(features)).to(self.visited.device)

    def features(self) -> Sequence[Tensor]:
        """Those of each group, (n,)."""
        return self.visited.split(self.counts)


def add_buffers(module: nn.Module, **buffers: Tensor | None) -> None:
    """Tensors that follow from the arguments of a module: they go where it goes, and are not saved."""
    for name, tensor in buffers.items():
        module.register_buffer(name, tensor, persistent=False)


def per_feature(sizes: int | Sequence[int], features: int, name: str) -> tuple[int, ...]:
    """One number for all features, or one for each: always as a tuple of D numbers."""
    if features < 1:
        raise ModelError(f"a model needs at least one feature, and got features={features}")
    values = (sizes,) * features if isinstance(sizes, int) else tuple(int(k) for k in sizes)
    if len(values) != features:
        raise ModelError(
            f"{name} is one number or one for each of the {features} features, and has {len(values)} numbers"
        )
    if min(values) < 1:
        raise ModelError(f"{name} must be at least 1, and contains {min(values)}")
    return values


def by_inversion(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Integers (...) drawn with these probabilities (..., K), whose distribution function is inverted at uniforms (...)."""
    below = probabilities.cumsum(-1)[..., :-1]  # the last one is what remains
    return (uniforms.unsqueeze(-1) > below).sum(-1)
