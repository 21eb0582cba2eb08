"""Linear layers with masked weights, at the cost of unmasked ones or, where the mask is a staircase, less."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

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


def mask_gradient(weight: Tensor, mask: Tensor) -> Tensor:
    """The weight, whose gradient is zero wherever the mask is."""
    masked: Tensor = _MaskGradient.apply(weight, mask)  # pyright: ignore[reportAssignmentType]
    return masked


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


def staircase_bands(mask: Tensor, blocks: int = _BLOCKS) -> tuple[Band, ...] | None:
    """Cut a mask whose rows see ever longer prefixes of the columns into bands; None if it is no such staircase."""
    return _cut(prefix_lengths(mask), blocks)


def _cut(lengths: Tensor | None, blocks: int = _BLOCKS) -> tuple[Band, ...] | None:
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

    Rectified if that is asked for, which costs nothing where a kernel does both. Under `torch.vmap` over weights it is one
    batched product: x (K, B, I), weight (K, O, I) and bias (K, O), one mask for all.
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
        out = _product(x, weight, bias, bands)
        return out.relu_() if rectify else out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, weight, _, mask, seen, bands, rectify = inputs
        ctx.save_for_backward(x, weight, mask, seen, output if rectify else None)
        ctx.bands = bands if x.dim() == 2 else None

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        x, weight, mask, seen, out = ctx.saved_tensors
        g = gradients[0].contiguous()  # a broadcast gradient would keep every product from the fast routines
        g = g if out is None else torch.ops.aten.threshold_backward(g, out, 0)
        return *_gradients(g, x, weight, mask, seen, ctx.bands, ctx.needs_input_grad), None, None, None, None

    @staticmethod
    def vmap(info, in_dims, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, seen, bands, rectify):  # pyright: ignore[reportIncompatibleMethodOverride]
        if any(dim is not None for dim in in_dims[3:5]):
            raise NotImplementedError("under vmap a masked layer has one mask for all weights")
        stacked = [
            _first(t, dim, info.batch_size) for t, dim in zip((x, weight, bias), in_dims, strict=False)
        ]
        return _MaskedProduct.apply(*stacked, mask, seen, bands, rectify), 0


def _product(x: Tensor, weight: Tensor, bias: Tensor, bands: tuple[Band, ...] | None) -> Tensor:
    if x.dim() == 3:
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
    if bands is None:
        return torch.addmm(bias, x, weight.t())
    out = x.new_empty(len(x), len(weight))
    for band in bands:
        rows = slice(band.first, band.last)
        torch.addmm(bias[rows], x[:, : band.seen], weight[rows, : band.seen].t(), out=out[:, rows])
    return out


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of x, of the weight and of the bias."""


def _gradients(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: Tensor,
    seen: Tensor | None,
    bands: tuple[Band, ...] | None,
    needed: Sequence[bool],
) -> _Gradients:
    g_bias = _column_sums(g) if needed[2] else None
    if torch.is_grad_enabled() or bands is None:  # plain operations, which have gradients themselves
        g_x = g @ weight if needed[0] else None
        return g_x, _masked(g.mT @ x, mask, seen) if needed[1] else None, g_bias
    g_x = torch.zeros_like(x) if needed[0] else None
    g_weight = torch.zeros_like(weight) if needed[1] else None
    for band in bands:
        rows = slice(band.first, band.last)
        if g_x is not None:
            g_x[:, : band.seen].addmm_(g[:, rows], weight[rows, : band.seen])
        if g_weight is not None:
            torch.mm(g[:, rows].t(), x[:, : band.seen], out=g_weight[rows, : band.seen])
            g_weight[rows, band.full : band.seen].mul_(mask[rows, band.full : band.seen])
    return g_x, g_weight, g_bias


def _first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with the dimension that vmap hides in front; one that has none is the same for all."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _fast(g: Tensor) -> bool:
    """Whether a kernel may take the place of plain operations, which have gradients themselves."""
    return devices.usable(g) and g.dtype == torch.float32 and not torch.is_grad_enabled()


def _column_sums(g: Tensor) -> Tensor:
    return kernels.column_sums(g) if _fast(g) else g.sum(-2)


def _masked(g_weight: Tensor, mask: Tensor, seen: Tensor | None) -> Tensor:
    if seen is not None and _fast(g_weight):
        return kernels.zero_beyond(g_weight, seen)
    return g_weight * mask


class MaskedLinear(nn.Linear):
    """A linear layer whose weight is zero, and stays zero, where `mask` is.

    The weight itself is stored masked, so the forward pass is a plain matrix product; only its gradient is masked.
    An optimiser that leaves a zero weight with a zero gradient alone (SGD, Adam, AdamW, with decay or not) therefore
    keeps it masked; whoever writes to the weight by other means calls `apply_mask`.

    On the CPU, where products cost what their operations cost, a large staircase mask is multiplied in bands.
    """

    mask: Tensor

    seen: Tensor | None
    """How many columns each row sees, (out_features,) int32, if these are always the first ones."""

    bands: tuple[Band, ...] | None

    def __init__(self, mask: Tensor, *, bias: bool = True) -> None:
        super().__init__(mask.shape[1], mask.shape[0], bias=bias)
        self.register_buffer("mask", mask.to(self.weight.dtype), persistent=False)
        self.register_buffer("seen", prefix_lengths(mask), persistent=False)
        self.bands = _cut(self.seen) if bias and mask.numel() >= _WORTH_CUTTING else None
        self.apply_mask()

    def reset_parameters(self) -> None:
        if self.in_features:
            super().reset_parameters()
        elif self.bias is not None:  # nothing but categories comes in, by a table of its own
            nn.init.zeros_(self.bias)

    @torch.no_grad()
    def apply_mask(self) -> None:
        """Set to zero what the mask forbids."""
        self.weight.mul_(self.mask)

    def forward(self, input: Tensor, rectify: bool = False) -> Tensor:
        """The product; of that only what is positive, if it is to be rectified."""
        if self._quicker(input):
            flat = input.reshape(-1, self.in_features)
            bands = None if devices.captures(input.device) else self.bands
            product = _MaskedProduct.apply(flat, self.weight, self.bias, self.mask, self.seen, bands, rectify)
            assert isinstance(product, Tensor)
            return product.reshape(*input.shape[:-1], self.out_features)
        weight = self.weight
        if torch.is_grad_enabled():  # whether the weight requires one is hidden under vmap
            weight = mask_gradient(weight, self.mask)
        out = linear(input, weight, self.bias)
        return out.relu() if rectify else out

    def _quicker(self, input: Tensor) -> bool:
        """On the CPU, where there are bands; on CUDA, where gradients are wanted: one launch less, and a quicker one."""
        kind = input.device.type
        if self.bias is None or not self.in_features or torch.is_autocast_enabled(kind):
            return False
        if devices.captures(input.device):
            return torch.is_grad_enabled()
        return kind == "cpu" and self.bands is not None

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.apply_mask()  # loaded weights may come from elsewhere; a leak would make every likelihood wrong


def through(net: nn.Sequential, x: Tensor, looked_up: Tensor | None = None) -> Tensor:
    """`net(x)`, with each ReLU left to the masked layer before it; `looked_up` is added to what the first layer gives."""
    layers = list(net)
    if looked_up is not None:
        first, *layers = layers
        x = first(x) + looked_up
        if layers:
            x = x.relu_()
    for layer, following in zip(layers, [*layers, None][1:], strict=True):
        if isinstance(layer, MaskedLinear):
            x = layer(x, rectify=isinstance(following, nn.ReLU))
        elif not isinstance(layer, nn.ReLU):
            x = layer(x)
    return x
