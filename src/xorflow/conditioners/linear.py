"""Linear layers: masked ones, at the cost of unmasked ones or less, and tables of what categories add.

Bits enter a product as numbers, and categories are looked up: both are what a product with one-hot states would give, at a cost
for each row that does not grow with the number of categories.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, embedding_bag, linear

from xorflow import _devices as devices
from xorflow._cuda import kernels
from xorflow._math import Function
from xorflow._states import Alphabet, Layout, add_buffers
from xorflow.errors import ModelError

_BLOCKS = 8
"""Into how many bands the rows of a staircase are cut; n bands leave (n + 1) / 2n of the products."""

_WORTH_CUTTING = 2**18
"""Weights with fewer entries are multiplied whole: below this the bands' overhead eats what they save."""


class _MaskGradient(Function):
    """The identity forward; backward, the gradient times a mask."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG004  # pyright: ignore[reportIncompatibleMethodOverride]
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        (mask,) = ctx.saved_tensors
        return gradients[0] * mask, None


@dataclass(frozen=True)
class Band:
    """Rows `first:last` of a staircase mask, which see columns below `full` wholly and below `seen` in part."""

    first: int
    last: int
    full: int
    seen: int


def prefix_lengths(mask: Tensor) -> Tensor | None:
    """How many columns each row of a mask sees, int32, if it sees the first ones; None if a row sees others."""
    lengths = mask.bool().sum(1)
    prefix = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    return lengths.int() if bool((prefix == mask.bool()).all()) else None


def staircase_bands(lengths: Tensor | None, blocks: int = _BLOCKS) -> tuple[Band, ...] | None:
    """Cut a mask whose rows see ever longer prefixes, of these lengths, into bands; None if it is no such staircase."""
    if lengths is None or bool((lengths.diff() < 0).any()):
        return None
    edges = [round(i * len(lengths) / blocks) for i in range(blocks + 1)]
    return tuple(
        Band(first, last, int(lengths[first]), int(lengths[last - 1]))
        for first, last in itertools.pairwise(edges)
        if last > first
    )


class _MaskedProduct(Function):
    """x W' + b where W is zero outside of a mask: band by band, if there are bands, only the columns that a band sees.

    Rectified if that is asked for, which costs nothing where a kernel does both.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mask: Tensor,  # noqa: ARG004
        seen: Tensor | None,  # noqa: ARG004
        bands: tuple[Band, ...] | None,
        rectify: bool,
    ) -> Tensor:
        if bands is None:
            out = torch.addmm(bias, x, weight.t())
        else:
            out = x.new_empty(len(x), len(weight))
            for band in bands:
                rows = slice(band.first, band.last)
                part = weight[rows, : band.seen].t()
                torch.addmm(bias[rows], x[:, : band.seen], part, out=out[:, rows])
        return out.relu_() if rectify else out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, weight, _, mask, seen, ctx.bands, rectify = inputs
        ctx.save_for_backward(x, weight, mask, seen, output if rectify else None)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        x, weight, mask, seen, out = ctx.saved_tensors
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        g = gradients[0].contiguous()  # a broadcast gradient would keep every product from the fast routines
        g = g if out is None else torch.ops.aten.threshold_backward(g, out, 0)
        plain = torch.is_grad_enabled()  # operations that have gradients themselves
        kernel = not plain and devices.has_kernels(g.device) and g.dtype == torch.float32
        if not plain and ctx.bands is not None:
            g_x = torch.zeros_like(x) if of_x else None
            g_weight = torch.empty_like(weight) if of_weight else None
            _add_by_bands(g, x, weight, mask, ctx.bands, g_x, g_weight)
        else:
            g_x, g_weight = g @ weight if of_x else None, g.t() @ x if of_weight else None
            if g_weight is not None:
                zeroed = kernels.zero_beyond(g_weight, seen) if kernel and seen is not None else None
                g_weight = g_weight * mask if zeroed is None else zeroed
        g_bias = (kernels.column_sums(g) if kernel else g.sum(-2)) if of_bias else None
        return g_x, g_weight, g_bias, None, None, None, None

    @staticmethod
    def vmap(info, in_dims, *inputs: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _MaskedProduct.one_after_the_other(info, in_dims, *inputs), 0


def _add_by_bands(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: Tensor,
    bands: tuple[Band, ...],
    g_x: Tensor | None,
    g_weight: Tensor | None,
) -> None:
    """The gradients of x, in a tensor of zeros, and of the weight, in one of anything: those that are wanted."""
    for band in bands:
        rows = slice(band.first, band.last)
        if g_x is not None:
            g_x[:, : band.seen].addmm_(g[:, rows], weight[rows, : band.seen])
        if g_weight is not None:
            torch.mm(g[:, rows].t(), x[:, : band.seen], out=g_weight[rows, : band.seen])
            g_weight[rows, band.full : band.seen].mul_(mask[rows, band.full : band.seen])
            g_weight[rows, band.seen :].zero_()


class Masked(nn.Module):
    """What has a weight that is zero, and stays zero, where `mask` is; None: nowhere.

    The weight itself is stored masked; only its gradient is masked. An optimiser that leaves a zero weight with a zero
    gradient alone (SGD, Adam, AdamW, with decay or not) therefore keeps it masked; whoever writes to the weight by other
    means calls `apply_mask`.
    """

    weight: Tensor
    mask: Tensor | None

    def keep_to(self, mask: Tensor) -> None:
        """Take a mask for the weight; one that forbids nothing is none."""
        kept = None if mask.all() else mask.to(self.weight.dtype).contiguous()
        add_buffers(self, mask=kept)
        self.apply_mask()

    @torch.no_grad()
    def apply_mask(self) -> None:
        """Set to zero what the mask forbids."""
        if self.mask is not None:
            self.weight.mul_(self.mask)

    def masked_weight(self) -> Tensor:
        """The weight, whose gradient is zero wherever the mask is."""
        # whether the weight requires a gradient is hidden under vmap
        if self.mask is None or not torch.is_grad_enabled():
            return self.weight
        masked: Tensor = _MaskGradient.apply(self.weight, self.mask)  # pyright: ignore[reportAssignmentType]
        return masked

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.apply_mask()  # loaded weights may come from elsewhere; a leak would make every likelihood wrong


class MaskedLinear(Masked, nn.Linear):
    """A linear layer whose weight is zero, and stays zero, where `mask` is: the forward pass is a plain matrix product.

    On the CPU, where products cost what their operations cost, a large staircase mask is multiplied in bands.
    """

    seen: Tensor | None
    """How many columns each row sees, (out_features,) int32, if these are always the first ones."""

    bands: tuple[Band, ...] | None

    def __init__(self, mask: Tensor, *, bias: bool = True) -> None:
        super().__init__(mask.shape[1], mask.shape[0], bias=bias)
        self.keep_to(mask)
        seen = None if self.mask is None else prefix_lengths(mask)
        add_buffers(self, seen=seen)
        self.bands = staircase_bands(seen) if bias and mask.numel() >= _WORTH_CUTTING else None

    def forward(self, input: Tensor, rectify: bool = False) -> Tensor:
        """The product; of that only what is positive, if it is to be rectified."""
        if self._quicker(input):
            flat = input.reshape(-1, self.in_features)
            bands = None if devices.captures(input.device) else self.bands
            product = _MaskedProduct.apply(flat, self.weight, self.bias, self.mask, self.seen, bands, rectify)
            assert isinstance(product, Tensor)
            return product.reshape(*input.shape[:-1], self.out_features)
        out = linear(input, self.masked_weight(), self.bias)
        return out.relu() if rectify else out

    def _quicker(self, input: Tensor) -> bool:
        """On the CPU, where there are bands; on CUDA, where gradients are wanted: one launch less, and a quicker one."""
        kind = input.device.type
        if self.mask is None or self.bias is None or not self.in_features or torch.is_autocast_enabled(kind):
            return False
        if devices.captures(input.device):
            return torch.is_grad_enabled()
        return kind == "cpu" and self.bands is not None


class Dropout(nn.Dropout):
    """Dropout where gradients are taken, and only there: a likelihood or a sample is the whole network's in training too."""

    def __init__(self, share: float) -> None:
        if not 0 <= share < 1:
            raise ModelError(f"dropout is a share of at least 0 and below 1, and got {share}")
        super().__init__(share)

    @property
    def share(self) -> float:
        """The share of units left out of this pass."""
        return self.p if self.training and torch.is_grad_enabled() else 0.0

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.share) if self.share else input


