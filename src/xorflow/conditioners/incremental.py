r"""A MADE evaluated block by block of its ordering, as its input becomes known.

What a block of features adds to every later unit is added once, when the block is final; inside a block only the few units
that lie between its first and its last feature are evaluated again. All blocks together cost about one pass of the network.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from xorflow._cuda import devices, kernels
from xorflow.conditioners.masked import linear_layers

if TYPE_CHECKING:
    from xorflow.conditioners.made import MADE

_WIDEST_KERNEL = 8192
"""The most hidden units whose sums fit into the registers of one program."""


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
        layers, seen = (
            linear_layers(made.net),
            made.context_features,
        )  # the context comes first, and is seen by all
        self._biases = [layer.bias.detach() for layer in layers]
        self._weights = [layer.weight.detach() for layer in layers]
        self._skip = None if made.skip is None else made.skip.weight.detach()
        # what is known so far of each unit before its activation
        self._sums = [bias.expand(batch, -1).clone() for bias in self._biases]
        if context is not None:
            context = context.to(self._sums[0].dtype)
            self._sums[0] += linear(context, self._weights[0][:, :seen])
            if made.context_skip is not None:
                self._sums[-1] += made.arranged(linear(context, made.context_skip.weight.detach()))
            if self._skip is not None:
                self._sums[-1] += linear(context, self._skip[:, :seen])
        self._weights[0] = self._weights[0][:, seen:]
        self._skip = None if self._skip is None else self._skip[:, seen:]
        self._table = None if made.table is None else made.table.weight.detach()
        self._skip_table = None if made.skip_table is None else made.skip_table.weight.detach()
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
