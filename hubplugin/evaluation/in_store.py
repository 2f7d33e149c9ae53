"""`evaluate_store`: the raw and the corrected ranking of a real store, by its own search."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hubplugin.abilities import Filtered, able
from hubplugin.errors import InputError
from hubplugin.evaluation.evaluate import HUBS, drawn, example_of
from hubplugin.evaluation.result import Example, Hub, Ranking, Share, StoreEvaluation, shares
from hubplugin.evaluation.truth import Names, TrueIds, as_names, as_true_ids
from hubplugin.jobs.naming import Naming
from hubplugin.measures.hubness import most_found, skewness_of_finds
from hubplugin.measures.significance import compare, interval
from hubplugin.model import OffsetModel
from hubplugin.store import Id, Store
from hubplugin.vectors import Progress, VectorLike, Vectors, as_vectors

BANK = 5_000
"""Bank queries whose first targets are looked up, at most: one search each."""

AT_ONCE = 256
"""Queries that are searched at one time."""

Found = list[list[Id]]


def evaluate_store(
    store: Store,
    queries: VectorLike,
    truth: TrueIds,
    *,
    k: int = 10,
    condition: str | None = None,
    names: Naming | None = None,
    query_names: Names = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> StoreEvaluation:
    """Searches `store` for all queries, raw and corrected, as an application does: index, quantisation and filter
    included. So it sees what is lost on the way from the formula to the answer, and it changes nothing.

    queries [q, d]. truth: ids of their true targets, see `TrueIds`. k: how many an application asks for. condition: a
    filter, see `Store.filtered`. names: from ids to what targets are called, as `hubplugin.jobs.naming` gives it.
    query_names: what the queries are called, in examples and in a qrels file.

    Without an active correction it is searched raw only. Raises InputError where no query finds a true target.
    """
    asked = _searchable(queries, store, k)
    called = as_names(query_names, asked.rows, "query_names")
    true = as_true_ids(truth, asked.rows, called)
    searched, vectors = store if condition is None else able(store, Filtered).filtered(condition), asked.array()
    model = _active_model(store)
    judged = [row for row, ids in enumerate(true) if ids]

    def ranked(raw: bool) -> _Ranked:
        found = _searched(searched, vectors, k, raw, progress)
        return _Ranked(found, best_ranks(found, true, judged))

    raw, corrected = ranked(True), None if model is None else ranked(False)
    _require_hits(store, raw.found, true)
    count, known = store.count() if condition is None else None, _Names(names, called)
    return StoreEvaluation(
        store=store.url,
        method=None if model is None else str(model),
        condition=condition,
        queries=asked.rows,
        judged=len(judged),
        targets=store.count(),
        k=k,
        raw=_ranking(raw, count, k, seed),
        corrected=None if corrected is None else _ranking(corrected, count, k, seed),
        versus=None if corrected is None else compare(raw.ranks, corrected.ranks, seed),
        **_sides(searched, model, [true[row] for row in judged], raw, corrected, seed),
        hubs=_hubs(raw.found, corrected, known),
        examples=[] if corrected is None else _examples(raw, corrected, true, judged, known, seed),
    )


def _searchable(queries: VectorLike, store: Store, k: int) -> Vectors:
    asked = as_vectors(queries, "queries")
    if asked.dim != store.dim:
        raise InputError(f"{asked.name} have {asked.dim} dimensions, {store.url} has {store.dim}")
    if k < 1:
        raise InputError(f"k={k}: expected at least 1")
    return asked


def _active_model(store: Store) -> OffsetModel | None:
    correction = store.correction()
    return correction.model if correction is not None and correction.active else None


@dataclass(frozen=True)
class _Ranked:
    """What one ranking found for each query, and the ranks of the true targets of the judged ones [j]."""

    found: Found
    ranks: np.ndarray


def _searched(store: Store, queries: np.ndarray, k: int, raw: bool, progress: Progress | None) -> Found:
    found: Found = []
    for start in range(0, len(queries), AT_ONCE):
        found += store.search(queries[start : start + AT_ONCE], k, raw=raw).ids
        if progress is not None:
            progress("searching raw" if raw else "searching corrected", len(found), len(queries))
    return found


def best_ranks(found: Found, true: Sequence[set[str]], judged: Sequence[int]) -> np.ndarray:
    """The place of the first true target of each judged query, from 1; infinite where it was not found: [j]."""
    ranks = np.full(len(judged), np.inf)
    for number, row in enumerate(judged):
        places = (place for place, key in enumerate(found[row], 1) if str(key) in true[row])
        ranks[number] = next(places, np.inf)
    return ranks


def _require_hits(store: Store, raw: Found, true: Sequence[set[str]]) -> None:
    if not any(str(key) in ids for found, ids in zip(raw, true, strict=True) for key in found):
        seen = next((repr(found[0]) for found in raw if found), "nothing")
        given = next(next(iter(ids)) for ids in true if ids)
        raise InputError(
            f"no query finds a true target in {store.url}, whose searches find ids such as {seen}; ground truth names "
            f"{given!r}: expected ids of the store, in the order of the queries"
        )


def _ranking(ranked: _Ranked, count: int | None, k: int, seed: int) -> Ranking:
    """count: of the targets; None under a filter, since a store does not say how many targets it lets through."""
    times = Counter(itertools.chain.from_iterable(ranked.found))
    largest = [number for _, number in times.most_common(most_found(count or len(times) or 1))]
    finds = np.array([*times.values()], np.int64)
    return Ranking(
        recall={at: interval((ranked.ranks <= at).astype(np.float64), seed) for at in sorted({1, k})},
        worst=max(times.values(), default=0) / len(ranked.found),
        most_found=None if count is None else sum(largest) / max(times.total(), 1),
        never=None if count is None else 1 - len(times) / count,
        skewness=None if count is None else skewness_of_finds(finds, count),
        occurrences=_occurrences(finds, count),
    )


def _occurrences(finds: np.ndarray, count: int | None) -> dict[int, int]:
    values, targets = np.unique(finds, return_counts=True)
    never = {} if count is None else {0: count - len(finds)}
    return never | dict(zip(values.tolist(), targets.tolist(), strict=True))


def _sides(
    store: Store,
    model: OffsetModel | None,
    true: Sequence[set[str]],
    raw: _Ranked,
    corrected: _Ranked | None,
    seed: int,
) -> dict[str, Share]:
    """R@1 of queries whose true target some bank query finds first in the raw search, and of the others."""
    if model is None or corrected is None or len(bank := model.terms[0].bank) < 2:
        return {}
    some = bank[np.linspace(0, len(bank) - 1, min(len(bank), BANK)).astype(int)]
    nearest = {str(found[0]) for found in _searched(store, some, 1, True, None) if found}
    found_first = np.array([bool(ids & nearest) for ids in true])
    return shares(found_first, raw.ranks, corrected.ranks, seed)


class _Names:
    """What targets and queries are called, read as they are needed."""

    def __init__(self, targets: Naming | None, queries: Sequence[object] | None):
        self._targets, self._queries, self._known = targets, queries, dict[Id, str | None]()

    def read(self, ids: Sequence[Id]) -> None:
        new = [key for key in dict.fromkeys(ids) if key not in self._known]
        if self._targets is not None and new:
            self._known.update(zip(new, self._targets(new), strict=True))

    def __call__(self, key: Any) -> str:
        name = self._known.get(key)
        return str(key) if name is None else f"{name} [{key}]"

    def of_query(self, row: int) -> str:
        return f"query {row}" if self._queries is None else str(self._queries[row])


def _hubs(raw: Found, corrected: _Ranked | None, known: _Names) -> list[Hub]:
    before = Counter(itertools.chain.from_iterable(raw))
    found = {"raw": before}
    if corrected is not None:
        found["corrected"] = Counter(itertools.chain.from_iterable(corrected.found))
    worst = [key for key, _ in before.most_common(HUBS)]
    known.read(worst)
    return [
        Hub(id=key, name=known(key), found_by={label: times[key] for label, times in found.items()}) for key in worst
    ]


def _examples(
    raw: _Ranked, corrected: _Ranked, true: Sequence[set[str]], judged: Sequence[int], known: _Names, seed: int
) -> list[Example]:
    chosen = [(outcome, judged[place]) for outcome, place in drawn(raw.ranks, corrected.ranks, seed)]
    numbers = {str(key): key for _, row in chosen for key in (*raw.found[row], *corrected.found[row])}
    known.read([*numbers.values()])

    def truth(row: int) -> list[Id]:
        return [numbers.get(key, key) for key in sorted(true[row])]

    return [
        example_of(outcome, known.of_query(row), truth(row), raw.found[row], corrected.found[row], known)
        for outcome, row in chosen
    ]
