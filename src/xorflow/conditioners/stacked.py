r"""Several conditioners of one ordering, whose logits are weighed and added up.

.. math:: \text{logits}_d(x) = \sum_m w_{m,d}\, \text{logits}_{m,d}(x), \qquad w_{m,d} > 0

A product of the members' conditionals, normalised feature by feature: exact where they are, and often better than each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from xorflow._states import add_buffers
from xorflow.conditioners.base import BySource, Conditioner, Incremental
from xorflow.errors import ModelError


class Stacked(Conditioner):
    """The weighted sum of several conditioners' logits; weights are positive, one for each member and feature.

    They begin equal, with a sum of one, and learn by gradients, as the members do that have weights.

    Args:
        members: conditioners that see the same in the same ordering, such as `BoostedTrees` and a `MADE`.

    >>> from xorflow import MADE
    >>> from xorflow.conditioners import Source
    >>> net = Stacked([MADE(3, (8,)), MADE(3, (4,))])
    >>> net({Source.STATE: torch.zeros(5, 3)}).shape
    torch.Size([5, 3])
    """

    def __init__(self, members: Sequence[Conditioner]) -> None:
        if not members:
            raise ModelError("at least one conditioner is stacked, and none was given")
        first = members[0]
        super().__init__(first.features, **first.declared())
        for number, member in enumerate(members, 1):
            if _rules(member) != _rules(first) or member.order is None:
                raise ModelError(
                    "stacked conditioners have one ordering, and the same categories, choices, inputs and context; member "
                    f"{number} has others than the first: {member!r}, and {first!r}"
                )
        self.members = nn.ModuleList(members)
        start = torch.full((len(members), self.features), 1 / len(members))
        self.log_weights = nn.Parameter(start.log())
        add_buffers(self, owners=self.choices.logit_features)

    owners: Tensor

    def __iter__(self) -> Iterator[Conditioner]:
        for member in self.members:
            assert isinstance(member, Conditioner)
            yield member

    def weights(self) -> Tensor:
        """Of each member at each feature, (M, D)."""
        return self.log_weights.exp()

    def forward(self, inputs: BySource, context: Tensor | None = None) -> Tensor:
        each = [member(inputs, context) for member in self]
        weights = self.weights().index_select(-1, self.owners)
        weighed: list[Tensor] = [weight * logits for weight, logits in zip(weights, each, strict=True)]
        return sum(weighed[1:], start=weighed[0])

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
        super().__init__(net)
        self._members, self._weights = members, net.weights().detach()

    def logits(self, block: slice, x: Tensor) -> Tensor:
        weights = self._weights[:, self.order[block.start]]
        each = zip(weights, self._members, strict=True)
        return torch.stack([weight * member.logits(block, x) for weight, member in each]).sum(0)

    def update(self, block: slice, x: Tensor) -> None:
        for member in self._members:
            member.update(block, x)
