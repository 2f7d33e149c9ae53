"""What evaluation asks of whatever ranks targets for queries: arrays under each method, a store by its own search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hubplugin.measures.retrieval import Ranks
from hubplugin.model import Setting
from hubplugin.store import Id

RAW = "raw"


@dataclass(frozen=True)
class Ranking:
    """One way to rank targets for all queries.

    nearest [q, k]: the first k of each query, as places in `Ranked.ids`; -1 where there are fewer. best [j]: the rank
    of the first true target of each judged query, infinite where it is not among those that were asked for. ranks: of
    all true targets, where the whole gallery was ranked. offsets: one a target, in the order of `Ranked.ids`. storable:
    whether offsets express it. transductive: whether it needs every query beforehand.
    """

    label: str
    method: str
    parameters: dict[str, Setting]
    nearest: np.ndarray
    best: np.ndarray
    ranks: Ranks | None = None
    offsets: np.ndarray | None = None
    storable: bool = True
    transductive: bool = False


class Ranked(Protocol):
    """Targets that are ranked for queries.

    ids: of the targets that are known by name: in a store those that some query finds. count: how many targets there
    are in all, None where nobody knows, as under a filter. judged [j]: the queries that have a true target. recall_at:
    the k of R@k, beside 1 and the cut-off.
    """

    ids: Sequence[Id]
    count: int | None
    judged: np.ndarray
    recall_at: tuple[int, ...]

    def rankings(self) -> Iterable[Ranking]:
        """The raw search first."""

    def true_targets(self, place: int) -> Sequence[Id]:
        """The true targets of the judged query at `place`."""

    def names(self, ids: Sequence[Id]) -> list[str]:
        """What targets are called."""

    def found_first(self) -> np.ndarray | None:
        """Of each judged query [j], whether some bank query finds one of its true targets first in the raw search; None
        without a bank."""

    def facts(self) -> dict[str, Any]:
        """The fields of `Results` that it knows of itself."""
