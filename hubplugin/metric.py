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


class Metric(str, Enum):
    """The similarities that hubplugin corrects."""

    COSINE = "cosine"
    DOT = "dot"
    EUCLIDEAN = "euclidean"

    @classmethod
    def parse(cls, value: Metric | str) -> Metric:
        """`value` as a Metric; raises InputError that lists the known ones."""
        try:
            return cls(value)
        except ValueError:
            metrics = ", ".join(metric.value for metric in cls)
            raise InputError(
                f"unknown metric {value!r}: use one of {metrics}"
            ) from None


def unit_length(xp: Any, vectors: Any) -> tuple[Any, Any]:
    """Rows of `vectors` [b, d], float32, at unit length, and the largest component of each [b], by the functions `xp`
    of their array library. Rows of zeros stay. They are divided by a power of two first, which changes no digit and
    leaves squares that float32 can hold: what has unit length keeps its bits."""
    largest = xp.max(xp.abs(vectors), axis=1)
    divisor = xp.where(largest == 0, xp.ones_like(largest), largest)
    scaled = vectors / xp.exp2(xp.floor(xp.log2(divisor)))[:, None]
    lengths = xp.sqrt(xp.sum(scaled * scaled, axis=1))
    return scaled / xp.where(largest == 0, xp.ones_like(lengths), lengths)[
        :, None
    ], largest


def normalise(
    vectors: np.ndarray, name: str, numbers: np.ndarray | range | None = None
) -> np.ndarray:
    """Rows of `vectors` [b, d] at unit length, float32.

    Args:
        vectors: [b, d].
        name: what the error calls them.
        numbers: what the error calls the rows, by default 0 to b - 1.

    Raises:
        ZeroVector: a row is zero, and has no direction.
    """
    unit, largest = unit_length(np, vectors)
    zero = np.flatnonzero(largest == 0)
    if zero.size:
        row = (range(len(vectors)) if numbers is None else numbers)[int(zero[0])]
        raise ZeroVector(
            f"{name}: row {row} is a zero vector, which has no cosine similarity; remove it"
        )
    normalised: np.ndarray = unit.astype(np.float32, copy=False)
    return normalised


def unit_or_zero(vectors: np.ndarray) -> np.ndarray:
    """Rows of `vectors` [b, d] at unit length, float32; a zero vector stays one."""
    unit: np.ndarray = unit_length(np, vectors)[0].astype(np.float32, copy=False)
    return unit


def augment_targets(
    vectors: np.ndarray,
    offsets: np.ndarray,
    metric: Metric,
    *,
    e: float = 1.0,
    max_offset: float = 0.0,
) -> np.ndarray:
    """Adds the offsets of targets as one more component.

    Inner product and cosine (unit vectors): [t, offset / e]. Squared Euclidean distance: [t, sqrt(2 (max_offset -
    offset))], so that -|q' - t'|^2 / 2 = s(q, t) + offset(t) - max_offset.

    Args:
        vectors: targets [n, d].
        offsets: [n].
        metric: the similarity.
        e: the component of the queries.
        max_offset: at least every offset.

    Returns:
        float32 [n, d + 1].
    """
    if metric is Metric.EUCLIDEAN:
        extra = np.sqrt(2.0 * np.maximum(max_offset - offsets.astype(np.float64), 0.0))
    else:
        extra = offsets.astype(np.float64) / e
    return np.concatenate(
        [vectors, extra[:, None].astype(np.float32)], axis=1, dtype=np.float32
    )


def augment_queries(
    vectors: np.ndarray, metric: Metric, *, e: float = 1.0
) -> np.ndarray:
    """Queries `vectors` [m, d] as float32 [m, d + 1]: [q, e] with `e` for inner product and cosine, [q, 0] where
    `metric` is Euclidean."""
    extra = np.full(
        (len(vectors), 1), 0.0 if metric is Metric.EUCLIDEAN else e, np.float32
    )
    return np.concatenate([vectors, extra], axis=1, dtype=np.float32)