# ---- categories ----


@dataclass(frozen=True)
class Inputs:
    """What a network sees, ready for its first layer.

    Attributes:
        dense: the context, and the bits of all sources, (..., I).
        rows: for each category that is seen, its row in a table, (..., n) int64; or, of relaxed states, how much of every row,
            (..., R) floats; `None` if all are bits.
    """

    dense: Tensor
    rows: Tensor | None


class Reader(nn.Module):
    """Takes a context, and the states of several sources, apart into numbers and rows of a table.

    Args:
        alphabets: of the sources, in their order.
        context: how many numbers it has.

    Attributes:
        alphabet: of the features of all sources, one after the other: after the context its packed logits are the inputs,
            which begin with the bits.
        arrange: in which order context and bits come; None for this one.
    """

    bits: Tensor
    others: Tensor
    first: Tensor
    packed: Tensor
    arrange: Tensor | None

    def __init__(self, alphabets: Sequence[Alphabet], context: int = 0) -> None:
        super().__init__()
        self.layouts = nn.ModuleList(map(Layout, alphabets))
        self.alphabet = Alphabet([size for alphabet in alphabets for size in alphabet.sizes])
        sizes, owners = torch.tensor(self.alphabet.sizes), self.alphabet.logit_features
        bits, others = (sizes == 2).nonzero().flatten(), (sizes != 2).nonzero().flatten()
        self.context, self.dense, self.rows = context, context + len(bits), len(owners) - len(bits)
        self.sources = list(torch.arange(len(sizes)).split([alphabet.features for alphabet in alphabets]))
        packed = torch.cat([self.positions(number) for number in range(len(alphabets))]).argsort()
        first = torch.tensor(self.alphabet.first_logits)[others] - len(bits)
        add_buffers(self, bits=bits, others=others, first=first, packed=packed, arrange=None)

    def positions(self, source: int) -> Tensor:
        """Where the packed logits of a source lie among those of all."""
        return self.alphabet.positions(self.sources[source].tolist())

    def forward(self, states: Sequence[Tensor], context: Tensor | None, dtype: torch.dtype) -> Inputs:
        """Integer states (..., D), or relaxed ones (..., flat), of one leading shape."""
        relaxed = any(state.is_floating_point() for state in states)
        if relaxed and not self.alphabet.binary:
            states = [
                state if state.is_floating_point() else layout.corners(state, dtype)  # pyright: ignore[reportCallIssue]
                for state, layout in zip(states, self.layouts, strict=True)
            ]
        dense, rows = states[0] if len(states) == 1 else torch.cat(list(states), -1), None
        if not self.alphabet.binary and relaxed:
            dense, rows = dense.index_select(-1, self.packed).tensor_split([len(self.bits)], -1)
        elif not self.alphabet.binary:
            rows = dense.index_select(-1, self.others).long() + self.first
            dense = dense.index_select(-1, self.bits)
        dense = dense.to(dtype) if context is None else torch.cat([context.to(dtype), dense.to(dtype)], -1)
        return Inputs(dense if self.arrange is None else dense.index_select(-1, self.arrange), rows)


