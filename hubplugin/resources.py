"""With what to compute: a device, an amount of memory, and who is told how far it is. Imports no torch."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from hubplugin.errors import InputError, Parameter
from hubplugin.vectors import Progress

if TYPE_CHECKING:
    import torch

LEAST, SAFE = 1 << 20, 1 << 30
"""Bytes: what any work needs, and the default, which is a bound on a small machine, too."""

Precision: TypeAlias = Literal["float32", "float64"]


@dataclass(frozen=True)
class Compute:
    """Where, within what memory and how precisely to compute. Everything that computes takes it as `compute`.

    device: "auto" (cuda, then mps, then cpu) or any torch device name.
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

    def torch_device(self) -> torch.device:
        """The device; raises InputError where it cannot be used here."""
        import torch

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
        import torch

        own = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else sys.maxsize
        device = self.torch_device()
        return own if device.type != "cuda" else max(own, torch.cuda.get_device_properties(device).total_memory)

    @property
    def quiet(self) -> Compute:
        """The same, and nobody is told how far it is."""
        return replace(self, progress=None)

    def report(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)
