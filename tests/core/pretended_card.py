"""A card that is not there: tensors that say "cuda", and count what a card would do.

    with Card(total=80e9) as card:
        hubplugin.fit(targets, bank, compute=hubplugin.Compute("cuda"))
    print(card.launches, card.waits, card.peak)

They raise where tensors of two devices meet, hold real values on the CPU (or, with
values=False, none, for any size), and count launches, waits, bytes up and down and the
peak of memory. Streams and events are stand-ins; freed memory is kept for reuse, as
torch's allocator keeps it. The kernel of Triton's is computed in float64, or by Triton's
interpreter, which test_kernels compares with it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import hubplugin.compute.device
from hubplugin.compute import kernels

WAITING = {"nonzero", "masked_select", "_unique2", "repeat_interleave", "equal"}
"""Operations whose result has a size that the host must wait for."""

current: Card | None = None

if not torch.cuda.is_available() and hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
    torch._C._ensureCUDADeviceGuardSet()  # a guard that does nothing, as for fake tensors


class OnCard(torch.Tensor):
    """A tensor that says "cuda:index"; `inner` has its values, on the CPU or on meta."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: torch.Tensor
    card_index: int

    @staticmethod
    def __new__(cls, inner, index=0):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=f"cuda:{index}",
        )
        made.inner = inner
        made.card_index = index
        current.hold(made)
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return current.run(func, args, kwargs or {})

    def record_stream(self, stream):
        """Accept any stream: there is one."""


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return current.run(func, args, kwargs or {})


class Stream:
    def __init__(self, *_, **__):
        pass

    def wait_stream(self, other):
        pass


class Event(Stream):
    def record(self, stream=None):
        pass

    def synchronize(self):
        current.paced += 1


