"""Which targets of a corrected store look planted: by id, for a person to judge. Natural hubs are among them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import numpy as np
from pydantic import Field

from hubplugin.compute import Compute, MeanOfLargest, Similarities, TopK, clusters, reduce, search
from hubplugin.errors import StoreError
from hubplugin.jobs.write import Comparison
from hubplugin.measures.hubness import k_occurrence, skewness, skewness_by_chance, skewness_of_found
from hubplugin.methods import FitInput
from hubplugin.methods.robust import BANK_QUERIES, CLUSTERS, rows_of_sample
from hubplugin.model import Bound, HubnessAtFit, OffsetModel, group_key
from hubplugin.store import Batch, Hits, Id, Store
from hubplugin.trial import OCCURRENCE
from hubplugin.vectors import as_vectors

QUERIES = 200
"""Queries that are counted, at the fit and by `monitor`. Skewness depends on how many they are."""


def counted_queries(model: OffsetModel) -> np.ndarray:
    """The queries of the bank of `model` that are counted, the same ones each time: [q, d]."""
    bank = model.terms[0].bank
    queries: np.ndarray = bank[rows_of_sample(len(bank), QUERIES)]
    return queries


def counted(model: OffsetModel, bank: FitInput) -> OffsetModel:
    """`model`, fitted on the banks and targets of `given`, with what its bank found in them."""
    targets, queries = bank.require_targets(model.method), counted_queries(model)
    if len(queries) < 2 or targets.rows <= OCCURRENCE:
        return model
    quiet = bank.compute.quiet
    offsets = model.members.offsets(targets, compute=quiet)
    both, nearest = np.stack([np.zeros_like(offsets), offsets]), TopK(OCCURRENCE)
    search(queries, targets, model.metric, bank.compute, nearest, offsets=both, what="counting hubs")
    rows_of_both = list(nearest.rows)
    if model.learned:
        learned = TopK(OCCURRENCE)
        search(*model.searched(queries, targets), quiet, learned, offsets=offsets)
        rows_of_both[1] = learned.rows[0]
    raw, corrected = (k_occurrence(rows, targets.rows) for rows in rows_of_both)
    chance = skewness_by_chance(len(queries), OCCURRENCE, targets.rows)
    largest = float(corrected.max() / len(queries))
    return model.having(hubness_at_fit=HubnessAtFit(len(queries), skewness(raw), skewness(corrected), chance, largest))


NAMED = 10
"""How many targets each list names."""

MADS = 4.0
"""A penalty stands out that lies so many median absolute deviations above the median: 1 target in 300 by nature."""

TIMES = 4.0
"""Alarm if a target is found by more than 4 times the largest share of the queries that any had at the fit. Where that
share is already large, alarm halfway from it to 100 %."""

SAMPLE, NEIGHBOURS = 1000, 5
"""How far a target lies from the gallery is its mean similarity to the nearest of a sample."""

Named: TypeAlias = list[tuple[Id, float]]
"""Targets by id, each with what it is named for, the worst first."""


@dataclass(frozen=True)
class Suspects:
    """What `suspects` found, ten of each kind at most.

    raw_hubs, corrected_hubs: the targets found most often, with the share of `queries` bank queries that have them
    among their 10 nearest. cluster_hubs: the one found most often in each cluster of the bank, corrected, with its
    share of the cluster. missing, stale: without an offset, and with one that its vector does not give. penalised:
    whose penalty stands out, with the penalty, `outstanding` in all. far: farthest from the gallery, with the mean
    similarity to its nearest. skewness: of the 10-occurrence, raw and corrected. alarms: what somebody should look at
    now, a line each. found_by: by id, how many of the queries find a target, raw and corrected: of all that are found.
    """

    queries: int
    skewness: tuple[float, float]
    raw_hubs: Named
    corrected_hubs: Named
    cluster_hubs: Named
    missing: list[Id]
    stale: list[Id]
    penalised: Named
    outstanding: int
    far: Named
    alarms: list[str]
    found_by: Annotated[tuple[Mapping[Id, int], Mapping[Id, int]], Field(exclude=True)] = field(
        default=({}, {}), repr=False
    )

    @property
    def lines(self) -> list[str]:
        """What was seen, but for the alarms."""
        raw, corrected, within = map(shares_as_text, (self.raw_hubs, self.corrected_hubs, self.cluster_hubs))
        lines = [
            f"top hubs of {self.queries} bank queries: {raw} raw; {corrected} corrected; "
            f"within clusters of them: {within}"
        ]
        lines += [f"missing: {ids_as_text(self.missing)}"] if self.missing else []
        lines += [f"stale: {ids_as_text(self.stale)}"] if self.stale else []
        if self.penalised:
            lines.append(
                f"{self.outstanding} with a penalty beyond median + {MADS:.0f} MAD: {penalties_as_text(self.penalised)}"
            )
        listed = ", ".join(f"{name!r} {similarity:.3f}" for name, similarity in self.far)
        return [*lines, f"farthest from the gallery: {listed}"]

    def __str__(self) -> str:
        return "\n".join([*self.lines, *(f"ALARM: {each}" for each in self.alarms)])


def suspects(store: Store, *, compute: Compute = Compute()) -> Suspects:
    """The targets of `store` that a planted one would be among; see `Suspects`. Nothing is changed.

    It reads the store twice and searches for up to 400 queries of the model's bank, raw and corrected. There is an
    alarm if the correction makes skewness worse. Of a robust model, which has counted at the fit, there is one if a
    target is found by more than four times the share that any had then, over the whole bank or within a cluster of it.
    Raises StoreError where no correction is active, or where its model keeps no bank.
    """
    correction = store.correction()
    if correction is None or not correction.active:
        raise StoreError(f"{store.url} has no active correction; apply one first")
    model = correction.model
    if not has_bank(model):
        raise StoreError(f"{store.url}: method {model.method!r} keeps no bank to search with; apply another one")
    return examined(store, model, compute)[0]


def has_bank(model: OffsetModel) -> bool:
    """Whether `model` keeps queries to search with."""
    return len(model.terms[0].bank) > 1


def examined(
    store: Store, model: OffsetModel, compute: Compute, most: int = BANK_QUERIES
) -> tuple[Suspects, Comparison]:
    """`suspects` by the active `model`, with `most` queries of its bank, and what lies in the store beside it."""
    bank = model.terms[0].bank
    queries = bank[rows_of_sample(len(bank), most)]
    hubs = _Hubs(queries, store.search(queries, OCCURRENCE, raw=True), store.search(queries, OCCURRENCE))
    stored = _Stored(store, model, compute)
    skewness = hubs.skewness(store.count())
    named = Suspects(
        len(queries), skewness, most_found(hubs.raw.ids), most_found(hubs.corrected.ids), hubs.within(),
        stored.missing, stored.stale, stored.penalised(), len(stored.outstanding), stored.far(),
        _alarms(hubs, skewness, model.bound), (counts_of(hubs.raw.ids), counts_of(hubs.corrected.ids)),
    )  # fmt: skip
    return named, stored.comparison


def counts_of(lists: Sequence[Sequence[Id]]) -> Counter[Id]:
    """In how many of `lists` each target stands that stands in any."""
    return Counter(itertools.chain.from_iterable(lists))


def most_found(lists: Sequence[Sequence[Id]], named: int = NAMED) -> Named:
    """The targets that stand in most of `lists`, each with the share of them."""
    return [(name, count / len(lists)) for name, count in counts_of(lists).most_common(named)]


def skewness_of_lists(lists: Sequence[Sequence[Id]], targets: int) -> float:
    """Skewness of the occurrence of all `targets` in `lists`."""
    return skewness_of_found(np.array([*counts_of(lists).values()]), targets)


def outstanding(penalties: np.ndarray) -> np.ndarray:
    """The rows of the penalties beyond median + 4 MAD."""
    middle = np.median(penalties)
    rows: np.ndarray = np.flatnonzero(penalties > middle + MADS * np.median(np.abs(penalties - middle)))
    return rows


def name_some(batch: Batch, wrong: np.ndarray, missing: list[Id], stale: list[Id]) -> None:
    """Adds the ids of `batch` without an offset, and with one that is `wrong`, as long as few are named."""
    absent = np.isnan(batch.offsets)
    for names, which in ((missing, absent), (stale, wrong & ~absent)):
        names += [batch.ids[number] for number in np.flatnonzero(which)[: NAMED - len(names)].tolist()]


class _Hubs:
    """What the bank `queries` [q, d] find."""

    def __init__(self, queries: np.ndarray, raw: Hits, corrected: Hits):
        self.count, self.raw, self.corrected = len(queries), raw, corrected
        self._labels = clusters(queries, CLUSTERS)

    def within(self) -> Named:
        """The target found most often in each cluster of the queries that is not too small to tell."""
        rows = [np.flatnonzero(self._labels == label).tolist() for label in range(CLUSTERS)]
        worst = [
            each
            for some in rows
            if len(some) >= OCCURRENCE
            for each in most_found([self.corrected.ids[row] for row in some], 1)
        ]
        return sorted(worst, key=lambda each: -each[1])

    def skewness(self, targets: int) -> tuple[float, float]:
        return skewness_of_lists(self.raw.ids, targets), skewness_of_lists(self.corrected.ids, targets)


class _Stored:
    """What lies in a store, by id: offsets, and how near each target is to a sample of the others."""

    def __init__(self, store: Store, model: OffsetModel, compute: Compute):
        self.comparison = Comparison(store, model, compute, "checking offsets")
        chosen, row = set(np.linspace(0, max(store.count() - 1, 0), SAMPLE).astype(int).tolist()), 0
        self.missing: list[Id] = []
        self.stale: list[Id] = []
        self._ids: list[Id] = []
        offsets, sample = [], []
        for batch in store.scan(group_key(model)):
            by_model, wrong = self.comparison.offsets(batch)
            name_some(batch, wrong, self.missing, self.stale)
            sample.append(batch.vectors[[number in chosen for number in range(row, row + len(batch.ids))]])
            row += len(batch.ids)
            self._ids += batch.ids
            offsets.append(by_model)
            self.comparison.done(batch)
        self._penalties = -np.concatenate([*offsets, np.zeros(0, np.float32)])
        self._near = _nearness(store, model, np.concatenate(sample), compute) if row > NEIGHBOURS + 1 else None

    @property
    def outstanding(self) -> np.ndarray:
        return outstanding(self._penalties)

    def penalised(self) -> Named:
        rows = self.outstanding
        return self._named(rows[np.argsort(-self._penalties[rows], kind="stable")], self._penalties)

    def far(self) -> Named:
        return [] if self._near is None else self._named(np.argsort(self._near, kind="stable"), self._near)

    def _named(self, rows: np.ndarray, values: np.ndarray) -> Named:
        return [(self._ids[row], float(values[row])) for row in rows[:NAMED].tolist()]


def _nearness(store: Store, model: OffsetModel, sample: np.ndarray, compute: Compute) -> np.ndarray:
    """The mean similarity of every target to its nearest in `sample`, the nearest of all left out, which is itself
    where it is in the sample: float64 [n]."""
    usable = np.isfinite(sample).all(axis=1) & sample.any(axis=1)
    similarities, k = Similarities.of(sample[usable], model.metric, compute), min(NEIGHBOURS, int(usable.sum()) - 1)
    parts = []
    for batch in store.scan(group_key(model)):
        whole = np.isfinite(batch.vectors).all(axis=1) & batch.vectors.any(axis=1)
        near = np.full(len(batch.ids), -np.inf)
        if whole.any():
            more, one = reduce(
                similarities, as_vectors(batch.vectors[whole], "targets"), [MeanOfLargest(k + 1), MeanOfLargest(1)]
            )
            near[whole] = ((k + 1) * more - one) / k
        parts.append(near)
    return np.concatenate(parts)


def _alarms(hubs: _Hubs, skewness: tuple[float, float], fit: Bound | None) -> list[str]:
    raw, corrected = skewness
    alarms = []
    if corrected > raw:
        alarms.append(f"skewness of the {OCCURRENCE}-occurrence is {corrected:.2f} corrected, above {raw:.2f} raw")
    if fit is None:
        return alarms
    for name, share in most_found(hubs.corrected.ids):
        if share > too_much(fit.largest):
            alarms.append(
                f"{name!r} is found by {share:.1%} of the queries; at the fit none by more than {fit.largest:.1%}"
            )
    for name, share in hubs.within():
        if share > too_much(fit.largest_within):
            alarms.append(
                f"{name!r} is found by {share:.1%} of the queries of one cluster; at the fit none by more than "
                f"{fit.largest_within:.1%}"
            )
    return alarms


def too_much(at_fit: float) -> float:
    """Alarm above this share of the queries, where `at_fit` was the largest share of any target at the fit."""
    return min(TIMES * at_fit, (1 + at_fit) / 2)


def ids_as_text(names: Sequence[Id]) -> str:
    return ", ".join(map(repr, names))


def penalties_as_text(penalised: Named) -> str:
    return ", ".join(f"{name!r} {penalty:.4f}" for name, penalty in penalised)


def shares_as_text(named: Named) -> str:
    return ", ".join(f"{name!r} {share:.1%}" for name, share in named) or "none"
