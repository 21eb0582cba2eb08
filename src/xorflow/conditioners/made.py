"""MADE: a multi-layer perceptron whose weights are masked so that the logits of feature d see its predecessors only.

Evaluated block by block of its ordering, as its input becomes known, it takes about one pass in all: what a block adds to later
units is added once, when it is final; inside a block only the few units between its first and last feature are evaluated again.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from xorflow import _devices as devices
from xorflow._cuda import kernels
from xorflow._states import add_buffers
from xorflow.conditioners.base import BySource, Conditioner, Dependence, Incremental, Sizes, Source
from xorflow.conditioners.linear import Dropout, InputLayer, MaskedLinear, Reader
from xorflow.conditioners.orderings import Order, ranks
from xorflow.errors import ModelError

_WIDEST_KERNEL = 8192
"""The most hidden units whose sums fit into the registers of one program."""


class Perceptron(nn.Module):
    """Linear layers with ReLUs between them, the first of which reads states, and direct connections if they are asked for.

    Inside, inputs and outputs are arranged by degree, so that with ascending degrees of hidden units every mask is a staircase.

    Args:
        reader: of the first layer, and of direct connections.
        hidden: the widths of the hidden layers.
        outputs: how many there are.
        direct: add connections from what is read to the outputs.
        degrees: of the inputs, of each hidden layer, and of the outputs: what has a degree sees what has that one or a lower
            one, and the context. All see all by default.
        dropout: the share of hidden units left out in training.
        input_dropout: the share of states left out there.
    """

    places: Tensor  # of the outputs as they are arranged
    rearrange: Tensor | None

    def __init__(
        self,
        reader: Reader,
        hidden: Sequence[int],
        outputs: int,
        *,
        direct: bool = False,
        degrees: Sequence[Tensor] | None = None,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout, self.input_dropout = Dropout(dropout), Dropout(input_dropout)
        if any(width < 1 for width in hidden):
            raise ModelError(f"hidden widths are at least 1, and got {tuple(hidden)}")
        whole = degrees is None
        if degrees is None:
            degrees = [torch.zeros(width) for width in (reader.dense + reader.rows, *hidden, outputs)]
        inputs, *between, out = degrees
        dense, arrange = inputs[: reader.dense].sort(stable=True)
        out, places = out.sort(stable=True)
        self.reader, reader.arrange = reader, _unless_identity(arrange)
        add_buffers(self, places=places, rearrange=_unless_identity(places.argsort()))
        self.degrees = [dense, *between, out]
        inputs = torch.cat([dense, inputs[reader.dense :]])
        first, *masks = (
            upper[:, None] >= lower for lower, upper in itertools.pairwise([inputs, *between, out])
        )
        self.layers = nn.ModuleList([InputLayer(first, reader.dense), *map(MaskedLinear, masks)])
        self.entry.add_table(first)
        self.skip = None
        if direct and hidden:
            across = out[:, None] >= inputs
            self.skip = InputLayer(across, reader.dense, bias=False)
            self.skip.add_table(across)
        # without a hidden unit of degree 0 the first outputs would not see the context
        needs_skip = reader.context and hidden and not whole
        self.context_skip = nn.Linear(reader.context, outputs, bias=False) if needs_skip else None

    @property
    def linear(self) -> list[MaskedLinear]:
        """Its layers."""
        return [layer for layer in self.layers if isinstance(layer, MaskedLinear)]

    @property
    def entry(self) -> InputLayer:
        """The first layer."""
        entry = self.layers[0]
        assert isinstance(entry, InputLayer)
        return entry

    def forward(self, states: Sequence[Tensor], context: Tensor | None) -> Tensor:
        first, *others = self.layers
        dtype = self.entry.weight.dtype
        if self.input_dropout.share:  # of a category its one number that is not zero
            corners = zip(states, self.reader.layouts, strict=True)
            states = [
                self.input_dropout(x if x.is_floating_point() else layout.corners(x, dtype))  # pyright: ignore[reportCallIssue]
                for x, layout in corners
            ]
        inputs = self.reader(states, context, dtype)
        x = first(inputs, rectify=bool(others))
        for layer in others:
            x = layer(self.dropout(x), rectify=layer is not others[-1])
        x = x if self.skip is None else x + self.skip(inputs)
        x = x if self.rearrange is None else x.index_select(-1, self.rearrange)
        if self.context_skip is not None and context is not None:
            x = x + self.context_skip(context.to(dtype))
        return x

    @torch.no_grad()
    def start_at(self, outputs: Tensor) -> None:
        """Set the biases of the outputs."""
        self.linear[-1].bias.copy_(outputs[self.places.to(outputs.device)])

    @torch.no_grad()
    def start_linear(self, source: int, slope: Tensor) -> None:
        """Begin at a linear map of one source, (its `flat`, outputs), as far as there is a linear path."""
        layer, reader = self.entry if len(self.layers) == 1 else self.skip, self.reader
        if layer is None:
            return
        weights = torch.zeros(len(self.places), reader.dense + reader.rows).to(layer.weight)
        weights[:, reader.context + reader.positions(source)] = slope.T[self.places].to(weights)
        if reader.arrange is not None:
            weights[:, : reader.dense] = weights[:, reader.arrange]
        layer.set_weights(weights)


def _unless_identity(index: Tensor) -> Tensor | None:
    return None if bool((index == torch.arange(len(index))).all()) else index


class FeedForward(Conditioner):
    """A conditioner that is a perceptron."""

    net: Perceptron

    def forward(self, inputs: BySource, context: Tensor | None = None) -> Tensor:
        return self.net(*self.states_of(inputs, context))

    def start_at(self, logits: Tensor) -> None:
        self.net.start_at(logits)

    def start_linear(self, source: Source, slope: Tensor, level: Tensor) -> None:
        """Begin near a linear map of a source, (its `flat`, that of the choices), as far as there is a linear path."""
        self.net.start_linear(list(self.sees).index(source), slope)
        self.net.start_at(level)


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
        dropout: the share of hidden units left out in training.
        input_dropout: the share of inputs left out there.

    >>> from xorflow.conditioners import Source
    >>> net = MADE(3, hidden=(8,))
    >>> net({Source.STATE: torch.zeros(5, 3)}).shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        features: int,
        hidden: Sequence[int] = (1024,),
        *,
        order: Order = "natural",
        categories: Sizes = 2,
        choices: Sizes | None = None,
        sees: Mapping[str, str] | None = None,
        direct: bool = False,
        context: int = 0,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            features, categories=categories, choices=choices, sees=sees, order=order, context=context
        )
        if Dependence.COUPLED in self.sees.values():
            raise ModelError("MADE sees its inputs by an ordering, not by a mask; use Coupling for a mask")
        self.hidden, self.direct = tuple(hidden), direct and bool(hidden)
        reader, rank = Reader([self.alphabet(source) for source in self.sees], context), ranks(self.visited)
        # the smallest degree of a unit that may see each input
        least = {
            Dependence.BEFORE: rank + 1,
            Dependence.UP_TO: rank,
            Dependence.ALL: torch.zeros_like(rank),
        }
        of_features = torch.cat([least[dependence] for dependence in self.sees.values()])
        inputs = torch.cat([rank.new_zeros(context), of_features[reader.alphabet.logit_features]])
        outputs = rank[self.choices.logit_features]
        degrees = [inputs, *map(self._hidden_degrees, self.hidden), outputs]
        self.dropout, self.input_dropout = dropout, input_dropout
        self.net = Perceptron(
            reader,
            self.hidden,
            len(outputs),
            direct=self.direct,
            degrees=degrees,
            dropout=dropout,
            input_dropout=input_dropout,
        )

    def _hidden_degrees(self, width: int) -> Tensor:
        # degree 0 sees nothing unless an input of degree 0 exists, degree D is read by no output
        lowest = int(self.features > 1 and not {Dependence.UP_TO, Dependence.ALL} & set(self.sees.values()))
        highest = self.features - 1
        return lowest + torch.arange(max(width, 0)) * (highest - lowest + 1) // width

    def decoder(self, batch: int, context: Tensor | None, block_size: int) -> IncrementalMADE:
        return IncrementalMADE(self, batch, context, block_size)


# ---- block by block ----

_Values = tuple[Tensor, slice, Tensor | None]
"""What is new to the first layer: numbers, and their columns; and rows of its table, (B, n)."""


class IncrementalMADE(Incremental):
    """One evaluation of a MADE for a batch; for each block call `logits`, then `update` with its final values.

    Values are integers (B, b) in the arrangement of the ordering, logits packed as those of a space of the block's features.

    Args:
        made: the network.
        batch: B.
        context: (B, C) or None.
        size: features in a block.
    """

    @torch.no_grad()
    def __init__(self, made: MADE, batch: int, context: Tensor | None, size: int) -> None:
        super().__init__(made, size)
        self._made, self._context = made, context
        self._degrees = [degrees.tolist() for degrees in made.net.degrees]
        self._weights = [layer.weight.detach() for layer in made.net.linear]
        self._entry = _weights_of(made.net.entry)
        self._skip = None if made.net.skip is None else _weights_of(made.net.skip)
        self._last = len(self._weights)
        # what is known so far of each unit before its activation
        self._sums = [layer.bias.expand(batch, -1).clone() for layer in made.net.linear]
        alphabet = made.net.reader.alphabet
        sizes = torch.tensor([alphabet.sizes[d] for d in self.order], device=self._sums[0].device)
        self._is_bit = sizes == 2
        firsts = torch.tensor([alphabet.first_logits[d] for d in self.order], device=sizes.device)
        self._first_rows = firsts - self._is_bit.sum()
        if context is None:
            context = self._sums[0].new_empty(batch, 0)
        elif made.net.context_skip is not None:
            self._sums[-1] += made.net.context_skip(context.to(self._sums[-1].dtype))[:, made.net.places]
        known = slice(0, self._reached(0, 0))  # of degree 0, like a feature before the first
        self._update(-1, 0, (context.to(self._sums[0].dtype), known, None))

    def _reached(self, level: int, degree: int) -> int:
        """How many units of a layer, whose degrees ascend, have that one or a lower one; level 0 are the dense inputs."""
        return bisect_right(self._degrees[level], degree)

    def logits(self, block: slice, x: Tensor) -> Tensor:
        """The logits of a block's features, at trial values x (B, b) of the block itself."""
        values, below = self._read(block, x), None
        for level in range(1, self._last):
            units = slice(self._reached(level, block.start), self._reached(level, block.stop - 1))
            below = relu(self._entered(level, units, values, below)), units
        units = slice(self._reached(self._last, block.start - 1), self._reached(self._last, block.stop - 1))
        out = self._entered(self._last, units, values, below)
        if len(self._made.choices.groups) == 1:
            return out
        packed = self._made.choices.of(self.order[block]).logit_features
        return out[:, packed.argsort(stable=True).argsort().to(out.device)]

    def update(self, block: slice, x: Tensor) -> None:
        """The block's values are final: add what it determines to all that comes after."""
        self._update(block.start, block.stop, self._read(block, x))

    def _update(self, start: int, stop: int, values: _Values) -> None:
        below = None
        for level in range(1, self._last + 1):
            first = self._reached(level, stop - 1 if level == self._last else start)
            units = slice(first, None)
            self._entered(level, units, values, below, in_place=True)
            final = slice(first, self._reached(level, stop))
            below = relu(self._sums[level - 1][:, final]), final

    def _entered(
        self,
        level: int,
        units: slice,
        values: _Values,
        below: tuple[Tensor, slice] | None,
        in_place: bool = False,
    ) -> Tensor:
        """The sums (B, u) of units of a layer, with what the values add to them, or the units of the layer below."""
        sums = self._sums[level - 1][:, units]
        out = sums if in_place else None
        if below is None:
            added = _read_into(sums, self._entry, units, values, out)
        else:
            hidden, columns = below
            added = torch.addmm(sums, hidden, self._weights[level - 1][units, columns].t(), out=out)
        if level == self._last and self._skip is not None:
            _read_into(added, self._skip, units, values, added)
        return added

    def _read(self, block: slice, x: Tensor) -> _Values:
        columns = slice(self._reached(0, block.start), self._reached(0, block.stop))
        dtype, rows = self._sums[0].dtype, None
        if self._entry[1] is not None:
            bits = self._is_bit[block]
            rows = x[:, ~bits].long() + self._first_rows[block][~bits]
            x = x[:, bits]
        return x.to(dtype), columns, rows

    def decode(self, y: Tensor, uniforms: Tensor) -> Tensor | None:
        """x (B, D) from y and noise, in the arrangement of the ordering, by one kernel; None where there is none for it."""
        made = self._made
        fits = self._context is None and made.net.skip is None and len(made.hidden) == 1
        bits = made.states.binary and made.choices.binary
        if not (fits and bits and devices.has_kernels(uniforms.device)) or uniforms.dtype != torch.float32:
            return None
        if made.hidden[0] > _WIDEST_KERNEL:
            return None
        (into, out), (bias, out_bias) = self._weights, (layer.bias.detach() for layer in made.net.linear)
        return kernels.decode_made(y.to(uniforms.dtype), uniforms, into, bias, out, out_bias).to(y.dtype)


_Weights = tuple[Tensor, Tensor | None]
"""A layer's, and its table's."""


def _weights_of(layer: InputLayer) -> _Weights:
    return layer.weight.detach(), None if layer.table is None else layer.table.weight.detach()


def _read_into(sums: Tensor, weights: _Weights, units: slice, values: _Values, out: Tensor | None) -> Tensor:
    """The sums (B, u) of some units of a layer with what values add to them."""
    (weight, table), (dense, columns, rows) = weights, values
    added = torch.addmm(sums, dense, weight[units, columns].t(), out=out)
    if table is not None and rows is not None:
        added += table[:, units].index_select(0, rows.flatten()).unflatten(0, rows.shape).sum(1)
    return added
