"""Products of float32 vectors by way of eight-bit integers, on a CPU that multiplies those four times as fast.

A number is its row's `scale` times (high + low / 254), both of eight bits. Of the four products of halves the one of
two low halves is left out, and the two small ones are one product of twice the length:

    s(b, t) = scale_b scale_t / 254 * ( 254 high_t . high_b + [low_t high_t] . [high_b low_b] )

Sums of integers are exact. What is lost is that last product and what the low halves round off: for unit vectors of
384 dimensions some 3e-6 on average. It is as good as random, so it averages out over a bank. How large it is, is
measured on a strip of every tile.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LOW = 254
"""Steps of a low half within one of a high half."""

BANK_STEPS, TARGET_STEPS = 127, 113
"""Steps of a high half up to a row's largest number. They differ, for otherwise the low halves of a vector and of
its copy would be the same, and what is left out a sum of squares."""

STRIP = 8
"""Of a tile the columns of the bank rows with the largest scales are compared, and as many others of all scales: rows
that lose the most are alike in scale, and not in their place."""

COARSEST = 2.5e-5
"""The largest error of a similarity in that strip for which integers serve. Of unit vectors of 384 dimensions it is
1e-5 to 2e-5."""


class IntegerBank:
    """The halves of a bank [m, d], float32, and a strip of it."""

    def __init__(self, bank: torch.Tensor):
        import torch

        starts = range(0, len(bank), 512)  # rows that stay in cache
        parts = zip(*(_halves(bank[start : start + 512], BANK_STEPS) for start in starts), strict=True)
        self.high, low, scale = (torch.cat(each) for each in parts)
        self._both = torch.cat([self.high, low], dim=1)
        self._scale = (scale[:, 0] / LOW).contiguous()
        self._longest = _longest(self.high)
        by_scale = scale[:, 0].argsort(descending=True)
        self._columns = torch.cat([by_scale[:STRIP], by_scale[STRIP :: max(len(bank) // STRIP, 1)]])
        self._strip = bank[self._columns].T.double()
        self._other: Any = None

    def product(self, bias: torch.Tensor, targets: torch.Tensor, out: torch.Tensor) -> float:
        """`bias` [m] + `targets` [b, d] times the bank, written to `out` [b, m]; returns the largest error in the
        strip, which is infinite where the sums of integers might not fit."""
        import torch

        high, low, scale = _halves(targets, TARGET_STEPS)
        largest = LOW * self._longest * _longest(high) + 2 * 128**2 * targets.shape[1]
        if not largest < 2**31:
            return math.inf
        if self._other is None or self._other.shape != out.shape:
            self._other = torch.empty(out.shape, dtype=torch.int32)
        # The sum takes the place of the result, so that a tile and its integers stay in cache.
        both = out.view(torch.int32)
        _multiply(torch.cat([low, high], dim=1), self._both.T, out=both)
        _multiply(high, self.high.T, out=self._other)
        both.add_(self._other, alpha=LOW)
        out.copy_(both).mul_(scale)
        torch.addcmul(bias, out, self._scale, out=out)
        exact = targets.double() @ self._strip + bias[self._columns]
        return float((out[:, self._columns] - exact).abs().max())


def _halves(rows: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """High and low, int8 [b, d], and the scale [b, 1] of one step of high."""
    import torch

    scale = rows.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny * 2 * steps) / steps
    scaled = rows / scale
    high = scaled.round()
    return high.to(torch.int8), scaled.sub_(high).mul_(LOW).round_().to(torch.int8), scale


def _longest(high: torch.Tensor) -> float:
    return float(high.float().square_().sum(dim=1).max().sqrt())


def _multiply(rows: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> None:
    """The only place with this name, which is not public: see `are_fast`."""
    import torch

    torch._int_mm(rows, columns, out=out)


@cache
def are_fast() -> bool:
    """Whether this CPU multiplies integers faster, and truly, which one tile tells.

    Where a kernel is missing, torch has returned wrong numbers (its issue 136746), and the name may go with a version.

    By their flags AVX-512 with VNNI is meant. Processors with AMX have another kernel, whose time nobody has measured.
    """
    import torch

    if "avx512_vnni" not in (flags := _flags()) or "amx_int8" in flags:
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":  # where a lower one is asked for
        return False
    bank, targets = (torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)) for rows in (160, 70))
    out, bias = torch.empty(70, 160), torch.linspace(-1, 1, 160)
    try:
        IntegerBank(bank).product(bias, targets, out)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    exact = targets.double() @ bank.T.double() + bias
    return float((out - exact).abs().max()) < 1e-2  # similarities are around 10


def _flags() -> frozenset[str]:
    """What the processor says it can do; nothing where there is no /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
