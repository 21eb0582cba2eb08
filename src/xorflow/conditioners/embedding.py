"""How networks read integer states: bits as numbers that enter a product, categories by lookup in a table.

Both are what a product with one-hot states would give, at a cost for each row that does not grow with the number of categories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from xorflow._math import Function
from xorflow._states import Alphabet
from xorflow.conditioners.masked import Masked


@dataclass(frozen=True)
class Reading:
    """What a network sees, ready for its first layer.

    Attributes:
        dense: the bits of all sources, and the context, (..., I).
        rows: for each category that is seen, its row in a table, (..., n), int64; `None` if there is none.
        relaxed: points of simplices in the place of categories, with the rows of a table that they weigh.
    """

    dense: Tensor
    rows: Tensor | None
    relaxed: tuple[tuple[Tensor, slice], ...] = ()


class Reader(nn.Module):
    """Takes the states of several sources, and a context, apart into bits and rows of a table.

    Args:
        alphabets: of the sources, in their order.
        context: how many numbers it has.

    Attributes:
        arrange: in which order bits and context come; None for that of sources and features, the context last.
    """

    arrange: Tensor | None

    def __init__(self, alphabets: Sequence[Alphabet], context: int = 0) -> None:
        super().__init__()
        self.alphabets, self.context = tuple(alphabets), context
        self.dense_slices: list[slice] = []  # by source
        self.row_slices: list[slice] = []
        dense = rows = 0
        for number, alphabet in enumerate(self.alphabets):
            bits = sum(group.flat for group in alphabet.groups if group.binary)
            self.dense_slices.append(slice(dense, dense + bits))
            self.row_slices.append(slice(rows, rows + alphabet.flat - bits))
            of_bits = [d for d, size in enumerate(alphabet.sizes) if size == 2]
            others = [d for d, size in enumerate(alphabet.sizes) if size != 2]
            first = [alphabet.first_logits[d] - bits + rows for d in others]
            for name, index in (("bits", of_bits), ("others", others), ("first", first)):
                self.register_buffer(
                    f"{name}_{number}", torch.tensor(index, dtype=torch.int64), persistent=False
                )
            dense, rows = self.dense_slices[-1].stop, self.row_slices[-1].stop
        self.dense, self.rows = dense + context, rows
        self.register_buffer("arrange", None, persistent=False)

    def dense_features(self) -> list[tuple[int, int]]:
        """For each of the bits, its source's number and its feature."""
        sources = enumerate(self.alphabets)
        return [(number, d) for number, alphabet in sources for d, k in enumerate(alphabet.sizes) if k == 2]

    def row_features(self) -> list[tuple[int, int]]:
        """For each row of the table, its source's number and its feature."""
        groups = [(number, g) for number, a in enumerate(self.alphabets) for g in a.groups if not g.binary]
        return [(number, d) for number, group in groups for d in group.features for _ in range(group.size)]

    def forward(self, states: Sequence[Tensor], context: Tensor | None, dtype: torch.dtype) -> Reading:
        """Integer states (..., D), or relaxed ones (..., flat), of one leading shape."""
        dense: list[Tensor] = []
        rows: list[Tensor] = []
        relaxed: list[tuple[Tensor, slice]] = []
        for number, (alphabet, state) in enumerate(zip(self.alphabets, states, strict=True)):
            if state.is_floating_point():
                bits = self.dense_slices[number].stop - self.dense_slices[number].start
                dense.append(state[..., :bits])
                if bits < alphabet.flat:
                    relaxed.append((state[..., bits:], self.row_slices[number]))
            elif alphabet.binary:
                dense.append(state.to(dtype))
            else:
                dense.append(state.index_select(-1, self.get_buffer(f"bits_{number}")).to(dtype))
                others = state.index_select(-1, self.get_buffer(f"others_{number}")).long()
                rows.append(others + self.get_buffer(f"first_{number}"))
        if context is not None:
            dense.append(context.to(dtype))
        together = dense[0] if len(dense) == 1 else torch.cat(dense, -1)
        return Reading(
            together if self.arrange is None else together.index_select(-1, self.arrange),
            None if not rows else rows[0] if len(rows) == 1 else torch.cat(rows, -1),
            tuple(relaxed),
        )


