"""Choose the device, the memory and the array library of a computation.

numpy and torch share one interface, the array API standard (torch through
array-api-compat), so each formula is written once. Only `to_host` copies values from a
device, once per pass, since each copy makes the device wait.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
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

SMALLEST_MEMORY = 1 << 20
"""The smallest amount of memory that a computation accepts, in bytes."""

CPU_MEMORY = 1 << 30
"""The default on a CPU, in bytes. A larger amount is compared with the GPU's memory."""

SHARE_OF_CARD = 0.7
"""Default share of a GPU's free memory. The rest is for the temporary results of one
tile. It has not been tried on a GPU yet."""

BLOCKS_AHEAD = 3
"""Uploaded blocks that a GPU may hold: it computes with one, and two keep it busy."""

Precision: TypeAlias = Literal["auto", "float64"]


@cache
def has_torch() -> bool:
    """Return True if torch is installed, without importing it."""
    return find_spec("torch") is not None


@dataclass(frozen=True)
class Compute:
    """The device, memory and precision of a computation.

    Functions that compute take it as `compute`; the default suits most machines.

    Attributes:
        device: "auto" (cuda, then mps, then cpu), any torch device name, or "numpy".
            "auto" is "numpy" without torch, and for the offsets of few targets.
        memory: Bytes, or text such as "512MiB"; at least 1MiB. Bounds the similarities
            held in addition to the bank. Default: 1 GiB on a CPU, 0.7 of the free
            memory of a GPU. A Sinkhorn fit with room for m x n numbers in half
            precision takes the time of two or three products.
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

    def torch_device(self) -> torch.device | None:
        """Return the torch device, or None for numpy.

        Raises InputError if the device is not usable.
        """
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
                    "precision='float64' is not available on mps; use device='cpu'"
                )
            return device
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available() and not is_double:
            return torch.device("mps")
        return torch.device("cpu")

    def bytes(self) -> int:
        """Return `memory` in bytes. Raises InputError if it is not a usable amount."""
        if self.memory is None:
            device = self.torch_device()
            if device is None or device.type != "cuda":
                return CPU_MEMORY
            free, _ = card_bytes(device)
            return max(int(SHARE_OF_CARD * free), SMALLEST_MEMORY)
        parameter = Parameter("memory", self.memory)
        size = self.memory
        if not isinstance(size, int):
            size = parse_bytes(size)
        if size < SMALLEST_MEMORY:
            raise InputError(
                parameter,
                f": expected {SMALLEST_MEMORY:,} or more, as bytes or as '512MiB' or "
                "'2GiB'",
            )
        # A smaller amount fits on any GPU: skip the check, which imports torch.
        if size > CPU_MEMORY:
            device = self.torch_device()
            if device is not None and device.type == "cuda":
                _, total = card_bytes(device)
                if size > total:
                    raise InputError(
                        parameter,
                        f" is more than the GPU has; expected {total >> 30}GiB or less",
                    )
        return size

    @property
    def without_progress(self) -> Compute:
        """This object without `progress`."""
        return replace(self, progress=None)

    def report(self, label: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(label, done, total)


def parse_bytes(text: str) -> int:
    """Return the bytes in a text such as "512MiB"; 0 if it is no amount."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        return 0


def card_bytes(device: torch.device) -> tuple[int, int]:
    """Return the free and total bytes of a GPU.

    Memory that torch keeps for reuse counts as free; the driver does not count it.
    """
    import torch

    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + kept, total


