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
from torch.nn.functional import embedding_bag, linear

from xorflow._cuda import devices, kernels
from xorflow._math import Function
from xorflow._states import Alphabet

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
        if torch.is_grad_enabled() or ctx.bands is None:  # plain operations, which have gradients themselves
            g_x = g @ weight if of_x else None
            g_weight = _masked(g.t() @ x, mask, seen) if of_weight else None
        else:
            g_x = torch.zeros_like(x) if of_x else None
            g_weight = torch.zeros_like(weight) if of_weight else None
            _add_by_bands(g, x, weight, mask, ctx.bands, g_x, g_weight)
        return g_x, g_weight, _column_sums(g) if of_bias else None, None, None, None, None

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
    """The gradients of x and of the weight, those that are wanted, in tensors that are zero."""
    for band in bands:
        rows = slice(band.first, band.last)
        if g_x is not None:
            g_x[:, : band.seen].addmm_(g[:, rows], weight[rows, : band.seen])
        if g_weight is not None:
            torch.mm(g[:, rows].t(), x[:, : band.seen], out=g_weight[rows, : band.seen])
            g_weight[rows, band.full : band.seen].mul_(mask[rows, band.full : band.seen])


def _fast(g: Tensor) -> bool:
    """Whether a kernel may take the place of plain operations, which have gradients themselves."""
    return devices.usable(g) and g.dtype == torch.float32 and not torch.is_grad_enabled()


def _column_sums(g: Tensor) -> Tensor:
    return kernels.column_sums(g) if _fast(g) else g.sum(-2)


def _masked(g_weight: Tensor, mask: Tensor, seen: Tensor | None) -> Tensor:
    if seen is not None and _fast(g_weight):
        return kernels.zero_beyond(g_weight, seen)
    return g_weight * mask


class Masked(nn.Module):
    """What has a weight that is zero, and stays zero, where `mask` is; None: nowhere.

    The weight itself is stored masked; only its gradient is masked. An optimiser that leaves a zero weight with a zero
    gradient alone (SGD, Adam, AdamW, with decay or not) therefore keeps it masked; whoever writes to the weight by other
    means calls `apply_mask`.
    """

    weight: Tensor
    mask: Tensor | None

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


class Linear(nn.Linear):
    """A linear layer, followed by a ReLU if that is asked for; it may have no inputs, and is then its bias."""

    def reset_parameters(self) -> None:
        if self.in_features:
            super().reset_parameters()
        elif self.bias is not None:  # nothing but categories comes in, by a table of its own
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor, rectify: bool = False) -> Tensor:
        out = linear(input, self.weight, self.bias)
        return out.relu() if rectify else out


class MaskedLinear(Masked, Linear):
    """A linear layer whose weight is zero, and stays zero, where `mask` is: the forward pass is a plain matrix product.

    On the CPU, where products cost what their operations cost, a large staircase mask is multiplied in bands.
    """

    mask: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]

    seen: Tensor | None
    """How many columns each row sees, (out_features,) int32, if these are always the first ones."""

    bands: tuple[Band, ...] | None

    def __init__(self, mask: Tensor, *, bias: bool = True) -> None:
        super().__init__(mask.shape[1], mask.shape[0], bias=bias)
        self.register_buffer("mask", mask.to(self.weight.dtype), persistent=False)
        self.register_buffer("seen", prefix_lengths(mask), persistent=False)
        self.bands = staircase_bands(self.seen) if bias and mask.numel() >= _WORTH_CUTTING else None
        self.apply_mask()

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
        if self.bias is None or not self.in_features or torch.is_autocast_enabled(kind):
            return False
        if devices.captures(input.device):
            return torch.is_grad_enabled()
        return kind == "cpu" and self.bands is not None


# ---- categories ----


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
        dense_features: for each of the bits, its source's number and its feature.
        row_features: for each row of the table, its source's number and its feature.
        arrange: in which order bits and context come; None for that of sources and features, the context last.
    """

    arrange: Tensor | None

    def __init__(self, alphabets: Sequence[Alphabet], context: int = 0) -> None:
        super().__init__()
        self.alphabets = tuple(alphabets)
        self.dense_features: list[tuple[int, int]] = []
        self.row_features: list[tuple[int, int]] = []
        self.dense_slices: list[slice] = []  # by source
        self.row_slices: list[slice] = []
        for number, alphabet in enumerate(self.alphabets):
            dense, rows, sizes = len(self.dense_features), len(self.row_features), alphabet.sizes
            bits = [d for d, size in enumerate(sizes) if size == 2]
            others = [d for d, size in enumerate(sizes) if size != 2]
            self.dense_features += [(number, d) for d in bits]
            self.row_features += [(number, d) for d in alphabet.logit_features.tolist() if sizes[d] != 2]
            self.dense_slices.append(slice(dense, len(self.dense_features)))
            self.row_slices.append(slice(rows, len(self.row_features)))
            first = [alphabet.first_logits[d] - len(bits) + rows for d in others]
            for name, index in (("bits", bits), ("others", others), ("first", first)):
                self.register_buffer(
                    f"{name}_{number}", torch.tensor(index, dtype=torch.int64), persistent=False
                )
        self.dense, self.rows = len(self.dense_features) + context, len(self.row_features)
        self.register_buffer("arrange", None, persistent=False)

    def forward(self, states: Sequence[Tensor], context: Tensor | None, dtype: torch.dtype) -> Reading:
        """Integer states (..., D), or relaxed ones (..., flat), of one leading shape."""
        dense: list[Tensor] = []
        rows: list[Tensor] = []
        relaxed: list[tuple[Tensor, slice]] = []
        for number, (alphabet, state) in enumerate(zip(self.alphabets, states, strict=True)):
            if state.is_floating_point():
                bits = len(self.get_buffer(f"bits_{number}"))
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
def reset_beside(table: Table | None, layer: Linear | None) -> None:
    """Fresh weights for the linear layer beside a table: of the spread that belongs to the inputs of both."""
    if table is None or layer is None:  # one of them reads all there is
        return
    for parameter in layer.parameters():
        parameter.uniform_(-table.bound, table.bound)
    if isinstance(layer, Masked):
        layer.apply_mask()
