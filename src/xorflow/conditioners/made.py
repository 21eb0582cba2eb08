"""MADE: a multi-layer perceptron whose weights are masked so that the logits of feature d see its predecessors only."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from xorflow.conditioners.base import Conditioner, Dependence, Source
from xorflow.conditioners.embedding import Reader, Table, reset_beside, start_linear
from xorflow.conditioners.incremental import IncrementalMADE, cut_into_blocks
from xorflow.conditioners.masked import MaskedLinear, through
from xorflow.conditioners.orderings import Order, ranks, resolve_order
from xorflow.errors import ModelError


class MADE(Conditioner):
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

    arrange: Tensor | None
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
            features,
            categories=categories,
            choices=choices,
            sees=sees or {"state": "before"},
            order=resolve_order(order, features),
            context=context,
        )
        if any(width < 1 for width in hidden):
            raise ModelError(f"hidden widths are at least 1, and got {tuple(hidden)}")
        if Dependence.COUPLED in self.sees.values():
            raise ModelError("MADE sees its inputs by an ordering, not by a mask; use Coupling for a mask")
        self.hidden = tuple(hidden)
        self._order_as_given = order if isinstance(order, str) else list(resolve_order(order, features))
        self._build(direct)

    def _build(self, direct: bool) -> None:
        self.reader = Reader([self.alphabet(source) for source in self.sees], self.context_features)
        into, arrange = self._input_degrees().sort(stable=True)
        rows = self._row_degrees()
        out, rearrange = self._output_degrees().sort(stable=True)
        self.register_buffer("arrange", _unless_identity(arrange), persistent=False)
        self.register_buffer("rearrange", _unless_identity(rearrange.argsort()), persistent=False)
        self.register_buffer("_places", rearrange, persistent=False)
        layers: list[nn.Module] = []
        self._degrees: list[Tensor] = []
        degrees = into
        for width in self.hidden:
            upper = self._hidden_degrees(width)
            layers += [MaskedLinear(upper[:, None] >= degrees[None, :]), nn.ReLU()]
            degrees = upper
            self._degrees.append(upper)
        layers.append(MaskedLinear(out[:, None] >= degrees[None, :]))
        self.net = nn.Sequential(*layers)
        first = self._degrees[0] if self.hidden else out
        skips = direct and bool(self.hidden)
        self.skip = MaskedLinear(out[:, None] >= into[None, :], bias=False) if skips else None
        # without a hidden unit of degree 0 the first feature would not see the context
        context = self.context_features
        self.context_skip = (
            nn.Linear(context, self.choices.flat, bias=False) if context and self.hidden else None
        )
        self.table = self.skip_table = None
        if self.reader.rows:
            self.table = Table(self.reader, len(first), rows[:, None] <= first[None, :])
            if skips:
                self.skip_table = Table(self.reader, len(out), rows[:, None] <= out[None, :])
        assert isinstance(layers[0], MaskedLinear)
        reset_beside(self.table, layers[0])
        reset_beside(self.skip_table, self.skip)

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "hidden": list(self.hidden),
            "order": self._order_as_given,
            "sees": {str(source): str(dependence) for source, dependence in self.sees.items()},
            "direct": self.skip is not None,
        }

    def _least_degrees(self) -> list[Tensor]:
        """By source and feature: the smallest degree of a hidden unit that may see it."""
        assert self.order is not None
        rank = ranks(self.order)
        least = {Dependence.BEFORE: rank + 1, Dependence.UP_TO: rank, Dependence.ALL: torch.zeros_like(rank)}
        return [least[dependence] for dependence in self.sees.values()]

    def _input_degrees(self) -> Tensor:
        """Of bits and context."""
        least = self._least_degrees()
        bits = [int(least[source][feature]) for source, feature in self.reader.dense_features()]
        return torch.tensor([*bits, *[0] * self.context_features], dtype=torch.int64)

    def _row_degrees(self) -> Tensor:
        """Of the categories' rows."""
        least = self._least_degrees()
        rows = [int(least[source][feature]) for source, feature in self.reader.row_features()]
        return torch.tensor(rows, dtype=torch.int64)

    def _hidden_degrees(self, width: int) -> Tensor:
        # degree 0 sees nothing unless an input of degree 0 exists, degree D is read by no output
        lowest = int(self.features > 1 and not {Dependence.UP_TO, Dependence.ALL} & set(self.sees.values()))
        highest = self.features - 1
        return lowest + torch.arange(width) * (highest - lowest + 1) // width

    def _output_degrees(self) -> Tensor:
        assert self.order is not None
        return ranks(self.order)[self.choices.logit_features]

    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor:
        states, context = self.states_of(inputs, context)
        reading = self.reader(states, context, self.net[0].weight.dtype)
        dense = reading.dense if self.arrange is None else reading.dense.index_select(-1, self.arrange)
        out = through(self.net, dense, None if self.table is None else self.table(reading))
        if self.skip is not None:
            out = out + self.skip(dense)
        if self.skip_table is not None:
            out = out + self.skip_table(reading)
        if self.rearrange is not None:
            out = out.index_select(-1, self.rearrange)
        if self.context_skip is not None and context is not None:
            out = out + self.context_skip(context.to(out.dtype))
        return out

    def incremental(self, batch: int, context: Tensor | None, block_size: int) -> IncrementalMADE | None:
        """An evaluation block by block of the ordering; None if the logits see more than one state strictly before d."""
        if list(self.sees.values()) != [Dependence.BEFORE] or Source.OWN in self.sees:
            return None
        self._check_context(context)
        terms = None
        if context is not None:
            first, c = self.net[0], self.context_features
            assert isinstance(first, MaskedLinear)
            context = context.to(first.weight.dtype).expand(batch, c)
            through_skip = None if self.skip is None else linear(context, self.skip.weight[:, :c])
            out = context.new_zeros(batch, self.choices.flat)
            if self.context_skip is not None:
                out = self.context_skip(context)[:, self._places]
            terms = linear(context, first.weight[:, :c]), out, through_skip
        cut = functools.partial(cut_into_blocks, self.features, self._degrees, block_size)
        return IncrementalMADE(self, terms, cut, batch)

    @torch.no_grad()
    def start_at(self, logits: Tensor) -> None:
        last = self.net[-1]
        assert isinstance(last, MaskedLinear)
        last.bias.copy_(logits.to(last.bias)[self._places])

    @torch.no_grad()
    def start_linear(self, source: Source, slope: Tensor, level: Tensor) -> None:
        """Begin near a linear map of a source, (its `flat`, that of the choices), as far as the ordering lets it."""
        if self.skip is not None or not self.hidden:
            dense, table = (self.skip, self.skip_table) if self.hidden else (self.net[0], self.table)
            assert isinstance(dense, MaskedLinear)
            start_linear(
                self.reader, list(self.sees).index(source), slope[:, self._places], dense, table, self.arrange
            )
        self.start_at(level)


def _unless_identity(index: Tensor) -> Tensor | None:
    return None if bool((index == torch.arange(len(index))).all()) else index
