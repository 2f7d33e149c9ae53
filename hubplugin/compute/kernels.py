"""The weighted log-sum-exp over a bank as one Triton kernel: a tile of similarities never leaves the registers.

It takes unit vectors alone. An inner product in float32 is three products of halves:
x = high + low, each of 11 bits, so that high.high + high.low + low.high is exact to about
1e-7, at the speed of half-precision products.
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
"""In the place of minus infinity, of which a difference is no number."""

ROWS, DEPTH = 128, 32
"""The targets and components of a program's tile."""

NARROW, WIDE = 128, 256
"""Bank rows of its tile: see `columns_of`."""


def columns_of(capability: int, masked: bool) -> int:
    """Return how many bank rows a program's tile has on cards of this capability.

    On 9.x a prototype with 256 took a quarter of a float32 product (H200). On 8.x so many
    spill registers, as they do where answers are masked; 10.x has half of the tensor
    memory that they take. All of it was compiled for each card, and runs in the tests.
    """
    return WIDE if capability == 9 and not masked else NARROW


@triton.jit
def _accumulate(peak, total, x, keep):  # type: ignore[no-untyped-def]
    """The running log-sum-exp in base 2 of each row, after the exponents x where `keep`: its peak and its sum."""
    x = tl.where(keep, x, LOWEST)
    highest = tl.maximum(peak, tl.max(x, 1))
    return highest, total * tl.exp2(peak - highest) + tl.sum(
        tl.where(keep, tl.exp2(x - highest[:, None]), 0.0), 1
    )


@triton.jit
def _accumulate_but_largest(largest, of_largest, peak, total, s, x, keep, columns):  # type: ignore[no-untyped-def]
    """`_accumulate` but for each row's largest similarity so far, which is kept apart with its exponent."""
    s = tl.where(keep, s, LOWEST)
    here = tl.max(s, 1)
    replaced = here > largest
    at = tl.argmax(s, 1)
    is_largest = (tl.arange(0, s.shape[1])[None, :] == at[:, None]) & replaced[:, None]
    exponent = tl.sum(tl.where(is_largest, x, 0.0), 1)
    peak, total = _accumulate(peak, total, x, keep & ~is_largest)
    # What was the largest until now is one of the others.
    former = tl.where(replaced & (largest > LOWEST), of_largest, LOWEST)
    highest = tl.maximum(peak, former)
    total = total * tl.exp2(peak - highest) + tl.where(
        former > LOWEST, tl.exp2(former - highest), 0.0
    )
    return (
        tl.maximum(largest, here),
        tl.where(replaced, exponent, of_largest),
        highest,
        total,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _log_sum_exp(  # type: ignore[no-untyped-def]
    t_high, t_low, b_high, b_low, bias, thresholds, out, n, m, scale, hub,
    d: tl.constexpr, masked: tl.constexpr, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr,
):  # fmt: skip
    rows, depth = tl.program_id(0) * bm + tl.arange(0, bm), tl.arange(0, bk)
    is_row = rows[:, None] < n
    peak, total = tl.full([bm], LOWEST, tl.float32), tl.zeros([bm], tl.float32)
    largest, of_largest, count = (
        peak,
        peak,
        tl.zeros([bm], tl.float32),
    )  # of all entries
    rest_peak, rest_total, rest_largest, rest_of = (
        peak,
        total,
        peak,
        peak,
    )  # of those that are no answers
    for start in range(0, m, bn):
        columns = start + tl.arange(0, bn)
        is_column = columns[None, :] < m
        s = tl.zeros([bm, bn], tl.float32)
        for k in range(0, d, bk):
            t_at = rows[:, None].to(tl.int64) * d + (k + depth)[None, :]
            b_at = columns[None, :].to(tl.int64) * d + (k + depth)[:, None]
            t_mask = is_row & ((k + depth) < d)[None, :]
            b_mask = is_column & ((k + depth) < d)[:, None]
            th, bh = (
                tl.load(t_high + t_at, mask=t_mask, other=0.0),
                tl.load(b_high + b_at, mask=b_mask, other=0.0),
            )
            s = tl.dot(th, tl.load(b_low + b_at, mask=b_mask, other=0.0), s)
            s = tl.dot(tl.load(t_low + t_at, mask=t_mask, other=0.0), bh, s)
            s = tl.dot(th, bh, s)
        x = s * scale + tl.load(bias + columns, mask=columns < m, other=0.0)[None, :]
        keep = is_column & is_row
        if masked:
            is_answer = keep & (
                s >= tl.load(thresholds + columns, mask=columns < m, other=0.0)[None, :]
            )
            count += tl.sum(tl.where(is_answer, 1.0, 0.0), 1)
            largest, of_largest, peak, total = _accumulate_but_largest(
                largest, of_largest, peak, total, s, x, keep, columns
            )
            rest_largest, rest_of, rest_peak, rest_total = _accumulate_but_largest(
                rest_largest,
                rest_of,
                rest_peak,
                rest_total,
                s,
                x,
                keep & ~is_answer,
                columns,
            )
        else:
            peak, total = _accumulate(peak, total, x, keep)
    if masked:  # a hub keeps its answers
        peak, total = (
            tl.where(count > hub, peak, rest_peak),
            tl.where(count > hub, total, rest_total),
        )
    tl.store(out + rows, (peak + tl.log2(total)) / LOG2E, mask=rows < n)


Halves = tuple[torch.Tensor, torch.Tensor]


def log_sum_exp(
    targets: Halves,
    bank: Halves,
    bias: torch.Tensor,
    scale: float,
    thresholds: torch.Tensor | None = None,
    hub: float = math.inf,
) -> torch.Tensor:
    """LSE_u( scale * t.b_u + bias_u ) of unit vectors in halves.

    Args:
        targets, bank: t [n, d] and b [m, d], each as `split` gives it.
        bias: [m].
        scale: of the similarities.
        thresholds: the similarity from which on t is an answer of the bank query u [m]. Answers are masked, but those
            of targets that answer more than `hub` queries, and so is the largest of each target's other entries.
        hub: how many queries a target may answer; by default any number.

    Returns:
        float32 [n].
    """
    n, d = targets[0].shape
    m = len(bank[0])
    device = targets[0].device
    out = torch.empty(n, device=device)
    log2e = math.log2(math.e)
    columns = NARROW
    if device.type == "cuda":
        capability, _ = torch.cuda.get_device_capability(device)
        columns = columns_of(capability, thresholds is not None)
    _tell_of_compiling()
    run: Any = _log_sum_exp[(triton.cdiv(n, ROWS),)]
    # Triton launches on the current card, wherever the tensors lie.
    with torch.cuda.device_of(targets[0]):
        run(
            *targets, *bank, (bias * log2e).float(),
            bias if thresholds is None else thresholds.float(), out, n, m,
            scale * log2e, min(hub, 3e38), d, thresholds is not None, ROWS, columns,
            DEPTH, num_warps=8, num_stages=3,
        )  # fmt: skip
    return out


@cache
def _tell_of_compiling() -> None:
    logger.info("the fused kernel is compiled at its first use on a machine: seconds")
