"""MADE: a multi-layer perceptron whose weights are masked so that the logits of feature d see its predecessors only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from xorflow.conditioners.base import Dependence, Source
from xorflow.conditioners.embedding import Reader, Table, reset_beside
from xorflow.conditioners.incremental import IncrementalMADE
from xorflow.conditioners.masked import Linear, MaskedLinear, linear_layers
from xorflow.conditioners.mlp import FeedForward
from xorflow.conditioners.orderings import Order, ranks
from xorflow.errors import ModelError


class MADE(FeedForward):
    r"""Masked autoencoder for distribution estimation (Germain et al., 2015) as a conditioner.

    Hidden unit j of degree :math:`m_j` sees the inputs of rank below :math:`m_j` in the ordering, and the logits of the
    feature of rank r see the hidden units of degree at most r. Degrees are spread evenly and ascend with j, and inside the
    network inputs and outputs are arranged in the ordering, so that every mask is a staircase.

    Args:
        features: D.
        hidden: the widths of the hidden layers; may be empty (a masked linear map).
        order: `"natural"`, `"reversed"`, `"random:SEED"` or a permutation.
        categories: K, or K_d for each feature.
        choices: U_d, the number of values of u; as many as categories by default (a shift).
        sees: the inputs, `{"state": "before"}` by default.
        direct: add masked connections from the input to the output.
        context: the number of context features, which every unit sees.

    >>> net = MADE(3, hidden=(8,))
    >>> net({Source.STATE: torch.zeros(5, 3)}).shape
    torch.Size([5, 3])
    """

    rearrange: Tensor | None
    _places: Tensor

    def __init__(
        self,
        features: int,
        hidden: Sequence[int] = (1024,),
        *,
        order: Order = "natural",
        categories: int | Sequence[int] = 2,
        choices: int | Sequence[int] | None = None,
        sees: Mapping[str, str] | None = None,
        direct: bool = False,
        context: int = 0,
    ) -> None:
        super().__init__(
            features, categories=categories, choices=choices, sees=sees, order=order, context=context
        )
        if any(width < 1 for width in hidden):
            raise ModelError(f"hidden widths are at least 1, and got {tuple(hidden)}")
        if Dependence.COUPLED in self.sees.values():
            raise ModelError("MADE sees its inputs by an ordering, not by a mask; use Coupling for a mask")
        self.hidden = tuple(hidden)
        self.reader = Reader([self.alphabet(source) for source in self.sees], context)
        self._build(direct and bool(hidden))

    def _build(self, direct: bool) -> None:
        into, arrange = torch.tensor(self._input_degrees(), dtype=torch.int64).sort(stable=True)
        rows = torch.tensor(self._degrees_of(self.reader.row_features()), dtype=torch.int64)
        out, rearrange = ranks(self._visited)[self.choices.logit_features].sort(stable=True)
        self.reader.arrange = _unless_identity(arrange)
        self.register_buffer("rearrange", _unless_identity(rearrange.argsort()), persistent=False)
        self.register_buffer("_places", rearrange, persistent=False)
        self.degrees = [self._hidden_degrees(width) for width in self.hidden]
        layers: list[nn.Module] = []
        for lower, upper in itertools.pairwise([into, *self.degrees, out]):
            layers += [MaskedLinear(upper[:, None] >= lower[None, :]), nn.ReLU()]
        self.net = nn.Sequential(*layers[:-1])
        self.skip = MaskedLinear(out[:, None] >= into[None, :], bias=False) if direct else None
        # without a hidden unit of degree 0 the first feature would not see the context
        context = self.context_features
        self.context_skip = (
            nn.Linear(context, self.choices.flat, bias=False) if context and self.hidden else None
        )
        self.table = self.skip_table = None
        if self.reader.rows:
            first = [*self.degrees, out][0]
            self.table = Table(self.reader, len(first), rows[:, None] <= first[None, :])
            if direct:
                self.skip_table = Table(self.reader, len(out), rows[:, None] <= out[None, :])
        reset_beside(self.table, self.net[0])
        reset_beside(self.skip_table, self.skip)

    @property
    def stack(self) -> tuple[list[Linear], Table | None]:
        return linear_layers(self.net), self.table

    @property
    def _visited(self) -> tuple[int, ...]:
        assert self.order is not None
        return self.order

    def _degrees_of(self, inputs: list[tuple[int, int]]) -> list[int]:
        """Of features of sources: the smallest degree of a hidden unit that may see each."""
        rank = ranks(self._visited)
        least = {Dependence.BEFORE: rank + 1, Dependence.UP_TO: rank, Dependence.ALL: torch.zeros_like(rank)}
        by_source = [least[dependence].tolist() for dependence in self.sees.values()]
        return [by_source[source][feature] for source, feature in inputs]

    def _input_degrees(self) -> list[int]:
        """Of bits and context."""
        return [*self._degrees_of(self.reader.dense_features()), *[0] * self.context_features]

    def _hidden_degrees(self, width: int) -> Tensor:
        # degree 0 sees nothing unless an input of degree 0 exists, degree D is read by no output
        lowest = int(self.features > 1 and not {Dependence.UP_TO, Dependence.ALL} & set(self.sees.values()))
        highest = self.features - 1
        return lowest + torch.arange(width) * (highest - lowest + 1) // width

    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor:
        states, context = self.states_of(inputs, context)
        out = self.outputs(states, context)
        if self.rearrange is not None:
            out = out.index_select(-1, self.rearrange)
        if self.context_skip is not None and context is not None:
            out = out + self.context_skip(context.to(out.dtype))
        return out

    def arranged(self, logits: Tensor) -> Tensor:
        return logits[..., self._places]

    def decoder(self, batch: int, context: Tensor | None, block_size: int) -> IncrementalMADE:
        return IncrementalMADE(self, batch, context, block_size)


def _unless_identity(index: Tensor) -> Tensor | None:
    return None if bool((index == torch.arange(len(index))).all()) else index