class Table(Masked):
    """A vector for each category of each feature, which are added up for a row: the part of a linear layer that reads
    categories.

    Args:
        reader: says which rows there are.
        width: of the vectors.
        mask: which entries (rows, width) may differ from zero; all by default.
    """

    def __init__(self, reader: Reader, width: int, mask: Tensor | None = None) -> None:
        super().__init__()
        self.bound = (reader.dense + reader.rows) ** -0.5  # that of a linear layer of so many inputs
        self.weight = nn.Parameter(torch.empty(reader.rows, width).uniform_(-self.bound, self.bound))
        self.register_buffer("mask", None if mask is None else mask.to(self.weight.dtype), persistent=False)
        self.apply_mask()

    def forward(self, reading: Reading) -> Tensor:
        """The sum of a row's vectors, (..., width)."""
        weight = self.masked_weight()
        sums = [weights @ weight[rows] for weights, rows in reading.relaxed]
        if reading.rows is not None:
            sums.append(bag(reading.rows, weight))
        return sum(sums[1:], start=sums[0])


def bag(rows: Tensor, table: Tensor) -> Tensor:
    """The sum of the rows (..., n) of a table (R, H): (..., H)."""
    summed: Tensor = _Bag.apply(rows.reshape(-1, rows.shape[-1]), table)  # pyright: ignore[reportAssignmentType]
    return summed.reshape(*rows.shape[:-1], table.shape[1])


class _Bag(Function):
    """`torch.nn.functional.embedding_bag`, which has neither a second derivative nor a rule for vmap of its own."""

    @staticmethod
    def forward(rows: Tensor, table: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return embedding_bag(rows, table, mode="sum")

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # noqa: ARG004
        rows, table = inputs
        ctx.save_for_backward(rows)
        ctx.size = len(table)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        (rows,) = ctx.saved_tensors
        count, each = rows.shape
        bags = torch.arange(count, device=rows.device).repeat_interleave(each)
        if torch.is_grad_enabled():  # operations that have gradients themselves
            spread = gradients[0].index_select(0, bags)
            return None, spread.new_zeros(ctx.size, spread.shape[1]).index_add(0, rows.flatten(), spread)
        sizes = torch.full((count,), each, device=rows.device)
        return None, torch.ops.aten._embedding_bag_dense_backward(
            gradients[0].contiguous(), rows.flatten(), bags, sizes, sizes, ctx.size, False, 0, None
        )

    @staticmethod
    def vmap(info, in_dims, rows: Tensor, table: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        if in_dims[1] is None:
            return bag(rows.movedim(in_dims[0], 0), table), 0
        return _Bag.one_after_the_other(info, in_dims, rows, table), 0


@torch.no_grad()
def reset_beside(table: Table | None, layer: nn.Module | None) -> None:
    """Fresh weights for the linear layer beside a table: of the spread that belongs to the inputs of both."""
    if table is None or layer is None:  # one of them reads all there is
        return
    for parameter in layer.parameters():
        parameter.uniform_(-table.bound, table.bound)
    if isinstance(layer, Masked):
        layer.apply_mask()


@torch.no_grad()
def start_linear(
    reader: Reader, source: int, slope: Tensor, dense: nn.Linear | None, table: Table | None
) -> None:
    """Set a linear layer, and the table beside it, to a linear map of one source alone, (its `flat`, outputs)."""
    bits = reader.dense_slices[source]
    count = bits.stop - bits.start
    if dense is not None:
        columns = torch.zeros_like(dense.weight.T)
        columns[bits] = slope[:count].to(columns)
        dense.weight.copy_(columns.T if reader.arrange is None else columns.T[:, reader.arrange])
        if isinstance(dense, Masked):
            dense.apply_mask()
    if table is not None:
        table.weight.zero_()
        table.weight[reader.row_slices[source]] = slope[count:].to(table.weight)
        table.apply_mask()
