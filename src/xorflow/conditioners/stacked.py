r"""Several conditioners of one ordering, whose logits are weighed and added up.

.. math:: \text{logits}_d(x) = \sum_m w_{m,d}\, \text{logits}_{m,d}(x), \qquad w_{m,d} > 0

A product of the members' conditionals, normalised feature by feature: exact where they are, and often better than each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from xorflow.conditioners.base import Conditioner, Incremental, Source
from xorflow.errors import ModelError


class Stacked(Conditioner):
    """The weighted sum of several conditioners' logits; weights are positive, one for each member and feature.

    They begin equal, with a sum of one, and learn by gradients, as the members do that have weights.

    Args:
        members: conditioners that see the same in the same ordering, such as `BoostedTrees` and a `MADE`.

    >>> from xorflow import MADE
    >>> net = Stacked([MADE(3, (8,)), MADE(3, (4,))])
    >>> net({Source.STATE: torch.zeros(5, 3)}).shape
    torch.Size([5, 3])
    """

    def __init__(self, members: Sequence[Conditioner]) -> None:
        if not members:
            raise ModelError("at least one conditioner is stacked, and none was given")
        first = members[0]
        super().__init__(
            first.features,
            categories=first.states.sizes,
            choices=first.choices.sizes,
            sees={str(source): str(dependence) for source, dependence in first.sees.items()},
            order=first.order,
            context=first.context_features,
        )
        for number, member in enumerate(members, 1):
            if _rules(member) != _rules(first) or member.order is None:
                raise ModelError(
                    "stacked conditioners have one ordering, and the same categories, choices, inputs and context; member "
                    f"{number} has others than the first: {member!r}, and {first!r}"
                )
        self.members = nn.ModuleList(members)
        start = torch.full((len(members), self.features), 1 / len(members))
        self.log_weights = nn.Parameter(start.log())
        self.register_buffer("owners", self.choices.logit_features, persistent=False)

    owners: Tensor

    def __iter__(self) -> Iterator[Conditioner]:
        for member in self.members:
            assert isinstance(member, Conditioner)
            yield member

    def weights(self) -> Tensor:
        """Of each member at each feature, (M, D)."""
        return self.log_weights.exp()

    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor:
        return self.weighed([member(inputs, context) for member in self])

    def weighed(self, logits: Sequence[Tensor]) -> Tensor:
        """The sum of the members' logits (..., flat), each by its weight."""
        weights = self.weights().index_select(-1, self.owners)
        total = weights[0] * logits[0]
        for weight, of_member in zip(weights[1:], logits[1:], strict=True):
            total = total + weight * of_member
        return total

    def start_at(self, logits: Tensor) -> None:
        for member in self:
            member.start_at(logits)

    def decoder(self, batch: int, context: Tensor | None, block_size: int) -> Incremental | None:
        del block_size  # members may have blocks of their own, but for those of one feature
        decoders = [member.decoder(batch, context, 1) for member in self]
        incremental = [decoder for decoder in decoders if decoder is not None]
        return _IncrementalStack(self, incremental) if len(incremental) == len(decoders) else None


def _rules(member: Conditioner) -> tuple[object, ...]:
    """What is the same for all members."""
    return member.order, member.states, member.choices, member.sees, member.context_features


class _IncrementalStack(Incremental):
    def __init__(self, net: Stacked, members: Sequence[Incremental]) -> None:
        self.blocks = [slice(rank, rank + 1) for rank in range(net.features)]
        assert net.order is not None
        self._members, self._order, self._weights = members, net.order, net.weights().detach()

    def logits(self, block: slice, x: Tensor) -> Tensor:
        weights = self._weights[:, self._order[block.start]]
        each = zip(weights, self._members, strict=True)
        return torch.stack([weight * member.logits(block, x) for weight, member in each]).sum(0)

    def update(self, block: slice, x: Tensor) -> None:
        for member in self._members:
            member.update(block, x)
