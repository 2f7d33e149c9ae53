"""Define `QueryMap`, a linear step for each query that pairs and clicks teach."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hubplugin.errors import InputError


@dataclass(frozen=True, eq=False)
class QueryMap:
    """A linear map of queries: q becomes q + `step` q, and targets do not change.

    step: The matrix of the step, float32 [d, d].
    strength: The strength s of docs/query-map.md, as chosen by the folds. If it is 0,
        the map is a whitening.
    pairs: The number of different pairs that taught the map.
    """

    step: np.ndarray
    strength: float
    pairs: int
    # A list, which a frozen instance can change: the last bank and its mapped queries.
    _last_bank: list[tuple[np.ndarray, np.ndarray]] = field(
        default_factory=list, init=False, repr=False
    )

    def __call__(self, queries: np.ndarray) -> np.ndarray:
        """Return `queries` [m, d] or [d] mapped: float32, of the same shape."""
        mapped: np.ndarray = queries @ self.matrix.T
        return mapped

    @cached_property
    def matrix(self) -> np.ndarray:
        """The matrix I + step that maps a query: float32 [d, d]."""
        matrix: np.ndarray = np.eye(len(self.step), dtype=np.float32) + self.step
        return matrix

    def __str__(self) -> str:
        how = f"mapped at strength {self.strength:g}" if self.strength else "whitened"
        return f"queries are {how} (learned from {self.pairs} pairs)"

    def of_bank(self, bank: np.ndarray) -> np.ndarray:
        """Return the mapped `bank`, from a cache of the last bank.

        So the same bank gives the same array, and the terms that share a bank still
        share one after the map.
        """
        for cached, mapped in self._last_bank:
            if cached is bank:
                return mapped
        mapped = self(bank)
        self._last_bank[:] = [(bank, mapped)]
        return mapped

    def on_targets(self, targets: np.ndarray) -> np.ndarray:
        """Return `targets` [b, d] with the map moved from the queries to the targets.

        Unmapped queries score them as mapped queries score `targets`: <q + S q, t> =
        <q, t + S' t>.
        """
        mapped: np.ndarray = targets + targets @ self.step
        return mapped


def refuse_query_map(what: str) -> InputError:
    """Return the error for `what`, which does not apply the query map of a model.

    Offsets without the map would silently give another ranking.
    """
    return InputError(
        f"this model has a query map (learn=True), which {what} does not apply; fit it "
        "without learn, or search with model.queries(q) and model.offsets(targets)"
    )