class Library:
    """The array functions of a device, `xp`, named as in the array API standard.

    Attributes:
        device: The torch device; None is numpy.
        is_on_cpu: True if `to_host` copies nothing. Entries are then searched for by
            numpy, which finds a few among many several times as fast as torch.
        has_float64: False on mps.
        accumulator: The dtype of sums over all targets.
        multiplies_halves: True if `multiply_halves` runs: CUDA, torch 2.8 or newer.
        half: The dtype of the halves that `to_halves` writes.
        half_peak: The value of the largest of these halves in each row.
    """

    def __init__(self, compute: Compute):
        """Raise InputError if the device is not usable."""
        self.device = device = compute.torch_device()
        kind = "cpu" if device is None else device.type
        self.xp: Any = np
        self.half: Any = np.uint16
        self.half_peak = 2.0**-64
        self.multiplies_halves = False
        if device is not None:
            import array_api_compat.torch as torch_library

            self.xp = torch_library
            self.half = self.xp.float16
            self.half_peak = 2.0**14
            if kind == "cuda":
                self.multiplies_halves = hasattr(self.xp.ops.aten.mm, "dtype")
        self.is_on_cpu = kind == "cpu"
        self.has_float64 = kind != "mps"
        self.accumulator = self.xp.float64 if self.has_float64 else self.xp.float32

    def to_device(self, array: np.ndarray, dtype: Any = None) -> Array:
        """Return `array` on the device, converted to `dtype` if it is given."""
        if self.device is None:
            return array if dtype is None else array.astype(dtype, copy=False)
        import torch

        if not array.flags.writeable:  # such as a memory map: torch would warn
            array = array.copy()
        tensor = torch.from_numpy(array)
        if not self.has_float64 and tensor.dtype is torch.float64:
            tensor = tensor.float()
        return tensor.to(self.device, dtype)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an uninitialised array."""
        if self.device is None:
            return np.empty(shape, dtype)
        if self.is_on_cpu:
            # numpy asks for large pages and torch does not. Large pages more than halve
            # the time of the first write.
            return self.xp.from_numpy(np.empty(shape, str(dtype).rpartition(".")[2]))
        return self.xp.empty(shape, dtype=dtype, device=self.device)

    def to_halves(self, values: Array, halves: Array) -> Array:
        """Write positive `values` [b, m], scaled row by row, to `halves`.

        The scale of a row makes its largest half `half_peak`. The float32 `values` are
        overwritten.

        numpy converts float16 numbers one by one, so for numpy, halves are bits 13 to
        28 of float32: as many mantissa bits as float16 has, and more exponent bits. No
        half exceeds `half_peak`, so bits 29 to 31 are 0. Bits 0 to 12 are rounded away.

        Returns:
            The log of each row's scale, the quotient of values and halves: [b].
        """
        tiny = float(self.xp.finfo(self.xp.float32).tiny)
        scale = self.xp.clip(self.xp.max(values, axis=1), min=tiny) / self.half_peak
        values /= scale[:, None]
        if self.device is None:
            values = values.view(np.uint32)
            values += 1 << 12  # round to nearest
            values >>= 13
            # Halves below 1 << 10 have the exponent 0: such subnormal numbers are slow.
            values *= values >= 1 << 10
        halves[...] = values
        return self.xp.log(scale)

    def from_halves(self, halves: Array, values: Array) -> None:
        """Convert `halves` to float32, and write them to `values` of the same shape.

        They are not multiplied by the scale of `to_halves`.
        """
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

        A GPU receives them through two pinned buffers and a second stream, so that
        reading, copying and computing overlap.
        """
        import torch

        device = self.device
        if device is None or device.type != "cuda" or not torch.cuda.is_available():
            for block in blocks:
                yield self.to_device(to_torch_layout(block), self.xp.float32)
            return
        # A program may have set another dtype or device as torch's default.
        buffers = [
            torch.empty(rows, dim, dtype=torch.float32, device="cpu", pin_memory=True)
            for _ in range(2)
        ]
        copies = [torch.cuda.Event() for _ in buffers]
        copy_stream = torch.cuda.Stream(device)
        compute_stream = torch.cuda.current_stream(device)
        pending = deque[torch.cuda.Event]()
        for number, block in enumerate(blocks):
            slot = number % 2
            if number > 1:
                # The buffer still holds the block before the last until it is copied.
                copies[slot].synchronize()
            pinned = buffers[slot][: len(block)]
            with warnings.catch_warnings():  # torch warns about a read-only map
                warnings.simplefilter("ignore", UserWarning)
                # torch copies on all cores, numpy on one.
                pinned.copy_(torch.from_numpy(to_torch_layout(block)))
            with torch.cuda.stream(copy_stream):
                uploaded = pinned.to(device, non_blocking=True)
                copies[slot].record(copy_stream)
            compute_stream.wait_stream(copy_stream)
            uploaded.record_stream(compute_stream)
            yield uploaded
            computed = torch.cuda.Event()
            computed.record(compute_stream)
            pending.append(computed)
            if len(pending) == BLOCKS_AHEAD:
                pending.popleft().synchronize()


@cache
def find_device(name: str) -> torch.device:
    """Return the torch device called `name`, after trying it once.

    Raises InputError if the device is not usable here.
    """
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        if "device type" in reason:  # torch lists every device type it knows
            reason = "expected cuda, mps or cpu"
        raise InputError(
            f"device {name!r} is not usable here ({reason}); use 'auto' or 'cpu'"
        ) from None
    return device


def to_torch_layout(block: np.ndarray) -> np.ndarray:
    """Return `block` in a byte order, row order and dtype that torch supports."""
    dtype = block.dtype.newbyteorder("=")
    if dtype.itemsize > 8:  # longdouble
        dtype = np.dtype(np.float32)
    return np.ascontiguousarray(block, dtype)


def to_host(array: Array) -> np.ndarray:
    """Return `array` as a numpy array, without a copy if it is in CPU memory.

    A GPU finishes its work first.
    """
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def multiply(rows: Array, columns: Array, out: Array | None = None) -> Array:
    """Return `rows` [b, d] times `columns` [d, m] or [d], at full precision.

    A program may allow TF32 or bfloat16 products for training, but ten bits of mantissa
    are not enough here, where products are divided by tau. The setting belongs to the
    whole process, so it is read and never changed. If it allows less than float32, the
    product is computed in float64. The setting is read again after the product, since
    another thread may have changed it meanwhile.
    """
    if isinstance(rows, np.ndarray):
        return np.matmul(rows, columns, out=out)
    import torch

    # A GPU never multiplies by a vector in TF32, but a CPU may do so in bfloat16.
    is_safe = rows.device.type == "cuda" and columns.ndim == 1
    if is_safe or not reduces_precision(rows):
        result = torch.matmul(rows, columns, out=out)
        if is_safe or not reduces_precision(rows):
            return result
    exact = torch.matmul(rows.double(), columns.double()).to(rows.dtype)
    return exact if out is None else out.copy_(exact)


def reduces_precision(factor: torch.Tensor) -> bool:
    """Return True if torch may multiply `factor` at less than its precision."""
    import torch

    backends = {"cpu": torch.backends.mkldnn, "cuda": torch.backends.cuda}
    backend = backends.get(factor.device.type)
    if backend is None or factor.dtype is not torch.float32:
        return False
    # From torch 2.9 on, each backend has a setting; reading the common one may fail.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return precision not in ("none", "ieee")


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

    `bank` comes from `bank_halves`. The sum low.high + high.low + high.high is exact to
    some 1e-7, and takes a quarter of the time of a float32 product. Side by side, the
    halves give all three products in one multiplication.
    """
    import torch

    high, low = split(rows)
    halves = torch.cat([low, high, high], dim=1)
    return torch.mm(halves, bank.T, torch.float32, out=out)
