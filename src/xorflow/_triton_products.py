"""Batched products with staircase weights, in TF32, behind `_kernels`; importing this needs Triton.

The weights (K, O, I) of K runs share one mask: row o sees the first `seen[o]` columns. What no row of a tile sees is neither
loaded nor multiplied; where the rows are sorted that is nearly half of everything.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


@triton.jit
def _forward(
    x,
    weight,
    bias,
    seen,
    out,
    rows,
    outs,
    ins,
    RECTIFY: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    # a tile of M rows of the batch and N outputs; its sum ends with the last column that one of the outputs sees
    run = tl.program_id(2).to(tl.int64)
    lines = tl.program_id(1) * M + tl.arange(0, M)
    # the longest sums first, so that the short ones fill the gaps at the end
    units = (tl.num_programs(0) - 1 - tl.program_id(0)) * N + tl.arange(0, N)
    real = units < outs
    last = tl.max(tl.load(seen + units, mask=real, other=0), 0)
    x_at = x + run * rows * ins + lines[:, None] * ins
    w_at = weight + run * outs * ins + units[None, :] * ins
    total = tl.zeros((M, N), dtype=tl.float32)
    for first in range(0, last, K):
        cols = first + tl.arange(0, K)
        a = tl.load(x_at + cols[None, :], mask=(lines < rows)[:, None] & (cols < ins)[None, :], other=0.0)
        b = tl.load(w_at + cols[:, None], mask=(cols < ins)[:, None] & real[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="tf32")
    total += tl.load(bias + run * outs + units, mask=real, other=0.0)[None, :]
    if RECTIFY:
        total = tl.maximum(total, 0.0)
    place = run * rows * outs + lines[:, None] * outs + units[None, :]
    tl.store(out + place, total, mask=(lines < rows)[:, None] & real[None, :])


@triton.jit
def _transpose(values, out, rows, width, M: tl.constexpr, N: tl.constexpr):
    run = tl.program_id(2).to(tl.int64)
    lines, cols = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    inside = (lines < rows)[:, None] & (cols < width)[None, :]
    values += run * rows * width
    out += run * rows * width
    tile = tl.load(values + lines[:, None] * width + cols[None, :], mask=inside, other=0.0)
    tl.store(out + cols[:, None] * rows + lines[None, :], tl.trans(tile), mask=tl.trans(inside))


@triton.jit
def _to_weight(g, x, seen, out, rows, outs, ins, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    # a tile of M outputs and N inputs, zero where the output does not see the input; g (outs, rows), x (ins, rows)
    run = tl.program_id(2).to(tl.int64)
    units = tl.program_id(1) * M + tl.arange(0, M)
    first_col = tl.program_id(0) * N
    cols = first_col + tl.arange(0, N)
    real, known = units < outs, cols < ins
    counts = tl.load(seen + units, mask=real, other=0)
    # a tile that no output sees has nothing to sum
    last = tl.where(tl.max(counts, 0) > first_col, rows, 0)
    g_at = g + run * rows * outs + units[:, None] * rows
    x_at = x + run * rows * ins + cols[None, :] * rows
    total = tl.zeros((M, N), dtype=tl.float32)
    for first in range(0, last, K):
        lines = first + tl.arange(0, K)
        a = tl.load(g_at + lines[None, :], mask=real[:, None] & (lines < rows)[None, :], other=0.0)
        b = tl.load(x_at + lines[:, None], mask=(lines < rows)[:, None] & known[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="tf32")
    total = tl.where(cols[None, :] < counts[:, None], total, 0.0)
    place = run * outs * ins + units[:, None] * ins + cols[None, :]
    tl.store(out + place, total, mask=real[:, None] & known[None, :])


_CUT = {"N": 128, "K": 32, "num_warps": 8, "num_stages": 3}


def forward(x: Tensor, weight: Tensor, bias: Tensor, seen: Tensor, rectify: bool) -> Tensor:
    (runs, rows, ins), outs = x.shape, weight.shape[1]
    out = x.new_empty(runs, rows, outs)
    high = 128 if rows > 64 else 64
    grid = (triton.cdiv(outs, _CUT["N"]), triton.cdiv(rows, high), runs)
    _forward[grid](x, weight, bias, seen, out, rows, outs, ins, RECTIFY=rectify, M=high, **_CUT)
    return out


@triton.jit
def _gate(
    g,
    out,
    gated,
    turned,
    sums,
    rows,
    width,
    GATES: tl.constexpr,
    KEEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    # one program for a few columns and all rows of a run: its sums are in a fixed order
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    run = tl.program_id(1).to(tl.int64)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for first in range(0, rows, ROWS):
        lines = first + tl.arange(0, ROWS)
        inside = (lines < rows)[:, None] & (cols < width)[None, :]
        place = run * rows * width + lines[:, None] * width + cols[None, :]
        tile = tl.load(g + place, mask=inside, other=0.0)
        if GATES:
            tile = tl.where(tl.load(out + place, mask=inside, other=0.0) > 0.0, tile, 0.0)
        if KEEPS:
            tl.store(gated + place, tile, mask=inside)
        across = run * rows * width + cols[:, None] * rows + lines[None, :]
        tl.store(turned + across, tl.trans(tile), mask=tl.trans(inside))
        total += tile
    tl.store(sums + run * width + cols, tl.sum(total, 0), mask=cols < width)


def gate(g: Tensor, out: Tensor | None, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    runs, rows, width = g.shape
    gated = torch.empty_like(g) if keep and out is not None else g
    turned, sums = g.new_empty(runs, width, rows), g.new_empty(runs, width)
    _gate[(triton.cdiv(width, 16), runs)](
        g,
        g if out is None else out,
        gated,
        turned,
        sums,
        rows,
        width,
        GATES=out is not None,
        KEEPS=keep and out is not None,
        ROWS=128,
        COLS=16,
        num_warps=4,
    )
    return gated, turned, sums


def to_weight(turned: Tensor, x: Tensor, seen: Tensor) -> Tensor:
    (runs, outs, rows), ins = turned.shape, x.shape[2]
    out = x.new_empty(runs, outs, ins)
    grid = (triton.cdiv(ins, _CUT["N"]), triton.cdiv(outs, 128), runs)
    # Hopper multiplies TF32 only where both operands lie along the sum: turning them around first is quicker
    _to_weight[grid](turned, _turned(x), seen, out, rows, outs, ins, M=128, **_CUT)
    return out


def _turned(values: Tensor) -> Tensor:
    runs, rows, width = values.shape
    out = values.new_empty(runs, width, rows)
    _transpose[(triton.cdiv(rows, 32), triton.cdiv(width, 32), runs)](
        values, out, rows, width, M=32, N=32, num_warps=4
    )
    return out
