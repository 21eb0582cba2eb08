"""MADE: a multi-layer perceptron whose weights are masked so that the logits of feature d see its predecessors only.

Evaluated block by block of its ordering, as its input becomes known, it takes about one pass in all: what a block adds to later
units is added once, when it is final; inside a block only the few units between its first and last feature are evaluated again.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from xorflow._cuda import devices, kernels
from xorflow.conditioners.base import Conditioner, Dependence, Source
from xorflow.conditioners.linear import Linear, Masked, MaskedLinear, Reader, Table, reset_beside
from xorflow.conditioners.orderings import Order, ranks
from xorflow.errors import ModelError

_WIDEST_KERNEL = 8192
"""The most hidden units whose sums fit into the registers of one program."""


class Perceptron(nn.Module):
    """Linear layers with ReLUs between them, the first of which reads states, and direct connections if they are asked for.

    Args:
        reader: of the first layer, and of direct connections.
        hidden: the widths of the hidden layers.
        outputs: how many there are.
        direct: add connections from what is read to the outputs.
        degrees: of what is read (bits and context, then rows of a table), of each hidden layer, and of the outputs: what has a
            degree sees what has that one or a lower one. All see all by default.
    """

    def __init__(
        self,
        reader: Reader,
        hidden: Sequence[int],
        outputs: int,
        *,
        direct: bool = False,
        degrees: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        if any(width < 1 for width in hidden):
            raise ModelError(f"hidden widths are at least 1, and got {tuple(hidden)}")
        widths = [reader.dense, *hidden, outputs]

        def connect(lower: int, upper: int, bias: bool = True) -> Linear:
            if degrees is None:
                return Linear(widths[lower], widths[upper], bias=bias)
            return MaskedLinear(degrees[upper][:, None] >= degrees[lower][: widths[lower]], bias=bias)

        def look_up(upper: int) -> Table | None:
            if not reader.rows:
                return None
            mask = None if degrees is None else degrees[0][reader.dense :, None] <= degrees[upper]
            return Table(reader, widths[upper], mask)

        self.reader = reader
        self.layers = nn.ModuleList(connect(n, n + 1) for n in range(len(hidden) + 1))
        self.table = look_up(1)
        reset_beside(self.table, self.linear[0])
        self.skip = connect(0, -1, bias=False) if direct else None
        self.skip_table = look_up(-1) if direct else None
        reset_beside(self.skip_table, self.skip)

    @property
    def linear(self) -> list[Linear]:
        """Its layers."""
        return [layer for layer in self.layers if isinstance(layer, Linear)]

    @property
    def bias(self) -> Tensor:
        """Of the outputs."""
        return self.linear[-1].bias

    def forward(self, states: Sequence[Tensor], context: Tensor | None) -> Tensor:
        layers = self.linear
        reading = self.reader(states, context, layers[-1].bias.dtype)
        x = reading.dense
        for layer in layers:
            rectify = layer is not layers[-1]
            if layer is layers[0] and self.table is not None:
                x = layer(x) + self.table(reading)
                x = x.relu_() if rectify else x
            else:
                x = layer(x, rectify=rectify)
        if self.skip is not None:
            x = x + self.skip(reading.dense)
        return x if self.skip_table is None else x + self.skip_table(reading)

    @torch.no_grad()
    def start_linear(self, source: int, slope: Tensor) -> None:
        """Begin at a linear map of one source, (its `flat`, outputs), as far as there is a linear path."""
        shallow = len(self.layers) == 1
        layer, table = (self.linear[0], self.table) if shallow else (self.skip, self.skip_table)
        if layer is None:
            return
        bits, arrange = self.reader.dense_slices[source], self.reader.arrange
        count = bits.stop - bits.start
        columns = torch.zeros_like(layer.weight)
        columns[:, bits] = slope[:count].T.to(columns)
        layer.weight.copy_(columns if arrange is None else columns[:, arrange])
        if isinstance(layer, Masked):
            layer.apply_mask()
        if table is not None:
            table.weight.zero_()
            table.weight[self.reader.row_slices[source]] = slope[count:].to(table.weight)
            table.apply_mask()


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

    rearrange: Tensor | None
    places: Tensor  # where the outputs, which follow the ordering, lie among the packed logits

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
        if Dependence.COUPLED in self.sees.values():
            raise ModelError("MADE sees its inputs by an ordering, not by a mask; use Coupling for a mask")
        self.hidden, self.direct = tuple(hidden), direct and bool(hidden)
        reader, rank = Reader([self.alphabet(source) for source in self.sees], context), self.ranks
        dense = [*self._degrees_of(reader.dense_features), *[0] * context]
        into, arrange = torch.tensor(dense, dtype=torch.int64).sort(stable=True)
        rows = torch.tensor(self._degrees_of(reader.row_features), dtype=torch.int64)
        out, places = rank[self.choices.logit_features].sort(stable=True)
        reader.arrange = _unless_identity(arrange)
        self.register_buffer("rearrange", _unless_identity(places.argsort()), persistent=False)
        self.register_buffer("places", places, persistent=False)
        self.degrees = [self._hidden_degrees(width) for width in self.hidden]
        self.net = Perceptron(
            reader,
            self.hidden,
            self.choices.flat,
            direct=self.direct,
            degrees=[torch.cat([into, rows]), *self.degrees, out],
        )
        # without a hidden unit of degree 0 the first feature would not see the context
        several = context and self.hidden
        self.context_skip = nn.Linear(context, self.choices.flat, bias=False) if several else None

    @property
    def ranks(self) -> Tensor:
        """By feature, how many are visited before it."""
        assert self.order is not None
        return ranks(self.order)

    def _degrees_of(self, inputs: list[tuple[int, int]]) -> list[int]:
        """Of features of sources: the smallest degree of a hidden unit that may see each."""
        rank = self.ranks
        least = {Dependence.BEFORE: rank + 1, Dependence.UP_TO: rank, Dependence.ALL: torch.zeros_like(rank)}
        by_source = [least[dependence].tolist() for dependence in self.sees.values()]
        return [by_source[source][feature] for source, feature in inputs]

    def _hidden_degrees(self, width: int) -> Tensor:
        # degree 0 sees nothing unless an input of degree 0 exists, degree D is read by no output
        lowest = int(self.features > 1 and not {Dependence.UP_TO, Dependence.ALL} & set(self.sees.values()))
        highest = self.features - 1
        return lowest + torch.arange(max(width, 0)) * (highest - lowest + 1) // width

    def forward(self, inputs: Mapping[Source, Tensor], context: Tensor | None = None) -> Tensor:
        states, context = self.states_of(inputs, context)
        out = self.net(states, context)
        if self.rearrange is not None:
            out = out.index_select(-1, self.rearrange)
        if self.context_skip is not None and context is not None:
            out = out + self.context_skip(context.to(out.dtype))
        return out

    @torch.no_grad()
    def start_at(self, logits: Tensor) -> None:
        self.net.bias.copy_(logits[self.places.to(logits.device)])

    def start_linear(self, source: Source, slope: Tensor, level: Tensor) -> None:
        """Begin near a linear map of a source, (its `flat`, that of the choices), as far as there is a linear path."""
        self.net.start_linear(list(self.sees).index(source), slope[:, self.places])
        self.start_at(level)

    def decoder(self, batch: int, context: Tensor | None, block_size: int) -> IncrementalMADE:
        return IncrementalMADE(self, batch, context, block_size)


def _unless_identity(index: Tensor) -> Tensor | None:
    return None if bool((index == torch.arange(len(index))).all()) else index


# ---- block by block ----


@dataclass(frozen=True)
class _Values:
    """A block's values as the first layer takes them: bits and their columns, and rows of the table, (B, n)."""

    bits: Tensor
    columns: slice
    rows: Tensor | None


