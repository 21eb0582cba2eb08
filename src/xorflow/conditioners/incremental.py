r"""A MADE evaluated block by block of its ordering, as its input becomes known.

What a block of features adds to every later unit is added once, when the block is final; inside a block only the few units
that lie between its first and its last feature are evaluated again. All blocks together cost about one pass of the network.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import relu

from xorflow._cuda import devices, kernels
from xorflow._states import Alphabet
from xorflow.conditioners.masked import MaskedLinear

if TYPE_CHECKING:
    from xorflow.conditioners.made import MADE

_WIDEST_KERNEL = 8192
"""The most hidden units whose sums fit into the registers of one program."""


@dataclass(frozen=True)
class Block:
    """The features of ranks `first` to `last` - 1, and in each hidden layer the units that only they can still change.

    Attributes:
        first: the first rank.
        last: one past the last rank.
        before: for each hidden layer, how many units see only features before the block.
        inside: for each hidden layer, one past the last unit that a feature of the block's rank reads.
        after: for each hidden layer, how many units are final once the block is.
    """

    first: int
    last: int
    before: tuple[int, ...]
    inside: tuple[int, ...]
    after: tuple[int, ...]


def cut_into_blocks(features: int, degrees: Sequence[Tensor], size: int) -> list[Block]:
    """Blocks of `size` features; `degrees` are those of each hidden layer, ascending."""
    ascending = [d.tolist() for d in degrees]

    def count(most: int) -> tuple[int, ...]:
        return tuple(bisect_right(d, most) for d in ascending)

    edges = [*range(0, features, size), features]
    # a unit of degree 0 (D = 1) sees no feature, and is nobody's before the first block's
    none = (0,) * len(ascending)
    return [
        Block(i, j, count(i) if i else none, count(j - 1), count(j)) for i, j in itertools.pairwise(edges)
    ]


@dataclass(frozen=True)
class _Values:
    """A block's values as the first layer takes them: bits and their columns, and rows of the table, (B, n)."""

    bits: Tensor
    columns: slice
    rows: Tensor | None


