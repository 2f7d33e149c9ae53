"""The device, the memory and the array library that computing uses.

numpy and torch share one interface, the array API standard (torch by array-api-compat),
so each formula is written once. Values return from a device by `to_host` alone, once a
pass: each return makes the device wait.
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

LEAST = 1 << 20
"""Bytes that any work needs."""

SAFE = 1 << 30
"""Default bytes of a processor. A larger request is checked against the card."""

SHARE_OF_CARD = 0.7
"""Default share of a card's free memory. The rest is for the temporary results of one
tile. No card has tried it yet."""

FEW = 1e10
"""Products of two numbers that numpy does before an import of torch is over, some 3 s.
An upsert of 1,000 vectors of 384 dimensions against a bank of 15,000 takes 6e9
(benchmarks/serving.py)."""

BLOCKS_AHEAD = 3
"""Uploaded blocks that may wait on a card: one is computed, two keep it busy."""

Precision: TypeAlias = Literal["auto", "float64"]


@cache
def has_torch() -> bool:
    """Return True if torch is installed; it is not imported."""
    return find_spec("torch") is not None


@dataclass(frozen=True)
class Compute:
    """Where and how a job computes: on which device, in how much memory, how precisely.

    Every function that computes takes it as `compute`; the default suits most machines.

    Attributes:
        device: "auto" (cuda, then mps, then cpu), any torch device name, or "numpy".
            "auto" is "numpy" without torch, and for the offsets of few targets.
        memory: Bytes, or text such as "512MiB"; at least 1MiB. Bounds the similarities
            held beside the bank. Default: 1 GiB on a processor, 0.7 of the free memory
            of a card. A Sinkhorn fit with room for m x n in half precision takes the
            time of two or three products.
        progress: Called as progress(what, done, total).
        precision: "auto" is float32, and float64 where similarities are large. It is
            within 1e-5 of exact arithmetic, or 1e-4 of the temperature if that is more
            (5e-4 for a Sinkhorn fit in half precision). "float64" takes twice the time.

    Raises:
        InputError: The precision is unknown, or the memory too small.
    """

    device: str = "auto"
    memory: int | str | None = None
    progress: Progress | None = None
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        known = get_args(Precision)
        if self.precision not in known:
            raise InputError(
                f"precision={self.precision!r} is unknown; use one of {', '.join(known)}"
            )
        if self.memory is not None:
            self.bytes()

    def for_products(self, count: float) -> Compute:
        """Return this, or numpy if `count` products of two numbers are few."""
        if self.device == "auto" and count <= FEW:
            return replace(self, device="numpy")
        return self

    def torch_device(self) -> torch.device | None:
        """Return the device, None for numpy. Raises InputError if it is not usable."""
        is_auto = self.device == "auto"
        if self.device == "numpy" or (is_auto and not has_torch()):
            return None
        if not has_torch():
            raise InputError(
                f"device {self.device!r} needs torch, which is not installed; "
                f"{install('fit')}"
            )
        import torch

        is_double = self.precision == "float64"
        if not is_auto:
            device = find_device(self.device)
            if is_double and device.type == "mps":
                raise InputError(
                    "precision='float64' is not to be had on mps; use device='cpu'"
                )
            return device
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available() and not is_double:
            return torch.device("mps")
        return torch.device("cpu")

    def library(self) -> Library:
        """Return the array library. Raises InputError if the device is not usable."""
        return Library(self.torch_device())

    def settled(self) -> Compute:
        """Return this with `memory` decided: a whole fit goes by one amount."""
        return replace(self, memory=self.bytes())

    def bytes(self) -> int:
        """Return `memory` as a number. Raises InputError if it is no usable amount."""
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
            if 0 < total < size:
                raise InputError(
                    memory,
                    f" is more than the card has; expected {total >> 30}GiB or less",
                )
        return size

    def _card_bytes(self) -> tuple[int, int]:
        """Return free and total bytes of the card; 0 without one.

        Memory that torch keeps for reuse is free; the driver does not count it.
        """
        device = self.torch_device()
        if device is None or device.type != "cuda":
            return 0, 0
        import torch

        free, total = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept, total

    @property
    def without_progress(self) -> Compute:
        """The same, without progress."""
        return replace(self, progress=None)

    def report(self, label: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(label, done, total)


class Library:
    """The array functions of a device, `xp`, named as in the array API standard.

    Attributes:
        device: The torch device; None is numpy.
        is_on_cpu: True if numpy can share the arrays, see `view`: it finds few among
            many several times as fast as torch does.
        accumulator: The type of sums over all targets.
        threads: Threads of the processor that the library uses.
        half, half_peak: See `to_halves`.
    """

    def __init__(self, device: torch.device | None):
        self.device = device
        self.threads = 1
        self.xp: Any = np
        self.half: Any = np.uint16
        self.half_peak = 2.0**-64
        if device is not None:
            import array_api_compat.torch as torch_library

            self.xp = torch_library
            self.threads = self.xp.get_num_threads()
            self.half = self.xp.float16
            self.half_peak = 2.0**14
        self.is_on_cpu = device is None or device.type == "cpu"
        self.has_float64 = device is None or device.type != "mps"
        self.accumulator = self.xp.float64 if self.has_float64 else self.xp.float32

    def to_device(self, array: np.ndarray, dtype: Any = None) -> Array:
        """Return `array` on the device, in its own type or as `dtype`."""
        if self.device is None:
            return array if dtype is None else array.astype(dtype, copy=False)
        import torch

        native = as_torch_reads(array)
        if not native.flags.writeable:  # as a memory map is: torch would warn
            native = native.copy()
        tensor = torch.from_numpy(native)
        if not self.has_float64 and tensor.dtype is torch.float64:
            tensor = tensor.float()
        return tensor.to(self.device, dtype)

    def matching(self, values: np.ndarray) -> Callable[[Array], Array]:
        """Return a function that gives `values` on the device in the type of an array.

        Each type is uploaded once.
        """
        uploaded = cache(lambda dtype: self.to_device(values, dtype))
        return lambda array: uploaded(array.dtype)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array without values."""
        if self.device is None:
            return np.empty(shape, dtype)
        if self.is_on_cpu:
            # numpy asks for large pages, torch does not. What is filled for the first time
            # takes less than half of the time then.
            return self.xp.from_numpy(np.empty(shape, str(dtype).rpartition(".")[2]))
        return self.xp.empty(shape, dtype=dtype, device=self.device)

    def full(self, shape: tuple[int, ...], value: float, dtype: Any = None) -> Array:
        """Return an array that holds `value`, as `dtype` or as `accumulator`."""
        array = self.empty(shape, dtype or self.accumulator)
        array[...] = value
        return array

    def to_halves(self, values: Array, halves: Array) -> None:
        """Write `values` in [0, 1], times `half_peak`, to `halves` of type `half`.

        The float32 `values` are overwritten. numpy converts its float16 one by one, so
        its halves are the bits 13 to 28 of float32: as many of the mantissa as float16
        has, and more of the exponent. `half_peak` makes the other bits 0.
        """
        values *= self.half_peak
        if self.device is None:
            values = values.view(np.uint32)
            values += 1 << 12  # which rounds
            values >>= 13
            values *= values >= 1 << 10  # the rest would be slow to compute with
        halves[...] = values

    def from_halves(self, halves: Array, values: Array) -> None:
        """Write `halves` to `values` of the same shape, float32."""
        if self.device is not None:
            values[...] = halves
            return
        bits = values.view(np.uint32)
        bits[...] = halves
        bits <<= 13

    def upload(
        self, blocks: Iterable[np.ndarray], rows: int, dim: int
    ) -> Iterator[Array]:
        """Yield `blocks` of at most `rows` rows on the device, as float32.

        A card gets them by two pinned buffers and a second stream, so that reading,
        copying and computing go on at the same time.
        """
        import torch

        device = self.device
        if device is None or device.type != "cuda" or not torch.cuda.is_available():
            for block in blocks:
                yield self.to_device(block, self.xp.float32)
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
                # torch copies by all cores, numpy by one.
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
    """Return the torch device called `name`; each is tried once.

    Raises InputError if it cannot be used here.
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
    """Return `block` with byte order, row order and type that torch has."""
    dtype = block.dtype.newbyteorder("=")
    if dtype.itemsize > 8:  # longdouble
        dtype = np.dtype(np.float32)
    return np.ascontiguousarray(block, dtype)


def to_host(array: Array) -> np.ndarray:
    """Return `array` in memory of the processor. A device ends its work first."""
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def view(array: Array) -> np.ndarray:
    """Return an array in memory of the processor as numpy's, without a copy."""
    return array if isinstance(array, np.ndarray) else array.numpy()