@dataclass(frozen=True)
class _Units:
    """The units of a layer that a block of features concerns.

    Attributes:
        before: how many see only features before the block.
        inside: one past the last one that a feature of the block reads; of outputs, that is one of them.
        after: how many are final once the block is.
    """

    before: int
    inside: int
    after: int


class IncrementalMADE:
    """One evaluation of a MADE for a batch; for each block call `logits`, then `update` with its final values.

    Values are integers (B, b) in the arrangement of the ordering, logits packed as those of a space of the block's features.

    Args:
        made: the network.
        batch: B.
        context: (B, C) or None.
        size: features in a block.
    """

    def __init__(self, made: MADE, batch: int, context: Tensor | None, size: int) -> None:
        assert made.order is not None
        self._made, self._order, self._context = made, made.order, context
        self.blocks = [slice(i, min(i + size, made.features)) for i in range(0, made.features, size)]
        (source,) = made.sees
        alphabet, choices = made.alphabet(source), made.choices
        sizes = [alphabet.sizes[d] for d in self._order]
        each = [1 if choices.sizes[d] == 2 else choices.sizes[d] for d in self._order]
        self._bits_before = [0, *itertools.accumulate(int(size == 2) for size in sizes)]  # by rank
        self._outputs_before = [0, *itertools.accumulate(each)]
        self._degrees = [degrees.tolist() for degrees in made.degrees]
        net, seen = made.net, made.context_features  # the context comes first, and is seen by all
        self._biases = [layer.bias.detach() for layer in net.linear]
        self._weights = [layer.weight.detach() for layer in net.linear]
        self._skip, self._table, self._skip_table = (
            None if module is None else module.weight.detach()
            for module in (net.skip, net.table, net.skip_table)
        )
        # what is known so far of each unit before its activation
        self._sums = [bias.expand(batch, -1).clone() for bias in self._biases]
        if context is not None:
            context = context.to(self._sums[0].dtype)
            self._sums[0] += linear(context, self._weights[0][:, :seen])
            if made.context_skip is not None:
                self._sums[-1] += linear(context, made.context_skip.weight.detach())[:, made.places]
            if self._skip is not None:
                self._sums[-1] += linear(context, self._skip[:, :seen])
        self._weights[0] = self._weights[0][:, seen:]
        self._skip = None if self._skip is None else self._skip[:, seen:]
        if self._table is not None:  # the row of each feature's first category, by rank; of bits nothing
            rows = [alphabet.first_logits[d] - self._bits_before[-1] for d in self._order]
            self._first_rows = torch.tensor(rows, device=self._table.device)
            self._is_bit = torch.tensor([size == 2 for size in sizes], device=self._table.device)

    def logits(self, block: slice, x: Tensor) -> Tensor:
        """The logits of a block's features, at trial values x (B, b) of the block itself."""
        values, outputs = self._read(block, x), self._outputs(block)
        hidden, columns = None, slice(0)
        for layer, of_block in enumerate(self._units(block)):
            units = slice(of_block.before, of_block.inside)
            hidden = relu(self._added(layer, units, values, hidden, columns))
            columns = units
        out = self._added(-1, outputs, values, hidden, columns)
        if self._skip is not None:
            out = _entered(out, self._skip[outputs], self._skip_table, outputs, values)
        return out if len(self._made.choices.groups) == 1 else out[:, self._packing(block)]

    def update(self, block: slice, x: Tensor) -> None:
        """The block's values are final: add what it determines to all that comes after."""
        values, later = self._read(block, x), slice(self._outputs(block).stop, None)
        hidden, columns = None, slice(0)
        for layer, of_block in enumerate(self._units(block)):
            self._added(layer, slice(of_block.before, None), values, hidden, columns, in_place=True)
            columns = slice(of_block.before, of_block.after)
            hidden = relu(self._sums[layer][:, columns])
        self._added(-1, later, values, hidden, columns, in_place=True)
        if self._skip is not None:
            sums = self._sums[-1][:, later]
            _entered(sums, self._skip[later], self._skip_table, later, values, out=sums)

    def _added(
        self,
        layer: int,
        units: slice,
        values: _Values,
        hidden: Tensor | None,
        columns: slice,
        in_place: bool = False,
    ) -> Tensor:
        """The sums (B, u) of units of a layer, with what values, or the units `columns` of the layer before, add to them."""
        sums, weight = self._sums[layer][:, units], self._weights[layer][units]
        out = sums if in_place else None
        if hidden is None:
            return _entered(sums, weight, self._table, units, values, out)
        return torch.addmm(sums, hidden, weight[:, columns].t(), out=out)

    def _units(self, block: slice) -> list[_Units]:
        """Of each hidden layer, whose degrees ascend."""
        # a unit of degree 0 (D = 1) sees no feature, and is nobody's before the first block's
        return [
            _Units(
                bisect_right(degrees, block.start) if block.start else 0,
                bisect_right(degrees, block.stop - 1),
                bisect_right(degrees, block.stop),
            )
            for degrees in self._degrees
        ]

    def _outputs(self, block: slice) -> slice:
        return slice(self._outputs_before[block.start], self._outputs_before[block.stop])

    def _packing(self, block: slice) -> Tensor:
        """Where the packed logits of the block's features lie among its outputs, which follow the ordering."""
        first = [
            n - self._outputs_before[block.start] for n in self._outputs_before[block.start : block.stop]
        ]
        groups = self._made.choices.of(self._order[block]).groups
        places = [first[n] + k for group in groups for n in group.features for k in range(group.each)]
        return torch.tensor(places, device=self._sums[-1].device)

    def _read(self, block: slice, x: Tensor) -> _Values:
        columns = slice(self._bits_before[block.start], self._bits_before[block.stop])
        dtype = self._sums[0].dtype
        if self._table is None:
            return _Values(x.to(dtype), columns, None)
        bits = self._is_bit[block]
        rows = x[:, ~bits].long() + self._first_rows[block][~bits]
        return _Values(x[:, bits].to(dtype), columns, rows)

    def decode(self, y: Tensor, uniforms: Tensor) -> Tensor | None:
        """x (B, D) from y and noise, in the arrangement of the ordering, by one kernel; None where there is none for it."""
        made = self._made
        fits = self._context is None and self._skip is None and len(made.hidden) == 1
        bits = made.states.binary and made.choices.binary
        if not (fits and bits and devices.usable(uniforms)) or uniforms.dtype != torch.float32:
            return None
        (into, out), (bias, out_bias) = self._weights, self._biases
        if len(bias) > _WIDEST_KERNEL:
            return None
        return kernels.decode_made(y.to(uniforms.dtype), uniforms, into, bias, out, out_bias).to(y.dtype)


def _entered(
    sums: Tensor,
    weight: Tensor,
    table: Tensor | None,
    units: slice,
    values: _Values,
    out: Tensor | None = None,
) -> Tensor:
    """The sums (B, u) with what values add to these units through a layer's rows `weight` and a table's columns."""
    added = torch.addmm(sums, values.bits, weight[:, values.columns].t(), out=out)
    if table is not None and values.rows is not None:
        rows = values.rows
        added += table[:, units].index_select(0, rows.flatten()).unflatten(0, rows.shape).sum(1)
    return added
