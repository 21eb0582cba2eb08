"""CUDA kernels, written in Triton, for what PyTorch would do in many small launches.

Each has a plain counterpart elsewhere, which serves every other device and is its reference: the marginal of binary choices
(`flows.choices`), incremental decoding of a MADE (`conditioners.made`), numpy's Philox (`_math`). Triton comes with
PyTorch's CUDA builds; nothing here is imported without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xorflow._math import Function


def marginal_total(logits: Tensor, x: Tensor, base_logits: Tensor) -> Tensor:
    r""":math:`\sum_d \log((1 - f_d)\, p_d(x_d) + f_d\, p_d(1 - x_d))` of binary features, (B,), in one launch each way.

    Args:
        logits: log-odds of u, (B, D) float32.
        x: states in {0, 1}, (B, D) float32, without gradient.
        base_logits: log-odds of y, (D,) float32.
    """
    total: Tensor = _MarginalTotal.apply(logits.contiguous(), x.contiguous(), base_logits.contiguous())  # pyright: ignore[reportAssignmentType]
    return total


class _MarginalTotal(Function):
    @staticmethod
    def forward(logits: Tensor, x: Tensor, base_logits: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        from xorflow._cuda import triton_kernels

        return triton_kernels.marginal_forward(logits, x, base_logits)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        from xorflow._cuda import triton_kernels

        logits, x, base_logits = ctx.saved_tensors
        g_logits, g_base = triton_kernels.marginal_backward(gradients[0].contiguous(), logits, x, base_logits)
        return g_logits, None, g_base

    @staticmethod
    def vmap(info, in_dims, *inputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _MarginalTotal.one_after_the_other(info, in_dims, *inputs), 0


def decode_made(
    y: Tensor, uniforms: Tensor, into: Tensor, bias: Tensor, out: Tensor, out_bias: Tensor
) -> Tensor:
    """x (B, D) in {0, 1} from y and noise, through a MADE of one hidden layer, feature after feature in one launch.

    Everything is in the arrangement of the ordering.

    Args:
        y: base states (B, D).
        uniforms: noise (B, D); 0.5 everywhere for the most probable choice.
        into: weights into the hidden layer (H, D).
        bias: of the hidden layer (H,).
        out: weights out of it (D, H).
        out_bias: of the output (D,).
    """
    from xorflow._cuda import triton_kernels

    return triton_kernels.decode_made(y, uniforms, into, bias, out, out_bias)


def philox_uniforms(
    seed: int, stream: int, starts: tuple[int, int], windows: int, count: int, device: torch.device
) -> Tensor:
    """Windows of numpy's Philox sequence as float32 uniforms, (windows, count), the same numbers as on the CPU.

    Args:
        seed: and
        stream: name the sequence.
        starts: where the first window begins, and how far the next one is.
        windows: how many.
        count: numbers in each.
        device: a CUDA device.
    """
    from xorflow._cuda import triton_kernels

    return triton_kernels.philox_uniforms(seed, stream, starts, windows, count, device)


def column_sums(values: Tensor) -> Tensor:
    """The sums (D,) of contiguous float32 values (B, D) over their rows, in a fixed order."""
    from xorflow._cuda import triton_kernels

    return triton_kernels.column_sums(values)


def zero_beyond(values: Tensor, seen: Tensor) -> Tensor:
    """Set to zero, in place, what lies beyond the first `seen` (R,) columns of each row of contiguous float32 (R, C)."""
    from xorflow._cuda import triton_kernels

    return triton_kernels.zero_beyond(values, seen)


def draw_rows(intensities: Tensor, rows: Tensor, seed: Tensor, counter: Tensor, ahead: int) -> Tensor:
    """float32 (R, D): 1 with probability v / 255 for the intensities v of the rows chosen, drawn in the same launch.

    The draw is a function of a run's seed, the step, the place in the batch and the feature, by Philox4x32: it needs no state,
    and is the same whether a step is captured or not.

    Args:
        intensities: (N, D) uint8.
        rows: (R,) int64.
        seed: (1,) int64, of the run, on the device.
        counter: (1,) int64, a number of a step, on the device.
        ahead: how many steps after that one.
    """
    from xorflow._cuda import triton_kernels

    return triton_kernels.draw_rows(intensities.contiguous(), rows.contiguous(), seed, counter, ahead)


def binarise_once(intensities: Tensor, seed: int, stream: int) -> Tensor:
    """The draw of `data.binarise`, pixel for pixel, made where the intensities are."""
    from xorflow._cuda import triton_kernels

    return triton_kernels.binarise_once(intensities.contiguous(), seed, stream)


def adam(
    parameter: Tensor,
    gradient: Tensor,
    averages: tuple[Tensor, Tensor],
    rate: Tensor,
    step: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    seen: Tensor | None = None,
) -> None:
    """One step of Adam (or, with `decoupled` decay, AdamW) on one float32 parameter, in place.

    Args:
        parameter: changed in place.
        gradient: of the same shape.
        averages: of the gradient and of its square, changed in place.
        rate: the learning rate, on the device.
        step: how many steps were made before, on the device.
        betas: decays of the averages.
        eps: added to the root.
        weight_decay: of the parameter.
        decoupled: decay the weight itself instead of adding to its gradient.
        seen: of a parameter (R, C), how many columns (R,) of each row are not masked; the others, zero like their
            gradient, are passed over.
    """
    from xorflow._cuda import triton_kernels

    triton_kernels.adam(parameter, gradient, averages, rate, step, betas, eps, weight_decay, decoupled, seen)
