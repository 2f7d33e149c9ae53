"""Norm bias: the term of an index's scores that depends on the target alone."""

from __future__ import annotations

import itertools

import numpy as np

from hubplugin_faiss.faiss_objects import block_rows
from hubplugin_faiss.handlers.base import IndexHandler


class NormBias:
    """The norm bias of an index, less its mean over the first entries, so that offsets stay centred."""

    def __init__(self, handler: IndexHandler, unit: bool):
        self._handler, self._unit, self._mean = handler, unit, 0.0
        for vectors, _ in itertools.islice(handler.scan(0, block_rows(handler.index.d)), 1):
            own = handler.norm_bias(vectors, unit)
            self._mean = 0.0 if own is None else float(own.mean())

    def __call__(self, vectors: np.ndarray) -> np.ndarray | float:
        """The norm bias of `vectors` [b, d], as the index reconstructs them: float64 [b], or 0."""
        own = self._handler.norm_bias(vectors, self._unit)
        return 0.0 if own is None else own - self._mean


def norm_biases(handler: IndexHandler) -> np.ndarray:
    """The norm bias of each entry, in scan order: float32 [n]."""
    norm_bias, row, values = NormBias(handler, True), 0, np.zeros(handler.count, np.float32)
    for vectors, _ in handler.scan(0, block_rows(handler.index.d)):
        values[row : row + len(vectors)] = norm_bias(vectors)
        row += len(vectors)
    return values
