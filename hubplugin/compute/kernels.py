"""Compute the weighted log-sum-exp over a bank in one Triton kernel.

The kernel accepts unit vectors only, and a tile of similarities never leaves the
registers. A float32 inner product becomes three half-precision products: x = high +
low, with 11 bits each, so high.high + high.low + low.high is exact to about 1e-7, at
the speed of half-precision products.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

logger = logging.getLogger(__name__)

LOG2E = tl.constexpr(math.log2(math.e))

LOWEST = tl.constexpr(-1e30)
"""A finite stand-in for minus infinity, so that differences are not NaN."""

ROWS = 128
"""Targets in a program's tile."""

DEPTH = 32
"""Components in a program's tile."""

COLUMNS = {8: 128, 9: 256, 10: 128}
"""Bank rows in a program's tile, by compute capability. On 9.x, a prototype with 256
took a quarter of the time of a float32 product (H200). On 8.x, 256 spill registers;
10.x has half the tensor memory that 256 need. The kernel was compiled for each GPU, and
runs in the tests."""


@triton.jit  # type: ignore[untyped-decorator]
def _log_sum_exp(  # type: ignore[no-untyped-def]
    t_high, t_low, b_high, b_low, bias, out, n, m, scale,
    d: tl.constexpr, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * bm + tl.arange(0, bm)
    depth = tl.arange(0, bk)
    is_row = rows[:, None] < n
    peak = tl.full([bm], LOWEST, tl.float32)
    total = tl.zeros([bm], tl.float32)
    for start in range(0, m, bn):
        columns = start + tl.arange(0, bn)
        is_column = columns[None, :] < m
        s = tl.zeros([bm, bn], tl.float32)
        for k in range(0, d, bk):
            t_at = rows[:, None].to(tl.int64) * d + (k + depth)[None, :]
            b_at = columns[None, :].to(tl.int64) * d + (k + depth)[:, None]
            t_mask = is_row & ((k + depth) < d)[None, :]
            b_mask = is_column & ((k + depth) < d)[:, None]
            th = tl.load(t_high + t_at, mask=t_mask, other=0.0)
            bh = tl.load(b_high + b_at, mask=b_mask, other=0.0)
            s = tl.dot(th, tl.load(b_low + b_at, mask=b_mask, other=0.0), s)
            s = tl.dot(tl.load(t_low + t_at, mask=t_mask, other=0.0), bh, s)
            s = tl.dot(th, bh, s)
        # The running log-sum-exp in base 2: `total` is relative to the `peak` so far.
        x = s * scale + tl.load(bias + columns, mask=columns < m, other=0.0)[None, :]
        x = tl.where(is_column & is_row, x, LOWEST)
        highest = tl.maximum(peak, tl.max(x, 1))
        tile_total = tl.sum(tl.exp2(x - highest[:, None]), 1)
        total = total * tl.exp2(peak - highest) + tile_total
        peak = highest
    tl.store(out + rows, (peak + tl.log2(total)) / LOG2E, mask=rows < n)


Halves = tuple[torch.Tensor, torch.Tensor]


def log_sum_exp(
    targets: Halves, bank: Halves, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return LSE_u( scale * t.b_u + bias_u ) of unit vectors in halves: float32 [n].

    Args:
        targets: The halves of t [n, d], as returned by `split`.
        bank: The halves of b [m, d].
        bias: The addend of each bank row, [m].
        scale: The factor of the similarities.
    """
    n, d = targets[0].shape
    m = len(bank[0])
    device = targets[0].device
    out = torch.empty(n, dtype=torch.float32, device=device)
    log2e = math.log2(math.e)
    capability = 8  # also for Triton's interpreter
    if device.type == "cuda":
        capability, _ = torch.cuda.get_device_capability(device)
    _tell_of_compiling()
    run: Any = _log_sum_exp[(triton.cdiv(n, ROWS),)]
    # Triton launches on the current GPU, wherever the tensors are.
    with torch.cuda.device_of(targets[0]):
        run(
            *targets, *bank, (bias * log2e).float(), out, n, m, scale * log2e, d, ROWS,
            COLUMNS[capability], DEPTH, num_warps=8, num_stages=3,
        )  # fmt: skip
    return out


@cache
def _tell_of_compiling() -> None:
    """Log, once per process, why the first call takes long."""
    logger.info(
        "compiling the fused kernel takes seconds at its first use on a machine"
    )
