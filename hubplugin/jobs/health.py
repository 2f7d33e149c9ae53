"""`inspect`: whether the correction in a store is whole, and whether it still does what it did when it was fitted."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from datetime import datetime
from typing import Any

import numpy as np

from hubplugin.bank import SEEN, Bank, BankLike, own_share
from hubplugin.compute import Compute, TopK, search
from hubplugin.errors import InputError, StoreError
from hubplugin.jobs.naming import Naming, called
from hubplugin.jobs.results import HUBS, NAMED, HubnessNow, Inspection
from hubplugin.jobs.write import Counts, compare, require_match
from hubplugin.measures.hubness import k_occurrence, skewness, skewness_by_chance, skewness_of_hits
from hubplugin.methods import FitInput
from hubplugin.metric import Metric, normalise
from hubplugin.model import GroupedModel, HubnessAtFit, OffsetModel, group_key
from hubplugin.report import Histogram, Hub
from hubplugin.store import Correction, Id, Store, recorded_of
from hubplugin.validation import OCCURRENCE
from hubplugin.vectors import Directed, Vectors

logger = logging.getLogger(__name__)

QUERIES = 200
"""Queries that are counted, at the fit and by `inspect`. Skewness depends on how many they are."""

BINS = 40
"""Of the distribution of the stored offsets."""

FEWEST_LIVE = 100
"""Live queries that it takes to see whether they are of one kind with the bank."""


def inspect(
    store: Store,
    live: BankLike | None = None,
    *,
    queries: int = QUERIES,
    names: Naming | None = None,
    compute: Compute = Compute(),
) -> Inspection:
    """Whether every target of `store` has the offset that its vector gives, and whether hubness is still lower by it.

    live: queries that people ask now [m, d]; by default those that were recorded since the correction was made. Those
    that are in the bank count for nothing. It searches, raw and corrected, for `queries` of them drawn at random, or
    for queries of the bank where fewer than 100 are live; 0 searches for none. Reads the whole store, and changes
    nothing. names: a function from ids to what hubs are called; `hubplugin.jobs.naming` makes one.

    Raises StoreError for live queries and a store without an active correction, InputError for queries that cannot be
    used.
    """
    correction = store.correction()
    if live is not None and (correction is None or not correction.active):
        raise StoreError(f"{store.url} has no active correction; apply one first")
    logger.info("%s: inspecting", store.url)
    found: dict[str, Any] = {}
    if correction is not None:
        require_match(correction.model, store)  # a store that was made anew may have other vectors
        asked = _live(store, correction, live, compute) if correction.active and queries else None
        found = _stored(store, correction.model, compute)
        if asked is not None:
            found |= _searched(store, correction.model, asked, queries, names, compute)
    logger.info("%s: inspected", store.url)
    own = (store.url, store.metric, store.dim, store.count(), correction, store.previous())
    return Inspection(*own, notes=store.notes(), warnings=store.attention(), **found)


def _stored(store: Store, model: OffsetModel, compute: Compute) -> dict[str, Any]:
    """The fields of an inspection that tell what lies in `store` beside what `model` gives."""
    seen, gallery = Counts(), model.gallery
    missing, stale = list[Id](), list[Id]()
    total = squares = 0.0
    edges = np.zeros(2) if gallery is None else np.linspace(gallery.smallest, gallery.largest, BINS + 1)
    counts = np.zeros(len(edges) - 1, np.int64)
    batches = store.scan(group_key(model))
    for batch, by_model, wrong in compare(store, model, batches, seen, compute, "checking offsets"):
        total, squares = total + by_model.sum(dtype=np.float64), squares + np.square(by_model, dtype=np.float64).sum()
        absent = np.isnan(batch.offsets)
        counts += np.histogram(np.clip(batch.offsets[np.isfinite(batch.offsets)], edges[0], edges[-1]), edges)[0]
        for ids, which in ((missing, absent), (stale, wrong & ~absent)):
            ids += [batch.ids[row] for row in np.flatnonzero(which)[: NAMED - len(ids)].tolist()]
    told = {name: getattr(seen, name) for name in ("missing", "stale", "foreign", "invalid_vectors")}
    told |= {"missing_ids": missing, "stale_ids": stale}
    count = seen.scanned
    if gallery is not None:
        told["offsets"] = Histogram("stored", edges.tolist(), counts.tolist())
    if gallery is not None and gallery.deviation > 0 and count > 1 and not isinstance(model, GroupedModel):
        mean = total / count
        told["shift"] = mean / gallery.deviation
        told["spread"] = max(squares / count - mean * mean, 0.0) ** 0.5 / gallery.deviation
    return told


def _live(store: Store, correction: Correction, live: BankLike | None, compute: Compute) -> np.ndarray:
    """A sample of the live queries [m, d], as the bank has its own, without those that are in the bank, which say
    nothing new."""
    model, made = correction.model, correction.made
    if live is None:
        asked: Vectors | None = recorded_of(store, None if made is None else datetime.fromisoformat(made).timestamp())
    else:
        bank = Bank.of(live, "live queries")
        if bank.answers is not None:
            raise InputError("live queries are searched without answers; evaluate measures R@1 on known ones")
        asked = bank.vectors(store, compute.progress)
    if asked is None:
        return np.zeros((0, model.dim), np.float32)
    asked = Directed.of(asked, model.metric)
    some = asked.select(np.sort(np.random.default_rng().permutation(asked.rows)[: 2 * SEEN]))
    if model.metric is Metric.COSINE:
        some = normalise(some, asked.name)
    known = {row.tobytes() for row in np.asarray(model.terms[0].bank, np.float32).round(5) + 0.0}
    rows = np.asarray(some, np.float32).round(5) + 0.0
    new: np.ndarray = some[[row.tobytes() not in known for row in rows]]
    if live is not None and len(new) < FEWEST_LIVE:
        logger.warning(
            "of the live queries %d are not in the bank, and %d are needed: the bank's are looked at",
            len(new),
            FEWEST_LIVE,
        )
    return new


def _searched(
    store: Store, model: OffsetModel, live: np.ndarray, queries: int, names: Naming | None, compute: Compute
) -> dict[str, Any]:
    """The fields of an inspection that tell what live queries find, or those of the bank."""
    rng, bank = np.random.default_rng(), model.terms[0].bank
    at_fit = bank[:: max(len(bank) // SEEN, 1)]
    told: dict[str, Any] = {}
    is_live = len(live) >= FEWEST_LIVE
    if is_live and len(at_fit) >= FEWEST_LIVE:
        told["drift"] = own_share(live, at_fit, compute, rng)
    asked = rng.permutation(live)[:queries] if is_live else of_bank(model, queries)
    count = store.count()
    if len(asked) < 2 or not count:  # of a model that keeps no more than the mean of its bank; nothing to be found
        return told
    found = {
        search: Counter(itertools.chain.from_iterable(store.search(asked, OCCURRENCE, raw=search == "raw").ids))
        for search in ("raw", "corrected")
    }
    before, after = (skewness_of_hits(np.array([*each.values()]), count) for each in found.values())
    most = dict.fromkeys(key for each in found.values() for key, _ in each.most_common(HUBS))
    hubs = [
        Hub(key, name, {search: each[key] for search, each in found.items()})
        for key, name in zip(most, called([*most], names), strict=True)
    ]
    occurrences = {search: {0: count - len(each)} | Counter(each.values()) for search, each in found.items()}
    chance, fit = skewness_by_chance(len(asked), OCCURRENCE, count), model.hubness_at_fit
    return told | {"hubness": HubnessNow(len(asked), is_live, before, after, chance, fit, hubs, occurrences)}


def of_bank(model: OffsetModel, count: int = QUERIES) -> np.ndarray:
    """So many queries of the bank of `model` at most, the same ones each time: [q, d]."""
    bank = model.terms[0].bank
    queries: np.ndarray = bank[np.linspace(0, len(bank) - 1, min(len(bank), count)).astype(int)]
    return queries


def counted(model: OffsetModel, bank: FitInput) -> OffsetModel:
    """`model`, fitted on the banks and targets of `bank`, with what its bank found in them."""
    targets, queries = bank.require_targets(model.method), of_bank(model)
    if len(queries) < 2 or targets.rows <= OCCURRENCE:
        return model
    quiet = bank.compute.without_progress
    offsets = model.fitted
    if offsets is None or len(offsets) != targets.rows:  # which lack zero vectors
        offsets = model.offsets(targets, compute=quiet)
    both, nearest = np.stack([np.zeros_like(offsets), offsets]), TopK(OCCURRENCE)
    search(queries, targets, model.metric, bank.compute, nearest, offsets=both, what="counting hubs")
    rows_of_both = list(nearest.rows)
    if model.query_map is not None:
        learned = TopK(OCCURRENCE)
        search(model.query_map(queries), targets, model.metric, quiet, learned, offsets=offsets)
        rows_of_both[1] = learned.rows[0]
    raw, corrected = (k_occurrence(rows, targets.rows) for rows in rows_of_both)
    chance = skewness_by_chance(len(queries), OCCURRENCE, targets.rows)
    largest = float(corrected.max() / len(queries))
    return model.replace(hubness_at_fit=HubnessAtFit(len(queries), skewness(raw), skewness(corrected), chance, largest))
