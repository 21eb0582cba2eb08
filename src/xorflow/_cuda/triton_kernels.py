"""The kernels behind `kernels`; importing this needs Triton."""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


@triton.jit
def _softplus(z):
    return tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z)))


@triton.jit
def _marginal_forward(logits, x, base, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    phi = tl.load(logits + row * width + cols, mask=inside, other=0.0)
    sign = 2.0 * tl.load(x + row * width + cols, mask=inside, other=0.0) - 1.0
    signed = sign * tl.load(base + cols, mask=inside, other=0.0)
    # log p(x) + log((1 - f) + f p(1 - x) / p(x)), mirrored where f > 1/2, so that nothing cancels
    signed = tl.where(phi > 0.0, -signed, signed)
    phi = -tl.abs(phi)
    value = -_softplus(-signed) + _softplus(phi - signed) - _softplus(phi)
    tl.store(out + row, tl.sum(tl.where(inside, value, 0.0), 0))


@triton.jit
def _marginal_backward(
    g, logits, x, base, g_logits, g_base, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr
):
    # one program for a few columns and all rows: the base's gradient is summed in a fixed order
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside_cols = cols < width
    b = tl.load(base + cols, mask=inside_cols, other=0.0)[None, :]
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for first in range(0, rows, ROWS):
        lines = first + tl.arange(0, ROWS)
        inside = (lines < rows)[:, None] & inside_cols[None, :]
        place = lines.to(tl.int64)[:, None] * width + cols[None, :]
        phi = tl.load(logits + place, mask=inside, other=0.0)
        sign = 2.0 * tl.load(x + place, mask=inside, other=0.0) - 1.0
        weight = tl.load(g + lines, mask=lines < rows, other=0.0)[:, None]
        signed = sign * b
        mirror = tl.where(phi > 0.0, -1.0, 1.0)
        far = tl.sigmoid(mirror * (phi - signed))
        tl.store(g_logits + place, weight * mirror * (far - tl.sigmoid(-tl.abs(phi))), mask=inside)
        chosen = tl.where(phi > 0.0, 1.0 - far, far)
        total += tl.where(inside, weight * sign * (tl.sigmoid(-signed) - chosen), 0.0)
    tl.store(g_base + cols, tl.sum(total, 0), mask=inside_cols)


def marginal_forward(logits: Tensor, x: Tensor, base_logits: Tensor) -> Tensor:
    rows, width = logits.shape
    out = logits.new_empty(rows)
    _marginal_forward[(rows,)](logits, x, base_logits, out, width, BLOCK=triton.next_power_of_2(width))
    return out


def marginal_backward(g: Tensor, logits: Tensor, x: Tensor, base_logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = logits.shape
    g_logits, g_base = torch.empty_like(logits), torch.empty_like(base_logits)
    _marginal_backward[(triton.cdiv(width, 8),)](
        g, logits, x, base_logits, g_logits, g_base, rows, width, ROWS=128, COLS=8, num_warps=4
    )
    return g_logits, g_base


@triton.jit
def _walk_made(
    y, e, into, bias, out, out_bias, x, samples, features, hidden, ROWS: tl.constexpr, HIDDEN: tl.constexpr
):
    # y, e, x are (features, samples): a step's loads lie side by side; `into` is (features, hidden)
    lines = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = lines < samples
    units = tl.arange(0, HIDDEN)
    real = units < hidden
    sums = tl.zeros((ROWS, HIDDEN), dtype=tl.float32) + tl.load(bias + units, mask=real, other=0.0)[None, :]
    for d in range(features):
        w_out = tl.load(out + d * hidden + units, mask=real, other=0.0)
        w_in = tl.load(into + d * hidden + units, mask=real, other=0.0)
        y_d = tl.load(y + d * samples + lines, mask=inside, other=0.0)
        e_d = tl.load(e + d * samples + lines, mask=inside, other=0.5)
        phi = tl.sum(tl.maximum(sums, 0.0) * w_out[None, :], 1) + tl.load(out_bias + d)
        flip = tl.where(e_d > tl.sigmoid(-phi), 1.0, 0.0)
        x_d = y_d + flip - 2.0 * y_d * flip
        tl.store(x + d * samples + lines, x_d, mask=inside)
        sums += x_d[:, None] * w_in[None, :]


def decode_made(
    y: Tensor, uniforms: Tensor, into: Tensor, bias: Tensor, out: Tensor, out_bias: Tensor
) -> Tensor:
    samples, features = y.shape
    hidden = len(bias)
    wide = triton.next_power_of_2(hidden)
    # the running sums live in registers: fewer rows a program for wider networks, and to fill the device
    rows = max(1, min(8192 // wide, triton.next_power_of_2(samples) // 64))
    x = torch.empty(features, samples, dtype=torch.float32, device=y.device)
    _walk_made[(triton.cdiv(samples, rows),)](
        y.t().contiguous(),
        uniforms.t().contiguous(),
        into.t().contiguous(),
        bias,
        out.contiguous(),
        out_bias,
        x,
        samples,
        features,
        hidden,
        ROWS=rows,
        HIDDEN=wide,
        num_warps=8 if rows * wide >= 4096 else 4,
    )
    return x.t().contiguous()


@triton.jit
def _philox_words(c0, k0, k1):
    m0: tl.constexpr = 0xD2E7470EE14C6C93
    m1: tl.constexpr = 0xCA5A826395121157
    zero = c0 * 0
    a, b, c, d = c0, zero, zero, zero
    mul0 = zero + tl.full((), m0, tl.uint64)
    mul1 = zero + tl.full((), m1, tl.uint64)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(mul0, a), mul0 * a
        high1, low1 = tl.umulhi(mul1, c), mul1 * c
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
        k0 = k0 + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
        k1 = k1 + tl.full((), 0xBB67AE8584CAA73B, tl.uint64)
    return a, b, c, d


@triton.jit
def _store_halves(out, word, place, count, base):
    low = ((word & 0xFFFFFFFF) >> 9).to(tl.float32)
    high = (word >> 41).to(tl.float32)
    scale: tl.constexpr = 1.1920928955078125e-07  # 2^-23
    tl.store(out + base + place, (low + 0.5) * scale, mask=(place >= 0) & (place < count))
    tl.store(out + base + place + 1, (high + 0.5) * scale, mask=(place + 1 >= 0) & (place + 1 < count))


@triton.jit
def _philox_uniforms(out, seed, stream, first, stride, count, BLOCK: tl.constexpr):
    window = tl.program_id(1).to(tl.int64)
    start = first + window * stride
    block = start // 8 + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # numpy advances the counter before it uses it
    a, b, c, d = _philox_words((block + 1).to(tl.uint64), seed.to(tl.uint64), stream.to(tl.uint64))
    place = block * 8 - start
    base = window * count
    _store_halves(out, a, place, count, base)
    _store_halves(out, b, place + 2, count, base)
    _store_halves(out, c, place + 4, count, base)
    _store_halves(out, d, place + 6, count, base)


def philox_uniforms(
    seed: int, stream: int, starts: tuple[int, int], windows: int, count: int, device: torch.device
) -> Tensor:
    out = torch.empty(windows, count, dtype=torch.float32, device=device)
    block = 256
    grid = (triton.cdiv(count // 8 + 2, block), windows)
    key = torch.tensor([seed, stream], dtype=torch.int64, device=device)
    _philox_launch[grid](out, key, starts[0], starts[1], count, BLOCK=block)
    return out


@triton.jit
def _philox_launch(out, key, first, stride, count, BLOCK: tl.constexpr):
    # the key comes from memory: as plain arguments, small seeds would be compiled in as 32-bit constants
    _philox_uniforms(out, tl.load(key), tl.load(key + 1), first, stride, count, BLOCK)


@triton.jit
def _store_bits(out, intensities, word, place, count):
    for half in tl.static_range(2):
        drawn = (word >> (32 * half)) & 0xFFFFFFFF
        inside = place + half < count
        grey = tl.load(intensities + place + half, mask=inside, other=0).to(tl.uint64)
        one = (grey > 0) & (drawn <= grey * 0x01010101)
        tl.store(out + place + half, one.to(tl.uint8), mask=inside)


@triton.jit
def _binarise_once(intensities, out, key, count, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seed, stream = tl.load(key).to(tl.uint64), tl.load(key + 1).to(tl.uint64)
    a, b, c, d = _philox_words((block + 1).to(tl.uint64), seed, stream)
    place = block * 8
    _store_bits(out, intensities, a, place, count)
    _store_bits(out, intensities, b, place + 2, count)
    _store_bits(out, intensities, c, place + 4, count)
    _store_bits(out, intensities, d, place + 6, count)


def binarise_once(intensities: Tensor, seed: int, stream: int) -> Tensor:
    out = torch.empty_like(intensities)
    key = torch.tensor([seed, stream], dtype=torch.int64, device=intensities.device)
    grid = (triton.cdiv(intensities.numel(), 8 * 256),)
    _binarise_once[grid](intensities, out, key, intensities.numel(), BLOCK=256)
    return out


@triton.jit
def _column_sums(values, out, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for first in range(0, rows, ROWS):
        lines = first + tl.arange(0, ROWS)
        inside = (lines < rows)[:, None] & (cols < width)[None, :]
        place = lines.to(tl.int64)[:, None] * width + cols[None, :]
        total += tl.load(values + place, mask=inside, other=0.0)
    tl.store(out + cols, tl.sum(total, 0), mask=cols < width)


def column_sums(values: Tensor) -> Tensor:
    rows, width = values.shape
    out = values.new_empty(width)
    _column_sums[(triton.cdiv(width, 8),)](values, out, rows, width, ROWS=128, COLS=8, num_warps=4)
    return out


@triton.jit
def _up_to_sixteen(count):
    # a bound that the compiler knows to be a multiple of 16 lets it move four numbers at a time
    return (count + 15) // 16 * 16


@triton.jit
def _zero_beyond(values, seen, width, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    count = tl.load(seen + line)
    even = _up_to_sixteen(count)
    values += line * width
    zero = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        tl.store(values + cols, zero, mask=(cols >= even) & (cols < width))
        tl.store(values + cols, zero, mask=(cols >= count) & (cols < even) & (cols < width))


def zero_beyond(values: Tensor, seen: Tensor) -> Tensor:
    rows, width = values.shape
    block = min(1024, triton.next_power_of_2(width))
    _zero_beyond[(rows,)](values, seen, width, BLOCK=block, num_warps=4)
    return values


@triton.jit(do_not_specialize=["ahead"])
def _draw_rows(intensities, rows, seed, counter, ahead, out, width, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    quads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + line)
    step = tl.load(counter) + ahead
    zero = (quads * 0).to(tl.uint32)
    place = (zero + line.to(tl.uint32)).to(tl.uint32)
    low = (zero + (step & 0xFFFFFFFF).to(tl.uint32)).to(tl.uint32)
    high = (zero + (step >> 32).to(tl.uint32)).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed), quads.to(tl.uint32), place, low, high)
    grey, drawn = intensities + row * width, out + line * width
    _store_drawn(grey, drawn, a, quads * 4, width)
    _store_drawn(grey, drawn, b, quads * 4 + 1, width)
    _store_drawn(grey, drawn, c, quads * 4 + 2, width)
    _store_drawn(grey, drawn, d, quads * 4 + 3, width)


@triton.jit
def _store_drawn(grey, drawn, word, cols, width):
    inside = cols < width
    value = tl.load(grey + cols, mask=inside, other=0).to(tl.uint64)
    one = (value > 0) & (word.to(tl.uint64) <= value * 0x01010101)
    tl.store(drawn + cols, one.to(tl.float32), mask=inside)


def draw_rows(intensities: Tensor, rows: Tensor, seed: Tensor, counter: Tensor, ahead: int) -> Tensor:
    width, lines = intensities.shape[1], len(rows)
    out = torch.empty(lines, width, dtype=torch.float32, device=rows.device)
    block = 256
    grid = (lines, triton.cdiv(triton.cdiv(width, 4), block))
    _draw_rows[grid](intensities, rows, seed, counter, ahead, out, width, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _adam_at(
    place, inside, parameter, gradient, mean, square, lr, t, beta1, beta2, eps, decay, DECOUPLED: tl.constexpr
):
    p = tl.load(parameter + place, mask=inside, other=0.0)
    g = tl.load(gradient + place, mask=inside, other=0.0)
    m = tl.load(mean + place, mask=inside, other=0.0)
    v = tl.load(square + place, mask=inside, other=0.0)
    if DECOUPLED:
        p = p * (1.0 - lr * decay)
    else:
        g = g + decay * p
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    unbias1 = 1.0 - tl.exp(t * tl.log(beta1))
    unbias2 = 1.0 - tl.exp(t * tl.log(beta2))
    p = p - lr / unbias1 * m / (tl.sqrt(v) / tl.sqrt(unbias2) + eps)
    tl.store(parameter + place, p, mask=inside)
    tl.store(mean + place, m, mask=inside)
    tl.store(square + place, v, mask=inside)


@triton.jit
def _adam(
    parameter,
    gradient,
    mean,
    square,
    rate,
    step,
    size,
    beta1,
    beta2,
    eps,
    decay,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lr, t = tl.load(rate), tl.load(step) + 1
    _adam_at(
        place, place < size, parameter, gradient, mean, square, lr, t, beta1, beta2, eps, decay, DECOUPLED
    )


@triton.jit
def _adam_masked(
    parameter,
    gradient,
    mean,
    square,
    rate,
    step,
    seen,
    width,
    beta1,
    beta2,
    eps,
    decay,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # one program for a row: what lies beyond the columns that it sees is zero, and stays so
    line = tl.program_id(0).to(tl.int64)
    even = _up_to_sixteen(tl.load(seen + line))
    lr, t = tl.load(rate), tl.load(step) + 1
    for first in range(0, width, BLOCK):
        if first < even:
            cols = first + tl.arange(0, BLOCK)
            inside = (cols < even) & (cols < width)
            place = line * width + cols
            _adam_at(
                place, inside, parameter, gradient, mean, square, lr, t, beta1, beta2, eps, decay, DECOUPLED
            )


def adam(
    parameter: Tensor,
    gradient: Tensor,
    averages: tuple[Tensor, Tensor],
    rate: Tensor,
    step: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    seen: Tensor | None = None,
) -> None:
    size, block = parameter.numel(), 1024
    tensors = (parameter, gradient.contiguous(), *averages, rate, step)
    constants = (betas[0], betas[1], eps, weight_decay)
    if seen is None:
        _adam[(triton.cdiv(size, block),)](
            *tensors, size, *constants, DECOUPLED=decoupled, BLOCK=block, num_warps=4
        )
        return
    rows, width = parameter.shape
    block = min(block, triton.next_power_of_2(width))
    _adam_masked[(rows,)](*tensors, seen, width, *constants, DECOUPLED=decoupled, BLOCK=block, num_warps=4)
