"""A real store as something that ranks: the raw and the corrected ranking of its own search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from hubplugin.abilities import Filtered, able
from hubplugin.compute import Compute
from hubplugin.errors import InputError
from hubplugin.evaluation.ranking import RAW, Ranking
from hubplugin.evaluation.truth import TrueIds, as_true_ids
from hubplugin.jobs.naming import Naming
from hubplugin.model import OffsetModel
from hubplugin.store import Id, Store
from hubplugin.vectors import Vectors

CORRECTED = "corrected"

BANK = 5_000
"""Bank queries whose first targets are looked up, at most: one search each."""

AT_ONCE = 256
"""Queries that are searched at one time."""


class RankedStore:
    """`store`, searched for `queries` [q, d] as an application does it: index, quantisation and filter included.

    So it sees what is lost on the way from the formula to the answer. `condition`: a filter. Without an active
    correction it is searched raw only.
    """

    recall_at: tuple[int, ...] = ()

    def __init__(
        self,
        store: Store,
        queries: Vectors,
        truth: TrueIds,
        *,
        k: int,
        condition: str | None,
        names: Naming | None,
        query_names: Sequence[object] | None,
        compute: Compute,
    ):
        if queries.dim != store.dim:
            raise InputError(f"{queries.name} have {queries.dim} dimensions, {store.url} has {store.dim}")
        if k < 1:
            raise InputError(f"k={k}: expected at least 1")
        self._store, self._queries, self._k, self._condition = store, queries.array(), k, condition
        self._searched = store if condition is None else able(store, Filtered).filtered(condition)
        self._true = as_true_ids(truth, queries.rows, query_names)
        self._names, self._compute = names, compute
        self._model = _active_model(store)
        self.ids: Sequence[Id] = ()
        self.count = store.count() if condition is None else None
        self.judged = np.array([row for row, ids in enumerate(self._true) if ids], np.int64)

    def rankings(self) -> Iterator[Ranking]:
        found = {RAW: self._search(self._queries, self._k, raw=True)}
        if self._model is not None:
            found[CORRECTED] = self._search(self._queries, self._k, raw=False)
        self._require_hits(found[RAW])
        self.ids = list(dict.fromkeys(chain.from_iterable(chain.from_iterable(found.values()))))
        for label, lists in found.items():
            model = self._model if label == CORRECTED else None
            yield Ranking(
                label, RAW if model is None else model.method, {} if model is None else model.parameters,
                nearest=self._places(lists), best=best_ranks(lists, self._true, self.judged),
            )  # fmt: skip

    def _search(self, queries: np.ndarray, k: int, raw: bool) -> list[list[Id]]:
        found: list[list[Id]] = []
        for start in range(0, len(queries), AT_ONCE):
            found += self._searched.search(queries[start : start + AT_ONCE], k, raw=raw).ids
            self._compute.report(f"searching {RAW if raw else CORRECTED}", len(found), len(queries))
        return found

    def _require_hits(self, raw: list[list[Id]]) -> None:
        if any(str(key) in true for ids, true in zip(raw, self._true, strict=True) for key in ids):
            return
        seen = next((repr(ids[0]) for ids in raw if ids), "nothing")
        named = next(next(iter(true)) for true in self._true if true)
        raise InputError(
            f"no query finds a true target in {self._store.url}, whose searches find ids such as {seen}; ground truth "
            f"names {named!r}: expected ids of the store, in the order of the queries"
        )

    def _places(self, lists: list[list[Id]]) -> np.ndarray:
        place = {key: number for number, key in enumerate(self.ids)}
        nearest = np.full((len(lists), self._k), -1, np.int64)
        for row, ids in enumerate(lists):
            nearest[row, : len(ids)] = [place[key] for key in ids]
        return nearest

    def true_targets(self, place: int) -> Sequence[Id]:
        by_text = {str(key): key for key in self.ids}
        return [by_text.get(key, key) for key in sorted(self._true[self.judged[place]])]

    def names(self, ids: Sequence[Id]) -> list[str]:
        known = set(self.ids)
        asked = [key for key in dict.fromkeys(ids) if key in known]
        named = dict(zip(asked, self._names(asked), strict=True)) if self._names is not None and asked else {}
        return [str(key) if named.get(key) is None else f"{named[key]} [{key}]" for key in ids]

    def found_first(self) -> np.ndarray | None:
        if self._model is None or len(bank := self._model.terms[0].bank) < 2:
            return None
        some = bank[np.linspace(0, len(bank) - 1, min(len(bank), BANK)).astype(int)]
        nearest = {str(ids[0]) for ids in self._search(some, 1, raw=True) if ids}
        return np.array([bool(self._true[row] & nearest) for row in self.judged])

    def facts(self) -> dict[str, Any]:
        return {
            "metric": self._store.metric.value,
            "targets": self._store.count(),
            "store": self._store.url,
            "correction": None if self._model is None else str(self._model),
            "condition": self._condition,
        }


def _active_model(store: Store) -> OffsetModel | None:
    correction = store.correction()
    return correction.model if correction is not None and correction.active else None


def best_ranks(lists: Sequence[Sequence[Id]], true: Sequence[set[str]], judged: np.ndarray) -> np.ndarray:
    """The place of the first true target of each judged query, from 1; infinite where it was not found: [j]."""
    ranks = np.full(len(judged), np.inf)
    for number, row in enumerate(judged.tolist()):
        places = (place for place, key in enumerate(lists[row], 1) if str(key) in true[row])
        ranks[number] = next(places, np.inf)
    return ranks
