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
    strength: The strength of the learned part, as chosen by the folds.
    pairs: The number of different pairs that taught it.
    whitened: True if the step contains a mild whitening, which needs no pairs (see
        `hubplugin.learning`).
    """

    step: np.ndarray
    strength: float
    pairs: int
    whitened: bool = False
    _last: list[tuple[np.ndarray, np.ndarray]] = field(
        default_factory=list, init=False, repr=False
    )

    def __call__(self, queries: np.ndarray) -> np.ndarray:
        """Return `queries` [m, d] or [d] mapped: float32, of the same shape."""
        mapped: np.ndarray = queries @ self.whole.T
        return mapped

    @cached_property
    def whole(self) -> np.ndarray:
        """The matrix I + step that maps a query: float32 [d, d]."""
        whole: np.ndarray = np.eye(len(self.step), dtype=np.float32) + self.step
        return whole

    @cached_property
    def longest(self) -> float:
        """The largest length of a mapped query whose original length is 1."""
        return float(np.linalg.eigvalsh(self.whole.T @ self.whole)[-1] ** 0.5)

    def __str__(self) -> str:
        if not self.strength:
            return (
                f"queries are whitened; {self.pairs} pairs taught nothing beyond that"
            )
        first = "whitened, and " if self.whitened else ""
        return (
            f"queries are {first}mapped at strength {self.strength:g}, learned from "
            f"{self.pairs} pairs"
        )

    def of_bank(self, bank: np.ndarray) -> np.ndarray:
        """Return the mapped `bank`.

        The same bank gives the same array, so that terms that share it share one pass.
        """
        for last, mapped in self._last:
            if last is bank:
                return mapped
        self._last[:] = [(bank, self(bank))]
        return self._last[0][1]

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
