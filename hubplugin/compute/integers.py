"""Products of float32 vectors by way of eight-bit integers, on a CPU that multiplies those four times as fast.

A number is its row's `scale` times (high + low / 254), both of eight bits. Of the four products of halves the one of
two low halves is left out, and the two small ones are one product of twice the length:

    s(b, t) = scale_b scale_t / 254 * ( 254 high_t . high_b + [low_t high_t] . [high_b low_b] )

Sums of integers are exact. What is lost is that last product and what the low halves round off: for unit vectors of
384 dimensions some 3e-6 on average. It is as good as random, so it averages out over a bank. How large it is, is
measured on a strip of every tile.

There are two kernels, each slow where the other is fast. With VNNI, torch multiplies matrices as they lie. With AMX
that is no faster than float32, for a bank is laid out anew in every product; so it is laid out once, and the second
product adds to the first and scales the columns on its way.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
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
        high, low, scale = (torch.cat(each) for each in parts)
        self._scale = (scale[:, 0] / LOW).contiguous()
        self._longest = _longest(high)
        self._kernel = (_LaidOut if _AMX in _flags() else _AsTheyLie)(high, torch.cat([high, low], dim=1), self._scale)
        by_scale = scale[:, 0].argsort(descending=True)
        self._columns = torch.cat([by_scale[:STRIP], by_scale[STRIP :: max(len(bank) // STRIP, 1)]])
        self._strip = bank[self._columns].T.double()

    def product(self, bias: torch.Tensor, targets: torch.Tensor, out: torch.Tensor) -> float:
        """`bias` [m] + `targets` [b, d] times the bank, written to `out` [b, m]; returns the largest error in the
        strip, which is infinite where the sums of integers might not fit."""
        import torch

        high, low, scale = _halves(targets, TARGET_STEPS)
        largest = LOW * self._longest * _longest(high) + 2 * 128**2 * targets.shape[1]
        if not largest < 2**31:
            return math.inf
        torch.addcmul(bias, self._kernel.sums(high, torch.cat([low, high], dim=1), out), scale, out=out)
        exact = targets.double() @ self._strip + bias[self._columns]
        return float((out[:, self._columns] - exact).abs().max())


@dataclass(frozen=True)
class Coarse:
    """What a tile of integer products comes from, for the entries that must be exact: `bias` [m] + `targets` [b, d]
    times `bank` [m, d]. error: the largest of the tile, safely."""

    bias: torch.Tensor
    targets: torch.Tensor
    bank: torch.Tensor
    error: float

    def exact(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Of single entries, all by themselves, in the order of their rows: [e]."""
        import torch

        size = len(self.targets), len(self.bank)
        ends = torch.bincount(rows + 1, minlength=size[0] + 1).cumsum(0)
        where = torch.sparse_csr_tensor(ends, columns, self.bias[columns], size, check_invariants=False)
        # Without copies of the vectors of each entry, which take ten times as long as to multiply them.
        values: torch.Tensor = torch.sparse.sampled_addmm(where, self.targets, self.bank.T).values()
        return values


class _AsTheyLie:
    """Sums by `torch._int_mm`, for AVX-512 with VNNI. The bank's `high` [m, d], and [high low] [m, 2d]."""

    def __init__(self, high: torch.Tensor, both: torch.Tensor, scale: torch.Tensor):
        self._high, self._both, self._scale = high, both, scale
        self._other: Any = None

    def sums(self, high: torch.Tensor, both: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """254 high_t . high_b + [low_t high_t] . [high_b low_b] of some targets, times the bank's scales [m]; may be
        written to `out` [b, m]."""
        import torch

        if self._other is None or self._other.shape != out.shape:
            self._other = torch.empty(out.shape, dtype=torch.int32)
        # The sum takes the place of the result, so that a tile and its integers stay in cache.
        small = out.view(torch.int32)
        torch._int_mm(both, self._both.T, out=small)
        torch._int_mm(high, self._high.T, out=self._other)
        small.add_(self._other, alpha=LOW)
        return out.copy_(small).mul_(self._scale)


class _LaidOut:
    """Sums by oneDNN's quantized product, for AMX, as of `_AsTheyLie`."""

    def __init__(self, high: torch.Tensor, both: torch.Tensor, scale: torch.Tensor):
        import torch

        self._ops: Any = torch.ops.onednn
        self._high, self._both = (self._ops.qlinear_prepack(rows, [64, rows.shape[1]]) for rows in (high, both))
        self._scale, self._zeros = scale, torch.zeros(len(scale), dtype=torch.int32)

    def sums(self, high: torch.Tensor, both: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        import torch

        multiply, nothing = self._ops.qlinear_pointwise, ("none", (), "")
        bank, kind = (self._scale, self._zeros), (1.0, 0, torch.float32)  # what is written: of scale 1 and zero 0
        sums: torch.Tensor = multiply(both, 1.0, 0, self._both, *bank, None, *kind, *nothing)
        # Adds to them in place.
        multiply.binary(high, LOW, 0, self._high, *bank, sums, None, *kind, 1.0, 0, "sum", 1.0, *nothing)
        return sums


def _halves(rows: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """High and low, int8 [b, d], and the scale [b, 1] of one step of high."""
    import torch

    scale = rows.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny * 2 * steps) / steps
    scaled = rows / scale
    high = scaled.round()
    return high.to(torch.int8), scaled.sub_(high).mul_(LOW).round_().to(torch.int8), scale


def _longest(high: torch.Tensor) -> float:
    return float(high.float().square_().sum(dim=1).max().sqrt())


_VNNI, _AMX = "avx512_vnni", "amx_int8"

SLOWEST = 0.05
"""Seconds for a tile that any kernel multiplies in a thousandth of it. A loop that stands in for one takes longer."""


@cache
def are_fast() -> bool:
    """Whether this CPU multiplies integers faster, and truly, which one tile tells.

    By their flags AVX-512 with VNNI is meant, or AMX. Where a kernel is missing, torch has returned wrong numbers (its
    issue 136746), or takes a loop (where a library is told to keep to lower instructions). And none of the names that
    are called here is public: each may go with a version.
    """
    import torch

    if _VNNI not in _flags():
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":  # where a lower one is asked for
        return False
    bank, targets = (torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)) for rows in (80, 35))
    out, bias, took = torch.empty(35, 80), torch.linspace(-1, 1, 80), []
    try:
        ready = IntegerBank(bank)
        for _ in range(3):  # other work on the machine may hold one up
            start = time.perf_counter()
            ready.product(bias, targets, out)
            took.append(time.perf_counter() - start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says, once a process, that its sparse matrices are new
            some = Coarse(bias, targets, bank, 0.0).exact(torch.arange(35), torch.arange(35))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    exact = targets.double() @ bank.T.double() + bias
    alike = float((out - exact).abs().max()) < 1e-2  # similarities are around 10
    return alike and min(took) < SLOWEST and float((some - exact.diagonal()).abs().max()) < 1e-4


def _flags() -> frozenset[str]:
    """What the processor says it can do; nothing where there is no /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
