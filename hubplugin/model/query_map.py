"""`QueryMap`: what pairs and clicks teach about queries, a linear step that each query takes before the search."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hubplugin.errors import InputError


@dataclass(frozen=True, eq=False)
class QueryMap:
    """A query q is searched with as q + `step` q; targets stay as they are.

    step: float32 [d, d]. strength: of the learned part, as the folds chose it. pairs: how many different pairs taught
    it. whitened: whether the step has a mild whitening in it, which needs no pairs (`hubplugin.learning`).
    """

    step: np.ndarray
    strength: float
    pairs: int
    whitened: bool = False
    _last: list[tuple[np.ndarray, np.ndarray]] = field(
        default_factory=list, init=False, repr=False
    )

    def __call__(self, queries: np.ndarray) -> np.ndarray:
        """Return `queries` [m, d] or [d] as they are searched for: float32, same shape."""
        mapped: np.ndarray = queries @ self.whole.T
        return mapped

    @cached_property
    def whole(self) -> np.ndarray:
        """The matrix I + step that maps a query: float32 [d, d]."""
        whole: np.ndarray = np.eye(len(self.step), dtype=np.float32) + self.step
        return whole

    @cached_property
    def longest(self) -> float:
        """The largest length that a mapped query of length 1 can have."""
        return float(np.linalg.eigvalsh(self.whole.T @ self.whole)[-1] ** 0.5)

    def __str__(self) -> str:
        if not self.strength:
            return (
                f"queries are whitened; {self.pairs} pairs taught nothing beyond that"
            )
        first = "whitened, and " if self.whitened else ""
        return f"queries are {first}mapped at strength {self.strength:g}, as {self.pairs} pairs taught"

    def of_bank(self, bank: np.ndarray) -> np.ndarray:
        """Return `bank` mapped.

        The same bank gives the same array, so that terms with one bank share one pass.
        """
        for last, mapped in self._last:
            if last is bank:
                return mapped
        self._last[:] = [(bank, self(bank))]
        return self._last[0][1]

    def on_targets(self, targets: np.ndarray) -> np.ndarray:
        """Return targets [b, d] that unmapped queries rank as mapped ones rank `targets`.

        <q + S q, t> = <q, t + S' t>.
        """
        mapped: np.ndarray = targets + targets @ self.step
        return mapped


def refuse_query_map(what: str) -> InputError:
    """Return the error that `what` does not apply the query map of a model.

    Offsets without their map would silently give another ranking.
    """
    return InputError(
        f"this model has a query map (learn=True), which {what} does not apply; fit it without learn, or search with "
        "model.queries(q) and model.offsets(targets)"
    )
