"""Blocks of vectors as the metric wants them: at unit length for cosine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hubplugin.metric import Metric, normalise
from hubplugin.vectors import BLOCK_ROWS, Vectors


def prepared_blocks(vectors: Vectors, metric: Metric, size: int = BLOCK_ROWS) -> Iterator[np.ndarray]:
    """Checked blocks of `vectors`, at unit length where the metric is cosine."""
    row = 0
    for block in vectors.blocks(size):
        yield _prepared(block, vectors.name, range(row, row + len(block)), metric)
        row += len(block)


def prepared(vectors: Vectors, metric: Metric) -> np.ndarray:
    """All of a bank, checked and at unit length where the metric is cosine: float32 [m, d]."""
    return np.concatenate(list(prepared_blocks(vectors, metric)))


def sampled(vectors: Vectors, count: int, metric: Metric, rng: np.random.Generator) -> np.ndarray:
    """At most `count` rows at random, in order, prepared: float32 [min(count, n), d]."""
    return taken(vectors, np.sort(rng.permutation(vectors.rows)[:count]), metric)


def taken(vectors: Vectors, rows: np.ndarray, metric: Metric) -> np.ndarray:
    """The given rows, prepared: float32 [len(rows), d]. `rows` are ascending; the others are not read where the source
    can be read row by row."""
    return _prepared(vectors.some(rows), vectors.name, rows, metric)


def _prepared(block: np.ndarray, name: str, numbers: range | np.ndarray, metric: Metric) -> np.ndarray:
    return normalise(block, name, numbers) if metric is Metric.COSINE else block


def distinct_rows(vectors: np.ndarray) -> np.ndarray:
    """The rows of `vectors` [m, d] that are no copy of an earlier one, in order."""
    first: dict[bytes, int] = {}
    for number, row in enumerate(vectors + 0.0):  # which makes -0 the 0 that it equals
        first.setdefault(row.tobytes(), number)
    return np.fromiter(first.values(), np.int64, len(first))
