"""What an index adds to scores that depends on the target alone."""

from __future__ import annotations

import itertools

import numpy as np

from hubplugin_faiss.faiss_objects import block_rows
from hubplugin_faiss.handlers.base import Rule


class Favour:
    """What an index favours, less what it favours in the mean of its first entries: offsets stay centred."""

    def __init__(self, rule: Rule, unit: bool):
        self._rule, self._unit, self._mean = rule, unit, 0.0
        for vectors, _ in itertools.islice(rule.scan(0, block_rows(rule.index.d)), 1):
            own = rule.favour(vectors, unit)
            self._mean = 0.0 if own is None else float(own.mean())

    def __call__(self, vectors: np.ndarray) -> np.ndarray | float:
        """Of `vectors` [b, d], as the index reconstructs them: float64 [b], or 0."""
        own = self._rule.favour(vectors, self._unit)
        return 0.0 if own is None else own - self._mean


def norm_biases(rule: Rule) -> np.ndarray:
    """What an index favours of each entry, in scan order: float32 [n]."""
    favour, row, values = Favour(rule, True), 0, np.zeros(rule.count, np.float32)
    for vectors, _ in rule.scan(0, block_rows(rule.index.d)):
        values[row : row + len(vectors)] = favour(vectors)
        row += len(vectors)
    return values