class Card:
    """Memory and counters of one machine with `devices` cards of `total` bytes.

    values: False for tensors of any size without values. taken: bytes that other
    programs have. capability: of each card. interpreted: by Triton's interpreter.
    """

    def __init__(
        self,
        total=80e9,
        *,
        values=True,
        taken=5e8,
        devices=1,
        capability=(9, 0),
        interpreted=False,
    ):
        self.interpreted = interpreted
        self.total = int(total)
        self.values = values
        self.taken = int(taken)
        self.devices = devices
        self.capability = capability
        self.storages: dict[int, list[int]] = {}
        self.allocated = 0
        self.reserved = 0
        self.reset()

    def reset(self):
        """Set the counters to 0; what is held stays."""
        self.up = self.down = self.waits = self.paced = 0
        self.launches = self.moved = 0
        self.peak = self.allocated
        self.flops: Counter[str] = Counter()

    # Memory

    def hold(self, tensor):
        storage = tensor.inner.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = [0, storage.nbytes()]
            self.allocated += storage.nbytes()
            if self.allocated > self.total - self.taken:
                raise torch.OutOfMemoryError(f"CUDA out of memory: {self.allocated}")
            self.peak = max(self.peak, self.allocated)
            self.reserved = max(self.reserved, self.allocated)
        self.storages[key][0] += 1
        weakref.finalize(tensor, self._drop, key)

    def _drop(self, key):
        holders = self.storages.get(key)
        if holders is None:
            return
        holders[0] -= 1
        if not holders[0]:
            self.allocated -= holders[1]
            del self.storages[key]

    def mem_get_info(self, device=None):
        return self.total - self.taken - self.reserved, self.total

    def wait(self, device=None):
        self.waits += 1

    # Computing

    def run(self, func, args, kwargs):
        flat, _ = tree_flatten((args, kwargs))
        there = [value for value in flat if isinstance(value, OnCard)]
        to = kwargs.get("device")
        to = None if to is None else torch.device(to)
        goes_there = to is not None and to.type == "cuda"
        if goes_there and (to.index or 0) >= self.devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        name = func.overloadpacket.__name__
        if not there and not goes_there:
            kwargs.pop("pin_memory", None)
            if name == "copy_" and not self.values:
                return args[0]  # into a pinned buffer that nobody reads
            return func(*args, **kwargs)
        index = there[0].card_index if there else to.index or 0
        here = [
            value
            for value in flat
            if isinstance(value, torch.Tensor) and not isinstance(value, OnCard)
        ]
        self._require_one_device(name, there, here)
        if name in ("_to_copy", "copy_"):
            copied = self._copy(name, args, kwargs, to, index)
            if copied is not None:
                return copied
        if name == "_local_scalar_dense":
            self.wait()
            return args[0].inner.item() if self.values else 1
        if name in WAITING:
            self.wait()
        if name in ("index", "index_put_"):
            self._index(args[1])
        return self._compute(func, name, args, kwargs, there, index)

    def _require_one_device(self, name, there, here):
        is_mixed = len({tensor.card_index for tensor in there}) > 1
        may_mix = name in ("_to_copy", "copy_", "index", "index_put_")
        has_host = there and any(tensor.dim() for tensor in here)
        if is_mixed or (has_host and not may_mix):
            raise RuntimeError(
                f"Expected all tensors to be on the same device: aten::{name}"
            )

    def _copy(self, name, args, kwargs, to, index):
        """Copy between host and card; None where both lie on the card."""
        if name == "_to_copy":
            source = args[0]
            dtype = kwargs.get("dtype") or source.dtype
            if not isinstance(source, OnCard):
                self.up += source.nbytes
                self.launches += 1
                return OnCard(self._stored(source.to(dtype)), index)
            if to is not None and to.type == "cpu":
                self.down += source.nbytes
                self.wait()
                if self.values:
                    return source.inner.to(dtype).clone()
                return _made_up(source)
            return None
        target, source = args[:2]
        if isinstance(target, OnCard) and isinstance(source, OnCard):
            return None
        if isinstance(target, OnCard):
            self.up += source.nbytes
            self.launches += 1
            if self.values:
                target.inner.copy_(source)
            return target
        self.down += source.nbytes
        self.wait()
        target.copy_(source.inner if self.values else _made_up(source))
        return target

    def _stored(self, tensor):
        return (
            tensor.clone() if self.values else torch.empty_like(tensor, device="meta")
        )

    def _index(self, indices):
        for number in indices:
            if not isinstance(number, torch.Tensor):
                continue
            if number.dtype in (torch.bool, torch.uint8):
                self.wait()
            if not isinstance(number, OnCard):
                self.up += number.nbytes

    def _compute(self, func, name, args, kwargs, there, index):
        where = torch.device("cpu" if self.values else "meta")

        def lower(value):
            if isinstance(value, OnCard):
                return value.inner
            if isinstance(value, torch.Tensor) and not self.values and value.dim():
                return torch.empty(value.shape, dtype=value.dtype, device="meta")
            return where if isinstance(value, torch.device) else value

        inner_args = tree_map(lower, args)
        inner_kwargs = tree_map(lower, kwargs)
        inner_kwargs.pop("pin_memory", None)
        inner_kwargs.pop("non_blocking", None)
        if "device" in inner_kwargs:
            inner_kwargs["device"] = where
        if func is torch.ops.aten.mm.dtype_out:  # the CPU has none
            rows, columns = (factor.float() for factor in inner_args[:2])
            result = torch.mm(rows, columns, out=inner_kwargs["out"])
        else:
            result = func(*inner_args, **inner_kwargs)
        known = {id(tensor.inner): tensor for tensor in there}

        lifted = tree_map(lambda value: _lift(value, known, index), result)
        self._count(name, args, there, known, tree_flatten(lifted)[0])
        return lifted

    def _count(self, name, args, there, known, results):
        """Count a launch and its bytes, unless all that it gives are views."""
        storages = {tensor.inner.untyped_storage()._cdata for tensor in there}
        new = [
            tensor
            for tensor in results
            if isinstance(tensor, OnCard)
            and (
                id(tensor.inner) in known
                or tensor.inner.untyped_storage()._cdata not in storages
            )
        ]
        if not new or name.startswith("empty"):
            return
        self.launches += 1
        tensors = {id(tensor): tensor for tensor in [*there, *new]}
        self.moved += sum(map(_bytes_of, tensors.values()))
        if name in ("mm", "bmm", "mv"):
            rows, columns = args[:2]
            width = columns.shape[1] if columns.dim() > 1 else 1
            kind = f"{name} {str(rows.dtype).removeprefix('torch.')}"
            self.flops[kind] += 2 * rows.numel() * width

    def kernel(self, original, targets, bank, bias, scale):
        """Stand in for `kernels.log_sum_exp`."""
        n, d = targets[0].shape
        m = len(bank[0])
        self.launches += 3
        self.moved += 4 * (n + m) * d
        self.flops["kernel of halves"] += 6 * n * m * d
        index = targets[0].card_index
        if not self.values:
            return OnCard(torch.empty(n, device="meta"), index)
        t = [half.inner for half in targets]
        b = [half.inner for half in bank]
        if self.interpreted:
            return OnCard(original(t, b, bias.inner, scale), index)
        s = (t[0].double() + t[1].double()) @ (b[0].double() + b[1].double()).T
        x = s * scale + bias.inner.double()
        return OnCard(torch.logsumexp(x, 1).float(), index)

    def __enter__(self):
        global current
        current = self
        hubplugin.compute.device.find_device.cache_clear()
        self.stack = contextlib.ExitStack()
        original = kernels.log_sum_exp
        stand_ins = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "mem_get_info": self.mem_get_info,
            "memory_reserved": lambda device=None: self.reserved,
            "memory_allocated": lambda device=None: self.allocated,
            "get_device_capability": lambda device=None: self.capability,
            "get_device_name": lambda device=None: "a card that is not there",
            "synchronize": self.wait,
            "Stream": Stream,
            "Event": Event,
            "current_stream": lambda device=None: Stream(),
            "stream": contextlib.nullcontext,
        }
        for name, value in stand_ins.items():
            self.stack.enter_context(patch.object(torch.cuda, name, value))
        kernel = patch.object(
            kernels,
            "log_sum_exp",
            lambda *args, **more: self.kernel(original, *args, **more),
        )
        self.stack.enter_context(kernel)
        self.stack.enter_context(torch.no_grad())
        self.stack.enter_context(Dispatch())
        return self

    def __exit__(self, *error):
        self.stack.close()
        hubplugin.compute.device.find_device.cache_clear()


def _lift(value, known, index):
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) in known:
        return known[id(value)]
    return OnCard(value, index)


def _made_up(source):
    """Return what comes back of a tensor without values: nothing is wrong with it."""
    made = torch.zeros if source.dtype is torch.bool else torch.ones
    return made(source.shape, dtype=source.dtype)


def _bytes_of(tensor):
    """Return the bytes that a tensor holds: what is expanded counts once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            count *= size
    return count