class IncrementalMADE:
    """One evaluation of a MADE for a batch; for each block call `logits`, then `update` with its final values.

    Values are integers (B, b) in the arrangement of the ordering, logits packed as those of a space of the block's features.

    Args:
        made: the network.
        context_terms: what the context adds to the first layer (B, H) and to the output (B, O), or None.
        cut: makes the blocks, when they are first asked for: a kernel for all features needs none.
        batch: B.
    """

    def __init__(
        self,
        made: MADE,
        context_terms: tuple[Tensor, Tensor, Tensor | None] | None,
        cut: Callable[[], list[Block]],
        batch: int,
    ) -> None:
        layers = [layer for layer in made.net if isinstance(layer, MaskedLinear)]
        assert made.order is not None
        self._cut, self._order = cut, made.order
        self._blocks: list[Block] | None = None
        self._states, self._choices = made.states, made.choices
        (source,) = made.sees
        sizes = [made.alphabet(source).sizes[d] for d in self._order]
        self._bits_before = [0, *itertools.accumulate(int(size == 2) for size in sizes)]  # by rank
        self._outputs_before = [
            0, *itertools.accumulate(1 if made.choices.sizes[d] == 2 else made.choices.sizes[d] for d in self._order)
        ]  # fmt: skip
        context = layers[0].in_features - self._bits_before[-1]
        self._weights = [layer.weight.detach() for layer in layers]
        self._weights[0] = self._weights[0][:, context:]
        self._table = None if made.table is None else made.table.weight.detach()
        self._skip = None if made.skip is None else made.skip.weight.detach()[:, context:]
        self._skip_table = None if made.skip_table is None else made.skip_table.weight.detach()
        self._first_rows = None if made.table is None else self._rows_by_rank(made.alphabet(source), sizes)
        self._has_context = context_terms is not None
        self._biases = [layer.bias.detach() for layer in layers]
        # what is known so far of each unit before its activation
        self._sums = [layer.bias.detach().expand(batch, -1).clone() for layer in layers]
        if context_terms is not None:
            first, out, through_skip = context_terms
            self._sums[0] += first
            self._sums[-1] += out
            if through_skip is not None:
                self._sums[-1] += through_skip

    def _rows_by_rank(self, alphabet: Alphabet, sizes: Sequence[int]) -> Tensor:
        """The row of each feature's first category; of bits nothing."""
        bits = sum(size == 2 for size in sizes)
        rows = [alphabet.first_logits[d] - bits for d in self._order]
        return torch.tensor(rows, device=self._weights[0].device)

    @property
    def blocks(self) -> list[Block]:
        """In the order of the features."""
        if self._blocks is None:
            self._blocks = self._cut()
        return self._blocks

    def logits(self, block: Block, x: Tensor) -> Tensor:
        """The logits of a block's features, at trial values x (B, b) of the block itself."""
        values, outputs = self._read(block, x), self._outputs(block)
        hidden: Tensor | None = None
        columns = slice(0)
        for number, (low, high) in enumerate(zip(block.before, block.inside, strict=True)):
            sums, weight = self._sums[number][:, low:high], self._weights[number][low:high]
            if hidden is None:
                hidden = relu(_entered(sums, weight, self._table, slice(low, high), values))
            else:
                hidden = relu(torch.addmm(sums, hidden, weight[:, columns].t()))
            columns = slice(low, high)
        sums, weight = self._sums[-1][:, outputs], self._weights[-1][outputs]
        if hidden is None:
            out = _entered(sums, weight, self._table, outputs, values)
        else:
            out = torch.addmm(sums, hidden, weight[:, columns].t())
        if self._skip is not None:
            out = _entered(out, self._skip[outputs], self._skip_table, outputs, values)
        return out if len(self._choices.groups) == 1 else out[:, self._packing(block)]

    def update(self, block: Block, x: Tensor) -> None:
        """The block's values are final: add what it determines to all that comes after."""
        values = self._read(block, x)
        later = slice(self._outputs(block).stop, None)
        hidden: Tensor | None = None
        columns = slice(0)
        for number, (low, high) in enumerate(zip(block.before, block.after, strict=True)):
            sums, weight = self._sums[number][:, low:], self._weights[number][low:]
            if hidden is None:
                _enter(sums, weight, self._table, slice(low, None), values)
            else:
                sums.addmm_(hidden, weight[:, columns].t())
            hidden, columns = relu(self._sums[number][:, low:high]), slice(low, high)
        if hidden is None:
            _enter(self._sums[-1][:, later], self._weights[-1][later], self._table, later, values)
        else:
            self._sums[-1][:, later].addmm_(hidden, self._weights[-1][later, columns].t())
        if self._skip is not None:
            _enter(self._sums[-1][:, later], self._skip[later], self._skip_table, later, values)

    def _outputs(self, block: Block) -> slice:
        return slice(self._outputs_before[block.first], self._outputs_before[block.last])

    def _packing(self, block: Block) -> Tensor:
        """Where the packed logits of the block's features lie among its outputs, which follow the ordering."""
        features = self._order[block.first : block.last]
        begin = self._outputs_before[block.first]
        each = [
            torch.arange(self._outputs_before[block.first + n] - begin, self._outputs_before[block.first + n + 1] - begin)
            for group in self._choices.of(features).groups
            for n in group.features
        ]  # fmt: skip
        return torch.cat(each).to(self._sums[-1].device)

    def _read(self, block: Block, x: Tensor) -> _Values:
        columns = slice(self._bits_before[block.first], self._bits_before[block.last])
        dtype = self._sums[0].dtype
        if self._first_rows is None:
            return _Values(x.to(dtype), columns, None)
        of_bits = [
            self._bits_before[rank + 1] > self._bits_before[rank] for rank in range(block.first, block.last)
        ]
        bits = torch.tensor(of_bits, device=x.device)
        rows = x[:, ~bits].long() + self._first_rows[block.first : block.last][~bits]
        return _Values(x[:, bits].to(dtype), columns, rows)

    def decode(self, y: Tensor, uniforms: Tensor) -> Tensor | None:
        """x (B, D) from y and noise, in the arrangement of the ordering, by one kernel; None where there is none for it."""
        plain = self._has_context or self._skip is not None or len(self._weights) != 2
        bits = self._states.binary and self._choices.binary
        if plain or not bits or not devices.usable(uniforms) or uniforms.dtype != torch.float32:
            return None
        (into, out), (bias, out_bias) = self._weights, self._biases
        if len(bias) > _WIDEST_KERNEL:
            return None
        return kernels.decode_made(y.to(uniforms.dtype), uniforms, into, bias, out, out_bias).to(y.dtype)


def _entered(sums: Tensor, weight: Tensor, table: Tensor | None, units: slice, values: _Values) -> Tensor:
    """The sums (B, u) with what values add to these units through a layer's rows `weight` and a table's columns."""
    out = torch.addmm(sums, values.bits, weight[:, values.columns].t())
    return out if table is None or values.rows is None else out + _looked_up(table, units, values.rows)


def _enter(sums: Tensor, weight: Tensor, table: Tensor | None, units: slice, values: _Values) -> None:
    """The same in place."""
    sums.addmm_(values.bits, weight[:, values.columns].t())
    if table is not None and values.rows is not None:
        sums += _looked_up(table, units, values.rows)


def _looked_up(table: Tensor, units: slice, rows: Tensor) -> Tensor:
    return table[:, units].index_select(0, rows.flatten()).unflatten(0, rows.shape).sum(1)