class Table(Masked):
    """A vector for each category of each feature, which are added up for a row: the part of a linear layer that reads
    categories.

    Args:
        mask: which entries (rows, width) may differ from zero.
    """

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(mask.shape))
        self.keep_to(mask)

    def forward(self, rows: Tensor) -> Tensor:
        """The sum of a row's vectors, (..., width); see `Inputs`."""
        weight = self.masked_weight()
        return rows @ weight if rows.is_floating_point() else bag(rows, weight)


class InputLayer(MaskedLinear):
    """A masked linear layer of what a `Reader` reads: a product with what is dense, and a table for the rest.

    Args:
        mask: which weights (outputs, inputs) may differ from zero, the dense inputs first.
        dense: how many of the inputs these are.
        bias: whether it has one.
    """

    def __init__(self, mask: Tensor, dense: int, *, bias: bool = True) -> None:
        super().__init__(mask[:, :dense], bias=bias)
        self.table: Table | None = None

    def reset_parameters(self) -> None:
        if self.in_features:
            super().reset_parameters()

    @torch.no_grad()
    def add_table(self, mask: Tensor) -> None:
        """Take all inputs of a mask, those that are not dense by a table; fresh weights have the spread that so many need."""
        if mask.shape[1] == self.in_features:
            return
        bound = mask.shape[1] ** -0.5
        self.table = Table(mask[:, self.in_features :].T)
        for weights in (self.table.weight, *super().parameters(recurse=False)):
            weights.uniform_(-bound, bound)
        self.apply_mask()
        self.table.apply_mask()

    def forward(self, inputs: Inputs, rectify: bool = False) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.table is None or inputs.rows is None:
            return super().forward(inputs.dense, rectify)
        out = super().forward(inputs.dense) + self.table(inputs.rows)
        return out.relu_() if rectify else out

    @torch.no_grad()
    def set_weights(self, weights: Tensor) -> None:
        """Of all inputs, (outputs, inputs), as far as the masks let them."""
        dense, rows = weights.tensor_split([self.in_features], 1)
        self.weight.copy_(dense)
        self.apply_mask()
        if self.table is not None:
            self.table.weight.copy_(rows.T)
            self.table.apply_mask()


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
