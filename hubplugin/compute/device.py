"""With what to compute: a device, the memory that may be used, and the array library that serves it.

numpy and torch answer to one interface, the array API standard (torch by array-api-compat), so a formula is written
once. Values return from a device by `to_host` alone, once a pass: each return makes the device wait.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from hubplugin.errors import InputError, Parameter, install
from hubplugin.vectors import Progress

if TYPE_CHECKING:
    import torch

Array: TypeAlias = Any
"""A numpy array, or a torch tensor on any device."""

LEAST, SAFE = 1 << 20, 1 << 30
"""Bytes: what any work needs, and the default of a processor, which is a bound on a small machine, too."""

SHARE_OF_CARD = 0.7
"""Of the free memory of a card, the default: the rest is for one tile's temporary results. No card has tried it yet."""

FEW = 1e10
"""Products of two numbers that numpy does before an import of torch is over, which takes some 3 s: an upsert of 1,000
vectors of 384 dimensions against a bank of 15,000 takes 6e9 (benchmarks/serving.py)."""

BLOCKS_AHEAD = 3
"""Uploaded blocks that may wait on a card for computing: one is computed, two keep it busy."""

Precision: TypeAlias = Literal["auto", "float64"]


@cache
def has_torch() -> bool:
    """Return True if torch is installed; it is not imported."""
    return find_spec("torch") is not None