def multiply(rows: Array, columns: Array, out: Array | None = None) -> Array:
    """Return `rows` [b, d] times `columns` [d, m] or [d], at full precision.

    A program may allow TF32 or bfloat16 products for its training; ten bits of mantissa
    over tau are not enough here. The setting belongs to the whole process, so it is
    read and never changed. Where it allows less than float32, the product is done in
    float64. It is read again afterwards, since another thread may have changed it.
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


def reduces_precision(factor: torch.Tensor) -> bool:
    """Return True if torch may multiply such tensors at less than their precision."""
    import torch

    backends = {"cpu": torch.backends.mkldnn, "cuda": torch.backends.cuda}
    backend = backends.get(factor.device.type)
    if backend is None or factor.dtype is not torch.float32:
        return False
    # From torch 2.9 on each backend has its own setting, and to ask for the common one
    # can be an error.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return precision not in ("none", "ieee")


def multiplies_halves(device: torch.device | None) -> bool:
    """Return True if `multiply_halves` runs on `device`: CUDA, torch 2.8 or newer."""
    if device is None or device.type != "cuda":
        return False
    import torch

    return hasattr(torch.ops.aten.mm, "dtype")


def split(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unit vectors [n, d] as the sum of two half-precision tensors.

    They hold 22 bits of each component.
    """
    high = vectors.half()
    return high, (vectors - high).half()


def bank_halves(bank: torch.Tensor) -> torch.Tensor:
    """Return a bank of unit vectors [m, d] as [high | low | high], float16 [m, 3d]."""
    import torch

    high, low = split(bank)
    return torch.cat([high, low, high], dim=1)


def multiply_halves(rows: Array, bank: Array, out: Array) -> Array:
    """Write the float32 product of unit vectors `rows` [b, d] and a bank to `out`.

    `bank` is as `bank_halves` gives it. low.high + high.low + high.high is exact to
    some 1e-7, at a quarter of the time of a float32 product.
    """
    import torch

    high, low = split(rows)
    halves = torch.cat([low, high, high], dim=1)
    return torch.mm(halves, bank.T, torch.float32, out=out)
