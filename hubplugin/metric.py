"""What a similarity is, and how an offset becomes one more dimension of it.

Every metric is written as a similarity s(q, t), larger is nearer:

    cosine      s = q.t / (|q| |t|)
    dot         s = q.t
    euclidean   s = -|q - t|^2 / 2

and `corrected(q, t) = s(q, t) + offset(t)` is the same similarity in d + 1 dimensions.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from hubplugin.errors import InputError

SMALL = 1e-15
"""Norms between this and its inverse have squares that float32 can hold; others are taken in float64."""


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
            known = ", ".join(metric.value for metric in cls)
            raise InputError(f"unknown metric {value!r}: use one of {known}") from None


def normalise(vectors: np.ndarray, name: str, numbers: np.ndarray | range | None = None) -> np.ndarray:
    """Rows of `vectors` [b, d] at unit length, float32; raises InputError on a zero row, which has no direction.
    numbers: what the error calls the rows, 0 to b - 1 by default."""
    with np.errstate(over="ignore"):
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    extreme = np.flatnonzero(~((norms[:, 0] > SMALL) & (norms[:, 0] < 1 / SMALL)))
    if extreme.size:
        exact = np.linalg.norm(vectors[extreme].astype(np.float64), axis=1, keepdims=True)
        zero = np.flatnonzero(exact[:, 0] == 0)
        if zero.size:
            row = (range(len(vectors)) if numbers is None else numbers)[int(extreme[zero[0]])]
            raise InputError(f"{name}: row {row} is a zero vector, which has no cosine similarity; remove it")
        vectors = vectors.astype(np.float64)
        vectors[extreme] /= exact
        norms[extreme] = 1
    unit: np.ndarray = (vectors / norms).astype(np.float32, copy=False)
    return unit


def unit_or_zero(vectors: np.ndarray) -> np.ndarray:
    """Rows of `vectors` [b, d] at unit length, float32; a zero vector stays one."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def augment_targets(
    vectors: np.ndarray, offsets: np.ndarray, metric: Metric, *, e: float = 1.0, max_offset: float = 0.0
) -> np.ndarray:
    """Targets [n, d] with their offsets [n] as one more component: float32 [n, d + 1].

    Inner product and cosine (unit vectors): [t, offset / e]. Squared Euclidean distance:
    [t, sqrt(2 (max_offset - offset))], where `max_offset` is at least every offset, so that
    -|q' - t'|^2 / 2 = s(q, t) + offset(t) - max_offset.
    """
    if metric is Metric.EUCLIDEAN:
        extra = np.sqrt(2.0 * np.maximum(max_offset - offsets.astype(np.float64), 0.0))
    else:
        extra = offsets.astype(np.float64) / e
    return np.concatenate([vectors, extra[:, None].astype(np.float32)], axis=1, dtype=np.float32)


def augment_queries(vectors: np.ndarray, metric: Metric, *, e: float = 1.0) -> np.ndarray:
    """Queries [m, d] as float32 [m, d + 1]: [q, e] for inner product and cosine, [q, 0] for Euclidean."""
    extra = np.full((len(vectors), 1), 0.0 if metric is Metric.EUCLIDEAN else e, np.float32)
    return np.concatenate([vectors, extra], axis=1, dtype=np.float32)
