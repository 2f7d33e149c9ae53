"""What is large in a tile: the k largest of every row, and the entries that reach a level.

numpy does most of it on a CPU, where it is several times as fast as torch; a device has torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

Array: TypeAlias = Any
"""A numpy array or a torch tensor. A formula is written once, in functions that both modules have under one name;
`module_of(array)` is the module."""

GROUP = 8
"""Columns of a group."""

SORTED = 256
"""The longest rows that are sorted at once on a CPU. Up to here numpy's sort keeps a row in registers: 0.5 us for 256;
four times as long for 272. torch.topk takes 2.5 us."""


ANSWER_SLACK = 1e-6
"""By how much a similarity may lie below a level and still count as at it, beside the larger of 1 and the level: what
float32 products of other shapes differ by."""


def largest(s: Array, k: int) -> tuple[Array, Array]:
    """The k largest of every row of s [b, m], the largest first, k <= m: values and columns, [b, k] each."""
    b, m = s.shape
    if isinstance(s, np.ndarray):
        some = s.argmax(axis=1)[:, None] if k == 1 else np.argpartition(s, m - k, axis=1)[:, m - k :]
        values = np.take_along_axis(s, some, axis=1)
        order = np.argsort(-values, axis=1, kind="stable")
        return np.take_along_axis(values, order, axis=1), np.take_along_axis(some, order, axis=1)
    import torch

    groups = m // GROUP
    if k == 1 and s.device.type == "cpu":  # numpy reads it at the speed of the cache, torch.argmax at a tenth of that
        columns = torch.from_numpy(s.numpy().argmax(axis=1))[:, None]
    elif groups <= k or m <= SORTED:
        columns = _places(s, k)
    else:
        # A group is every groups-th column, so that maxima are taken over contiguous parts of a row.
        best = largest(s.as_strided((b, GROUP, groups), (s.stride(0), groups, 1)).amax(dim=1), k)[1]
        members = best[:, None, :] + groups * torch.arange(GROUP, device=s.device)[:, None]
        rest = torch.arange(GROUP * groups, m, device=s.device)
        members = torch.cat([members.flatten(1), rest.expand(b, -1)], dim=1)
        columns = members.gather(1, _places(s.gather(1, members), k))
    return s.gather(1, columns), columns


def reaching(s: Array, levels: Array, highest: Array) -> tuple[Array, Array]:
    """Rows and columns of the entries of s [b, m] that are at least their column's level [m]; `highest` [m] is the
    largest of each column. Most columns have none."""
    if isinstance(s, np.ndarray):
        return np.nonzero(s >= levels)  # type: ignore[return-value]
    import torch

    some = (highest >= levels).nonzero()[:, 0]
    if 2 * len(some) < s.shape[1]:
        s, levels = s.index_select(1, some), levels[some]
    else:  # to read all costs less than to copy the half
        some = torch.arange(s.shape[1], device=s.device)
    if s.device.type == "cpu":  # where numpy compares, and finds few, much faster than torch
        places = torch.from_numpy(np.flatnonzero(s.numpy() >= levels.numpy()))
    else:
        places = (s >= levels).flatten().nonzero()[:, 0]
    return places // max(len(some), 1), some[places % max(len(some), 1)]


def reached(levels: np.ndarray, slack: float = ANSWER_SLACK) -> np.ndarray:
    """The similarities [m] from which on an entry counts as at its level: see `ANSWER_SLACK`."""
    least: np.ndarray = levels - slack * np.maximum(np.abs(levels), 1.0)
    return least


def _places(s: torch.Tensor, k: int) -> torch.Tensor:
    """Of the k largest of every row [b, m], the largest first: int64 [b, k]."""
    import torch

    if s.device.type != "cpu" or s.dtype is torch.float64 or 2 * k > SORTED:
        return s.topk(k, dim=1).indices
    # A float32 leaves 29 bits of a float64 free, and they hold its place: so numpy's sort, which is the fastest at
    # hand, tells places too.
    m = s.shape[1]
    keys = s.double().clamp_(min=torch.finfo(torch.float32).min).view(torch.int64)
    keys = keys.bitwise_or_(torch.arange(m)).view(torch.float64)
    while (width := keys.shape[1]) > SORTED:
        chunks = -(-width // SORTED)
        keys = torch.nn.functional.pad(keys, (0, chunks * SORTED - width), value=-np.inf)
        keys = _sorted(keys.view(-1, SORTED))[:, -k:].reshape(len(s), chunks * k)
    return (_sorted(keys)[:, -k:].flip(1).view(torch.int64)) & ((1 << 29) - 1)


def _sorted(keys: torch.Tensor) -> torch.Tensor:
    keys = keys.contiguous()
    keys.numpy().sort(axis=1)
    return keys
