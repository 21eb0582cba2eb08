"""Several networks as one conditioner: their probabilities are averaged, feature by feature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xorflow._cuda import decoding
from xorflow._math import full_precision, log_mean_exp, mean_log_odds
from xorflow.conditioners.base import Conditioner, Incremental, Source
from xorflow.conditioners.sequence import Walk
from xorflow.errors import ModelError


class Committee(Conditioner):
    r"""The mean of the probabilities of several networks that see the same and have one ordering,

    .. math:: p(u_d \mid \cdot) = \frac1N \sum_n p_n(u_d \mid \cdot).

    What networks with different seeds get wrong differs, and their mean gets less of it wrong: at depth 1, on one base, a
    committee's log-likelihood is at least the mean of its members', image by image. A `Mixture` of the members is better where
    these disagree about whole images, of which each knows a kind; a committee, where they disagree here and there.

    Args:
        members: at least two networks.

    >>> from xorflow.conditioners import MADE
    >>> both = Committee([MADE(3), MADE(3)])
    >>> both({Source.STATE: torch.zeros(5, 3)}).shape
    torch.Size([5, 3])
    """

    valid: Tensor

    def __init__(self, members: Sequence[Conditioner]) -> None:
        _check(members)
        first = members[0]
        super().__init__(
            first.features,
            categories=first.states.sizes,
            choices=first.choices.sizes,
            sees={str(source): str(dependence) for source, dependence in first.sees.items()},
            order=first.order,
            context=first.context_features,
        )
        self.mask = first.mask
        self.register_buffer("valid", self.choices.valid(), persistent=False)
        self.members = nn.ModuleList(members)

    def __iter__(self) -> Iterator[Conditioner]:
        for member in self.members:
            assert isinstance(member, Conditioner)
            yield member

    def __len__(self) -> int:
        return len(self.members)

    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor:
        return self.mean([member(inputs, context) for member in self])

    def mean(self, logits: Sequence[Tensor], features: Tensor | None = None) -> Tensor:
        """The logits of the mean of the probabilities that have these, of all or of some features."""
        each = full_precision(torch.stack(list(logits)))
        if self.choices.binary:
            return mean_log_odds(each)
        absent = ~(self.valid if features is None else self.valid[features])
        logs = torch.log_softmax(each.masked_fill(absent, -torch.inf), -1)
        return log_mean_exp(logs.masked_fill(absent, 0.0), 0)

    def start_at(self, logits: Tensor) -> None:
        for member in self:
            member.start_at(logits)

    def config(self) -> dict[str, Any]:
        """Its members', each with the name of its class; to be built again, they are needed themselves."""
        return {"members": [{"name": type(member).__name__} | member.config() for member in self]}

    def incremental(self, batch: int, context: Tensor | None, block_size: int) -> CommitteeWalk | None:
        """All members side by side along the ordering; None where one of them has no such evaluation."""
        for size in dict.fromkeys((block_size, 1)):
            walks = [member.incremental(batch, context, size) for member in self]
            found = [walk for walk in walks if walk is not None]
            if len(found) < len(walks):
                return None
            if _cut_alike(found):
                return CommitteeWalk(self, found)
        return None


@dataclass(frozen=True)
class Meeting:
    """The features of ranks `first` to `last` - 1, and each member's own block of them."""

    first: int
    last: int
    parts: tuple[Any, ...]


class CommitteeWalk:
    """One evaluation of a committee along its ordering.

    Args:
        net: the committee.
        walks: those of its members, in the same blocks.
    """

    def __init__(self, net: Committee, walks: Sequence[Incremental]) -> None:
        assert net.order is not None
        self._net, self._walks = net, walks
        self._order = torch.tensor(net.order, device=net.valid.device)

    @property
    def blocks(self) -> list[Meeting]:
        together = zip(*(walk.blocks for walk in self._walks), strict=True)
        return [Meeting(parts[0].first, parts[0].last, parts) for parts in together]

    def logits(self, block: Meeting, x: Tensor) -> Tensor:
        """The logits (B, b * O) of the mean of the members' probabilities, at trial values x of the block itself."""
        net, size = self._net, block.last - block.first
        outputs = (walk.logits(part, x) for walk, part in zip(self._walks, block.parts, strict=True))
        features = self._order[block.first : block.last]
        return net.mean([net.shape_logits(out, size) for out in outputs], features).flatten(1)

    def settle(self, block: Meeting, x: Tensor) -> None:
        """The block's values are final."""
        for walk, part in zip(self._walks, block.parts, strict=True):
            walk.settle(part, x)

    def at_once(self, y: Tensor, uniforms: Tensor) -> Tensor | None:
        """x from y and noise, each step one launch for all members; None where none is captured."""
        walks = [walk for walk in self._walks if isinstance(walk, Walk)]
        return decoding.at_once(walks, y, uniforms) if len(walks) == len(self._walks) else None


def _cut_alike(walks: Sequence[Incremental]) -> bool:
    first, *others = [[(block.first, block.last) for block in walk.blocks] for walk in walks]
    return all(other == first for other in others)


def _check(members: Sequence[Conditioner]) -> None:
    if len(members) < 2:
        raise ModelError(
            f"a committee has at least two members, and got {len(members)}; a single network needs no committee"
        )
    first = members[0]
    for number, other in enumerate(members[1:], 2):
        for what, mine, theirs in (
            ("the same features", first.features, other.features),
            ("the same categories", first.states.short(), other.states.short()),
            ("the same choices", first.choices.short(), other.choices.short()),
            ("the same context features", first.context_features, other.context_features),
            ("the same inputs", _seen(first), _seen(other)),
        ):
            if mine != theirs:
                raise ModelError(
                    f"the members of a committee have {what}: member 1 has {mine}, and member {number} has {theirs}"
                )
        if other.order != first.order or not _same_mask(first.mask, other.mask):
            raise ModelError(
                f"the members of a committee have one ordering, and that of member {number} is not that of member 1; flows in "
                "different orderings can be mixed: see Mixture"
            )


def _seen(network: Conditioner) -> dict[str, str]:
    return {str(source): str(dependence) for source, dependence in network.sees.items()}


def _same_mask(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
