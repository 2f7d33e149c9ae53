"""With what to compute: torch or numpy, a device, an amount of memory, and who is told how far it is."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from hubplugin.errors import InputError, Parameter
from hubplugin.vectors import Progress

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        """Stands for the module, which is imported when it is first used: fits need it, and a process that only serves
        need not have it. Raises InputError, one line, where it is not installed."""

        def __getattr__(self, name: str) -> Any:
            try:
                import torch
            except ImportError:
                raise InputError(
                    "this computes with torch, which is not installed: pip install 'hubplugin[fit]'"
                ) from None
            return getattr(torch, name)

    torch = _Torch()

LEAST, SAFE = 1 << 20, 1 << 30
"""Bytes: what any work needs, and the default, which is a bound on a small machine, too."""

FEW = 1e10
"""Products of two numbers that numpy does before an import of torch is over, which takes some 3 s: an upsert of 1,000
vectors of 384 dimensions against a bank of 15,000 takes 6e9 (benchmarks/serving.py)."""

Precision: TypeAlias = Literal["float32", "float64"]


@cache
def has_torch() -> bool:
    """Whether torch is installed; it is not imported."""
    return find_spec("torch") is not None


@dataclass(frozen=True)
class Compute:
    """Where, within what memory and how precisely to compute. Everything that computes takes it as `compute`.

    device: "auto" (cuda, then mps, then cpu), any torch device name, or "numpy". Where torch is not installed, and for
        the offsets of few targets (see `FEW`), "auto" is "numpy". Fits need torch.
    memory: bytes, or text such as "512MiB", from 1MiB to what the machine has, or `SAFE` where that is more. It bounds
        what is held of similarities beyond the bank itself. A Sinkhorn fit that finds room for m x n in float16 takes
        the time of one product, else of `iterations`.
    progress: called as progress(what, done, total).
    precision: "float32" is within 1e-5 of exact arithmetic, or of 1e-4 of the temperature where that is more; it goes
        over to float64 by itself where similarities are large. "float64" computes so throughout, at twice the time.

    Raises InputError for a precision that is unknown and for an amount of memory that is no bound here.
    """

    device: str = "auto"
    memory: int | str = SAFE
    progress: Progress | None = None
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise InputError(f"precision={self.precision!r} is unknown; use one of {', '.join(get_args(Precision))}")
        self.bytes()

    @property
    def by_numpy(self) -> bool:
        """Whether numpy computes."""
        return self.device == "numpy" or (self.device == "auto" and not has_torch())

    def for_products(self, count: float) -> Compute:
        """The same for so many products of two numbers: by numpy where they are few."""
        return replace(self, device="numpy") if self.device == "auto" and count <= FEW else self

    def torch_device(self) -> torch.device:
        """The device; raises InputError where it cannot be used here."""
        if self.device == "numpy":
            raise InputError("a fit computes with torch: device 'numpy' has offsets and searches; use 'auto' or 'cpu'")
        double = self.precision == "float64"
        if self.device == "auto":
            if torch.cuda.is_available():
                return torch.device("cuda")
            return torch.device("mps" if torch.backends.mps.is_available() and not double else "cpu")
        try:
            device = torch.device(self.device)
            torch.empty(1, device=device).cpu()
        except (RuntimeError, AssertionError, TypeError) as error:
            reason = str(error).splitlines()[0].partition(". ")[0]
            if "device type" in reason:  # torch lists all it has ever heard of
                reason = "known are cuda, mps and cpu"
            raise InputError(f"device {self.device!r} is not usable here ({reason}); use 'auto' or 'cpu'") from None
        if double and device.type == "mps":
            raise InputError("precision='float64' is not to be had on mps; use device='cpu'")
        return device

    def bytes(self) -> int:
        """`memory` as a number; raises InputError for what is no size, and for one that is no bound here."""
        if self.memory == SAFE:
            return SAFE
        from pydantic import ByteSize, TypeAdapter, ValidationError

        given = Parameter("memory", self.memory)
        try:
            size = int(TypeAdapter(ByteSize).validate_python(self.memory))
        except ValidationError:
            raise InputError(given, " is not a size; write it like '512MiB' or '2GiB'") from None
        if size < LEAST:
            raise InputError(given, f" is too little; expected {LEAST >> 20}MiB or more")
        if size > SAFE and size > (most := self._installed()):
            raise InputError(given, f" is more than this machine has; expected {max(most, SAFE) >> 30}GiB or less")
        return size

    def _installed(self) -> int:
        """The bytes of memory that this machine has, or its device if that has more."""
        own = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else sys.maxsize
        if self.by_numpy or (device := self.torch_device()).type != "cuda":
            return own
        return max(own, torch.cuda.get_device_properties(device).total_memory)

    @property
    def quiet(self) -> Compute:
        """The same, and nobody is told how far it is."""
        return replace(self, progress=None)

    def report(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)
