"""Define the similarities, and turn an offset into one more dimension.

Every metric is written as a similarity s(q, t), where larger means nearer:

    cosine      s = q.t / (|q| |t|)
    dot         s = q.t
    euclidean   s = -|q - t|^2 / 2

and `corrected(q, t) = s(q, t) + offset(t)` is such a similarity in d + 1 dimensions
(see `augment_targets`).
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
    def _missing_(cls, value: object) -> Metric:
        """Raise InputError for an unknown name, and list the known ones."""
        known = ", ".join(metric.value for metric in cls)
        raise InputError(f"unknown metric {value!r}: use one of {known}")


def unit_length(xp: Any, vectors: Any) -> tuple[Any, Any]:
    """Return the rows of `vectors` at unit length; zero vectors stay zero.

    Each row is first divided by a power of two, which changes none of its digits and
    keeps the squares of its components within float32. So a row that already has unit
    length keeps its bits.

    Args:
        xp: The array library of `vectors`.
        vectors: The vectors [b, d], float32.

    Returns:
        The rows [b, d], and the largest absolute component of each [b].
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
    """Return the rows of `vectors` at unit length, float32 [b, d].

    Args:
        vectors: The vectors [b, d].
        name: The name of `vectors` in the error message.
        numbers: The row numbers in the error message, by default 0 to b - 1.

    Raises:
        ZeroVector: A row is zero, so it has no direction.
    """
    unit: np.ndarray
    unit, largest = unit_length(np, vectors)
    zero_rows = np.flatnonzero(largest == 0)
    if zero_rows.size:
        row = zero_rows[0] if numbers is None else numbers[int(zero_rows[0])]
        raise ZeroVector(
            f"{name}: row {row} is a zero vector, which has no cosine similarity; "
            "remove it"
        )
    return unit


def unit_or_zero(vectors: np.ndarray) -> np.ndarray:
    """Return the rows of `vectors` [b, d] at unit length; zero vectors stay zero."""
    unit: np.ndarray = unit_length(np, vectors)[0]
    return unit


def augment_targets(
    vectors: np.ndarray,
    offsets: np.ndarray,
    metric: Metric,
    *,
    e: float = 1.0,
    max_offset: float = 0.0,
) -> np.ndarray:
    """Append the offsets to the targets as one more component.

    For inner product and cosine (unit vectors), a target becomes t' = [t, offset / e],
    and a query q' = [q, e]. For squared Euclidean distance, they become t' = [t, sqrt(2
    (max_offset - offset))] and q' = [q, 0], so that -|q' - t'|^2 / 2 = s(q, t) +
    offset(t) - max_offset.

    Args:
        vectors: The targets [n, d].
        offsets: The offsets [n].
        metric: The similarity.
        e: The last component of the augmented queries.
        max_offset: A bound that no offset exceeds.

    Returns:
        The augmented targets, float32 [n, d + 1].
    """
    exact = offsets.astype(np.float64)
    if metric is Metric.EUCLIDEAN:
        extra = np.sqrt(2.0 * np.maximum(max_offset - exact, 0.0))
    else:
        extra = exact / e
    column = extra[:, None].astype(np.float32)
    return np.concatenate([vectors, column], axis=1, dtype=np.float32)