@dataclass(frozen=True)
class Compute:
    """A device, a bound of memory and a precision. Everything that computes takes it as `compute`.

    device: "auto" (cuda, then mps, then cpu), any torch device name, or "numpy". Where torch is not installed, and for
        the offsets of few targets (see `FEW`), "auto" is "numpy".
    memory: bytes, or text such as "512MiB", from 1MiB on. It bounds what is held of similarities beyond the bank
        itself. By default 1 GiB on a processor, and on a card `SHARE_OF_CARD` of what it has free. A Sinkhorn fit that
        finds room for m x n in half precision takes the time of two or three products.
    progress: called as progress(what, done, total).
    precision: "auto" is within 1e-5 of exact arithmetic, or of 1e-4 of the temperature where that is more (5e-4 for
        the gallery of a Sinkhorn fit in half precision): float32, and float64 by itself where similarities are large.
        "float64" computes so throughout, at twice the time.

    Raises InputError for an unknown precision, and for too little memory.
    """

    device: str = "auto"
    memory: int | str | None = None
    progress: Progress | None = None
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise InputError(
                f"precision={self.precision!r} is unknown; use one of {', '.join(get_args(Precision))}"
            )
        if self.memory is not None:
            self.bytes()

    @property
    def uses_numpy(self) -> bool:
        return self.device == "numpy" or (self.device == "auto" and not has_torch())

    def for_products(self, count: float) -> Compute:
        """The same for so many products of two numbers: by numpy where they are few."""
        return (
            replace(self, device="numpy")
            if self.device == "auto" and count <= FEW
            else self
        )

    def torch_device(self) -> torch.device:
        """The device; raises InputError where it cannot be used here."""
        if not has_torch():
            raise InputError(
                f"device {self.device!r} needs torch, which is not installed; {install('fit')}"
            )
        import torch

        double = self.precision == "float64"
        if self.device == "auto":
            if torch.cuda.is_available():
                return torch.device("cuda")
            return torch.device(
                "mps" if torch.backends.mps.is_available() and not double else "cpu"
            )
        device = find_device(self.device)
        if double and device.type == "mps":
            raise InputError(
                "precision='float64' is not to be had on mps; use device='cpu'"
            )
        return device

    def settled(self) -> Compute:
        """Return the same with `memory` decided: a whole fit goes by one amount."""
        return replace(self, memory=self.bytes())

    def library(self) -> Library:
        """The array library of the device; raises InputError where it cannot be used here."""
        return Library(None) if self.uses_numpy else Library(self.torch_device())

    def bytes(self) -> int:
        """Return `memory` as a number; raises InputError for too little and for other texts."""
        if self.memory is None:
            free, total = self._card_bytes()
            return max(int(SHARE_OF_CARD * free), LEAST) if total else SAFE
        from pydantic import ByteSize, TypeAdapter, ValidationError

        memory = Parameter("memory", self.memory)
        try:
            size = int(TypeAdapter(ByteSize).validate_python(self.memory))
        except ValidationError:
            size = 0
        if size < LEAST:
            raise InputError(
                memory,
                f": expected {LEAST:,} or more, as bytes or as '512MiB' or '2GiB'",
            )
        if size > SAFE:
            _, total = self._card_bytes()
            if total and size > total:
                raise InputError(
                    memory,
                    f" is more than the card has; expected {total >> 30}GiB or less",
                )
        return size

    def _card_bytes(self) -> tuple[int, int]:
        """Return free and total memory of the card that computes; 0 where none does.

        What torch keeps of freed memory is free: the driver does not count it.
        """
        if self.uses_numpy or (device := self.torch_device()).type != "cuda":
            return 0, 0
        import torch

        free, total = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept, total

    @property
    def without_progress(self) -> Compute:
        return replace(self, progress=None)

    def report(self, label: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(label, done, total)


class Library:
    """The functions of arrays on a device, `xp`, by the names of the array API standard.

    device: of torch; None is numpy. is_on_cpu: whether arrays lie in memory of the processor, where `view` shows them
    to numpy, which looks for few among many several times as fast as torch does. accumulator: the type of sums over
    all targets. threads: of a processor, that the library uses. half, half_peak: see `to_halves`.
    """

    def __init__(self, device: torch.device | None):
        self.device, self.threads = device, 1
        self.xp: Any = np
        if device is not None:
            import array_api_compat.torch as torch_library

            self.xp = torch_library
            self.threads = self.xp.get_num_threads()
        self.is_on_cpu = device is None or device.type == "cpu"
        self.has_float64 = device is None or device.type != "mps"
        self.accumulator = self.xp.float64 if self.has_float64 else self.xp.float32
        self.half = np.uint16 if device is None else self.xp.float16
        self.half_peak = 2.0**-64 if device is None else 2.0**14

    def to_device(self, array: np.ndarray, dtype: Any = None) -> Array:
        """`array` on the device, as `dtype`, by default the type that it has."""
        if self.device is None:
            return array if dtype is None else array.astype(dtype, copy=False)
        import torch

        # What a memory map or a model file gives is read-only, of which torch would warn.
        native = as_torch_reads(array)
        tensor = torch.from_numpy(native if native.flags.writeable else native.copy())
        if not self.has_float64 and tensor.dtype is torch.float64:
            tensor = tensor.float()
        return tensor.to(self.device, dtype)

    def like(self, values: np.ndarray) -> Callable[[Array], Array]:
        """A function that gives `values` on the device in the type of a tile; each type is uploaded once."""
        uploaded = cache(lambda dtype: self.to_device(values, dtype))
        return lambda tile: uploaded(tile.dtype)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return (
            self.xp.empty(shape, dtype=dtype, device=self.device)
            if self.device
            else np.empty(shape, dtype)
        )

    def full(self, shape: tuple[int, ...], value: float, dtype: Any = None) -> Array:
        """An array of this `shape` that holds `value` everywhere, of type `dtype`, by default `accumulator`."""
        array = self.empty(shape, dtype or self.accumulator)
        array[...] = value
        return array

    def to_halves(self, values: Array, halves: Array) -> None:
        """Writes `values` in [0, 1], float32, which it overwrites, times `half_peak` to `halves`, as numbers of type
        `half`.

        numpy converts its float16 one by one, so its halves are the bits 13 to 28 of float32: as many of the mantissa
        as float16 has, and more of the exponent. `half_peak` makes the other bits 0.
        """
        values *= self.half_peak
        if self.device is None:
            values = values.view(np.uint32)
            values += 1 << 12  # which rounds
            values >>= 13
            values *= values >= 1 << 10  # the rest would be slow to compute with
        halves[...] = values

    def from_halves(self, halves: Array, values: Array) -> None:
        """Writes `halves` to `values` of the same shape, float32."""
        if self.device is not None:
            values[...] = halves
        else:
            bits = values.view(np.uint32)
            bits[...] = halves
            bits <<= 13

    def upload(
        self, blocks: Iterable[np.ndarray], rows: int, dim: int
    ) -> Iterator[Array]:
        """Uploads `blocks` of at most `rows` rows of `dim` numbers to the device, as float32.

        A card gets them by two pinned buffers and a second stream, so that reading, copying and computing go on at the
        same time.
        """
        import torch

        device = self.device
        if device is None or device.type != "cuda" or not torch.cuda.is_available():
            yield from (self.to_device(block, self.xp.float32) for block in blocks)
            return
        buffers = [torch.empty(rows, dim, pin_memory=True) for _ in range(2)]
        copies = [torch.cuda.Event() for _ in buffers]
        copying = torch.cuda.Stream(device)
        computing = torch.cuda.current_stream(device)
        waiting = deque[torch.cuda.Event]()
        for number, block in enumerate(blocks):
            side = number % 2
            if number > 1:
                copies[side].synchronize()
            pinned = buffers[side][: len(block)]
            with warnings.catch_warnings():  # torch warns of a read-only map
                warnings.simplefilter("ignore", UserWarning)
                # By all cores, which numpy does not.
                pinned.copy_(torch.from_numpy(as_torch_reads(block)))
            with torch.cuda.stream(copying):
                uploaded = pinned.to(device, non_blocking=True)
                copies[side].record(copying)
            computing.wait_stream(copying)
            uploaded.record_stream(computing)
            yield uploaded
            computed = torch.cuda.Event()
            computed.record(computing)
            waiting.append(computed)
            if len(waiting) == BLOCKS_AHEAD:
                waiting.popleft().synchronize()


@cache
def find_device(name: str) -> torch.device:
    """Return the device of a name that torch knows; each is tried once.

    Raises:
        InputError: it cannot be used here.
    """
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        if "device type" in reason:  # torch lists all it has ever heard of
            reason = "known are cuda, mps and cpu"
        raise InputError(
            f"device {name!r} is not usable here ({reason}); use 'auto' or 'cpu'"
        ) from None
    return device


def as_torch_reads(block: np.ndarray) -> np.ndarray:
    """Return `block` in the order of bytes and rows, and with a type, that torch has."""
    dtype = block.dtype.newbyteorder("=")
    if dtype.itemsize > 8:  # longdouble
        dtype = np.dtype(np.float32)
    return np.ascontiguousarray(block, dtype)


def to_host(array: Array) -> np.ndarray:
    """`array` in memory of the processor. A device ends all of its work first."""
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def view(array: Array) -> np.ndarray:
    """An array that lies in memory of the processor, as numpy's, without a copy."""
    return array if isinstance(array, np.ndarray) else array.numpy()


def multiply(rows: Array, columns: Array, out: Array | None = None) -> Array:
    """`rows` [b, d] times `columns` [d, m] or [d], written to `out` if given, at the full precision of their type.

    A program may have allowed TF32 or bfloat16 products for its training; ten bits of mantissa over tau are not enough
    here. The setting belongs to the whole process, so it is read and never changed: where it allows less than float32,
    the product is done in float64. It is read again afterwards, since another thread may have changed it.
    """
    if isinstance(rows, np.ndarray):
        return np.matmul(rows, columns, out=out)
    import torch

    # A product with a vector has no TF32 on a card; on a CPU it may be in bfloat16.
    is_safe = rows.device.type == "cuda" and columns.ndim == 1
    if is_safe or not reduces_precision(rows):
        result = torch.matmul(rows, columns, out=out)
        if is_safe or not reduces_precision(rows):
            return result
    exact = torch.matmul(rows.double(), columns.double()).to(rows.dtype)
    return exact if out is None else out.copy_(exact)


def multiplies_halves(device: torch.device | None) -> bool:
    """Return True if `multiply_halves` runs on `device`: CUDA with torch 2.8 or newer."""
    if device is None or device.type != "cuda":
        return False
    import torch

    return hasattr(torch.ops.aten.mm, "dtype")


def split(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unit vectors [n, d] as the sum of two half-precision tensors.

    They hold 22 bits of each component.
    """
    import torch

    high = vectors.to(torch.float16)
    return high, (vectors - high).to(torch.float16)


def multiply_halves(rows: Array, columns: Array, out: Array) -> Array:
    """Write the float32 product of unit vectors `rows` [b, 3d] and `columns` [m, 3d].

    Both are as `beside` gives them: low.high + high.low + high.high is exact to some
    1e-7, at a quarter of the time of a float32 product.
    """
    import torch

    return torch.mm(rows, columns.T, torch.float32, out=out)


def beside(vectors: torch.Tensor, *, of_bank: bool) -> torch.Tensor:
    """Return the halves of unit vectors [n, d] beside each other: float16 [n, 3d]."""
    import torch

    high, low = split(vectors)
    return torch.cat([high, low, high] if of_bank else [low, high, high], dim=1)


def reduces_precision(factor: torch.Tensor) -> bool:
    """Return True if torch may multiply such tensors at less than their precision."""
    import torch

    if factor.dtype is not torch.float32 or factor.device.type not in ("cpu", "cuda"):
        return False
    backend = (
        torch.backends.cuda if factor.device.type == "cuda" else torch.backends.mkldnn
    )
    # From torch 2.9 on each backend has a setting of its own, and to ask for the common one can be an error.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return precision not in ("none", "ieee")
