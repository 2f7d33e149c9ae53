"""What a similarity is, and how an offset becomes one more dimension of it.

Every metric is written as a similarity s(q, t), larger is nearer:

    cosine      s = q.t / (|q| |t|)
    dot         s = q.t
    euclidean   s = -|q - t|^2 / 2

and `corrected(q, t) = s(q, t) + offset(t)` is the same similarity in d + 1 dimensions.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from hubplugin.errors import InputError, ZeroVector

CACHED = 1 << 18
"""Numbers that are brought to unit length at a time: 1 MiB, which stays in the cache of
a core. A bank of 15,000 x 384 takes half of the time of one piece."""


class Metric(str, Enum):
    """The similarities that hubplugin corrects."""

    COSINE = "cosine"
    DOT = "dot"
    EUCLIDEAN = "euclidean"

    @classmethod
    def parse(cls, value: Metric | str) -> Metric:
        """Return `value` as a Metric. Raises InputError, which lists the known ones."""
        try:
            return cls(value)
        except ValueError:
            metrics = ", ".join(metric.value for metric in cls)
            raise InputError(
                f"unknown metric {value!r}: use one of {metrics}"
            ) from None


def unit_length(xp: Any, vectors: Any) -> tuple[Any, Any]:
    """Return rows of `vectors` [b, d], float32, at unit length; rows of zeros stay.

    They are divided by a power of two first, which changes no digit and leaves squares
    that float32 can hold: what has unit length keeps its bits.

    Args:
        xp: The functions of their array library.
        vectors: [b, d].

    Returns:
        The rows, and the largest component of each [b].
    """
    largest = xp.max(xp.abs(vectors), axis=1)
    is_zero = largest == 0
    ones = xp.ones_like(largest)
    power = xp.exp2(xp.floor(xp.log2(xp.where(is_zero, ones, largest))))
    unit = vectors / power[:, None]
    lengths = xp.sqrt(xp.sum(unit * unit, axis=1))
    unit /= xp.where(is_zero, ones, lengths)[:, None]
    return unit, largest


def normalise(
    vectors: np.ndarray, name: str, numbers: np.ndarray | range | None = None
) -> np.ndarray:
    """Return rows of `vectors` [b, d] at unit length, float32.

    Args:
        vectors: [b, d].
        name: What the error calls them.
        numbers: What the error calls the rows, by default 0 to b - 1.

    Raises:
        ZeroVector: A row is zero, and has no direction.
    """
    unit = unit_or_zero(vectors)
    zero = np.flatnonzero(np.einsum("jd,jd->j", unit, unit) == 0)
    if zero.size:
        row = zero[0] if numbers is None else numbers[int(zero[0])]
        raise ZeroVector(
            f"{name}: row {row} is a zero vector, which has no cosine similarity; "
            "remove it"
        )
    return unit


def unit_or_zero(vectors: np.ndarray) -> np.ndarray:
    """Return rows of `vectors` [b, d] at unit length, float32; a zero vector stays."""
    unit = np.empty(vectors.shape, np.float32)
    height = max(CACHED // vectors.shape[1], 1)
    for start in range(0, len(vectors), height):
        rows = slice(start, start + height)
        unit[rows], _ = unit_length(np, vectors[rows])
    return unit


def augment_targets(
    vectors: np.ndarray,
    offsets: np.ndarray,
    metric: Metric,
    *,
    e: float = 1.0,
    max_offset: float = 0.0,
) -> np.ndarray:
    """Add the offsets of targets as one more component.

    Inner product and cosine (unit vectors): [t, offset / e]. Squared Euclidean
    distance: [t, sqrt(2 (max_offset - offset))], so that -|q' - t'|^2 / 2 = s(q, t) +
    offset(t) - max_offset.

    Args:
        vectors: Targets [n, d].
        offsets: [n].
        metric: The similarity.
        e: The component of the queries.
        max_offset: At least every offset.

    Returns:
        float32 [n, d + 1].
    """
    exact = offsets.astype(np.float64)
    if metric is Metric.EUCLIDEAN:
        extra = np.sqrt(2.0 * np.maximum(max_offset - exact, 0.0))
    else:
        extra = exact / e
    return _append(vectors, extra)


def augment_queries(
    vectors: np.ndarray, metric: Metric, *, e: float = 1.0
) -> np.ndarray:
    """Return queries [m, d] with one more component, float32 [m, d + 1].

    [q, e] for inner product and cosine, [q, 0] if `metric` is Euclidean.
    """
    extra = 0.0 if metric is Metric.EUCLIDEAN else e
    return _append(vectors, np.full(len(vectors), extra))


def _append(vectors: np.ndarray, extra: np.ndarray) -> np.ndarray:
    """Return `vectors` [b, d] with the component `extra` [b] behind the others."""
    column = extra[:, None].astype(np.float32)
    return np.concatenate([vectors, column], axis=1, dtype=np.float32)
