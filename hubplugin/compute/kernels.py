"""The weighted log-sum-exp over a bank as one Triton kernel: a tile of similarities never leaves the registers.

Of unit vectors alone. An inner product in float32 is three products of halves: x = high + low, each of 11 bits, so that
high.high + high.low + low.high is exact to about 1e-7, at the speed of half-precision products.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))

LOWEST = tl.constexpr(-1e30)
"""In the place of minus infinity, of which a difference is no number."""

ROWS, COLUMNS, DEPTH = 128, 256, 32
"""The tile of a program: targets, bank rows, components. A prototype of this kernel took a quarter of a float32 product
on an H200."""


@triton.jit  # type: ignore[untyped-decorator]
def _log_sum_exp(  # type: ignore[no-untyped-def]
    t_high, t_low, b_high, b_low, bias, out, n, m, scale,
    d: tl.constexpr, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr,
):  # fmt: skip
    rows, depth = tl.program_id(0) * bm + tl.arange(0, bm), tl.arange(0, bk)
    is_row = rows[:, None] < n
    peak, total = tl.full([bm], LOWEST, tl.float32), tl.zeros([bm], tl.float32)
    for start in range(0, m, bn):
        columns = start + tl.arange(0, bn)
        is_column = columns[None, :] < m
        s = tl.zeros([bm, bn], tl.float32)
        for k in range(0, d, bk):
            t_at = rows[:, None].to(tl.int64) * d + (k + depth)[None, :]
            b_at = columns[None, :].to(tl.int64) * d + (k + depth)[:, None]
            t_mask = is_row & ((k + depth) < d)[None, :]
            b_mask = is_column & ((k + depth) < d)[:, None]
            th, bh = tl.load(t_high + t_at, mask=t_mask, other=0.0), tl.load(b_high + b_at, mask=b_mask, other=0.0)
            s = tl.dot(th, tl.load(b_low + b_at, mask=b_mask, other=0.0), s)
            s = tl.dot(tl.load(t_low + t_at, mask=t_mask, other=0.0), bh, s)
            s = tl.dot(th, bh, s)
        x = s * scale + tl.load(bias + columns, mask=columns < m, other=0.0)[None, :]
        x = tl.where(is_row & is_column, x, LOWEST)
        highest = tl.maximum(peak, tl.max(x, 1))
        total = total * tl.exp2(peak - highest) + tl.sum(tl.exp2(x - highest[:, None]), 1)
        peak = highest
    tl.store(out + rows, (peak + tl.log2(total)) / LOG2E, mask=rows < n)


Halves = tuple[torch.Tensor, torch.Tensor]


def halves(vectors: torch.Tensor) -> Halves:
    """Unit vectors [n, d] as the sum of two half-precision tensors, which hold 22 bits of each component."""
    high = vectors.to(torch.float16)
    return high, (vectors - high.to(vectors.dtype)).to(torch.float16)


def log_sum_exp(targets: Halves, bank: Halves, bias: torch.Tensor, scale: float) -> torch.Tensor:
    """LSE_u( scale * t.b_u + bias_u ) of unit vectors t [n, d] and b [m, d] in halves: float32 [n]."""
    (n, d), m = targets[0].shape, len(bank[0])
    out = torch.empty(n, device=targets[0].device)
    log2e = math.log2(math.e)
    run: Any = _log_sum_exp[(triton.cdiv(n, ROWS),)]
    run(
        *targets, *bank, (bias * log2e).float(), out, n, m, scale * log2e,
        d, ROWS, COLUMNS, DEPTH, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out
