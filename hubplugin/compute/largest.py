"""What is large in a tile: the k largest of every row, and the entries that reach a level.

numpy does it on a CPU, where it is several times as fast as torch; a device has torch.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any
"""A numpy array or a torch tensor. A formula is written once, in functions that both modules have under one name;
`module_of(array)` is the module."""

ANSWER_SLACK = 1e-5
"""By how much a similarity may lie below a level and still count as at it, beside the larger of 1 and the level.
Products of other shapes, and on other processors, differ by up to 1e-6, and so do copies of a text that were embedded
in other batches. So all copies of an answer are answers, however they were rounded (docs/speed.md)."""


def largest(s: Array, k: int) -> tuple[Array, Array]:
    """The k largest of every row of s [b, m], the largest first, k <= m: values and columns, [b, k] each."""
    if not isinstance(s, np.ndarray):
        if s.device.type != "cpu":
            return s.topk(k, dim=1)  # type: ignore[no-any-return]
        import torch

        values, columns = largest(s.numpy(), k)
        return torch.from_numpy(values), torch.from_numpy(columns)
    if k == 1:
        columns = s.argmax(axis=1)[:, None]
        return np.take_along_axis(s, columns, axis=1), columns
    some = np.argpartition(s, s.shape[1] - k, axis=1)[:, -k:]
    values = np.take_along_axis(s, some, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(values, order, axis=1), np.take_along_axis(some, order, axis=1)


def largest_values(s: Array, k: int) -> Array:
    """The values of the k largest of every row of s [b, m], in any order: [b, k]. Takes half the time of `largest`."""
    if isinstance(s, np.ndarray):
        return np.partition(s, s.shape[1] - k, axis=1)[:, -k:]
    if s.device.type != "cpu":
        return s.topk(k, dim=1, sorted=False).values
    import torch

    return torch.from_numpy(largest_values(s.numpy(), k))


def reaching(s: Array, levels: Array) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the entries of s [b, m] that are at least their column's level [m]."""
    if not isinstance(s, np.ndarray):
        if s.device.type != "cpu":
            rows, columns = (s >= levels).nonzero(as_tuple=True)
            return rows.cpu().numpy(), columns.cpu().numpy()
        s, levels = s.numpy(), levels.numpy()
    some = np.flatnonzero(s.max(axis=0) >= levels)  # most columns have none
    rows, columns = np.nonzero(s[:, some] >= levels[some])
    return rows, some[columns]
