"""Linear layers with masked weights, at the cost of unmasked ones or, where the mask is a staircase, less."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from xorflow._cuda import devices, kernels
from xorflow._math import Function

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


def linear_layers(net: nn.Sequential) -> list[Linear]:
    """Those of a network, which has ReLUs between them."""
    return [layer for layer in net if isinstance(layer, Linear)]


def through(layers: Sequence[Linear], x: Tensor, looked_up: Tensor | None = None) -> Tensor:
    """What layers with ReLUs between them make of x; `looked_up` is added to what the first one gives."""
    for layer in layers:
        if looked_up is None:
            x = layer(x, rectify=layer is not layers[-1])
        else:
            x, looked_up = layer(x) + looked_up, None
            x = x if layer is layers[-1] else x.relu_()
    return x
