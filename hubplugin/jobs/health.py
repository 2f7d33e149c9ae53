"""`inspect`: whether the correction in a store is whole, and whether it still does what it did when it was fitted."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np

from hubplugin.bank import SEEN, Bank, BankLike, PreparedBank, own_share
from hubplugin.compute import Compute, TopK, search
from hubplugin.errors import InputError, StoreError
from hubplugin.jobs.naming import Naming, display_names
from hubplugin.jobs.results import HUBS, NAMED, HubnessNow, Inspection
from hubplugin.jobs.write import Counts, compare, require_match
from hubplugin.measures.hubness import (
    k_occurrence,
    skewness,
    skewness_by_chance,
    skewness_of_hits,
)
from hubplugin.metric import Metric, normalise
from hubplugin.model import HubnessAtFit, OffsetModel
from hubplugin.report import Histogram, Hub
from hubplugin.store import Correction, Id, Store, for_job, read_recorded
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
    """Whether every target of a store has the offset that its vector gives, and whether hubness is still lower by it.

    Reads the whole store, and changes nothing.

    Args:
        store: any store.
        live: queries that people ask now [m, d]; by default those that were recorded since the correction was made.
            Those that are in the bank count for nothing.
        queries: how many of them, drawn at random, are searched for, raw and corrected; 0 for none. Where fewer than
            100 are live, queries of the bank take their place.
        names: a function from ids to what hubs are called; `hubplugin.jobs.naming` makes one.
        compute: device, memory and progress.

    Raises:
        StoreError: for live queries and a store without an active correction.
        InputError: for queries that cannot be used.
    """
    store = for_job(store)
    correction = store.correction()
    if live is not None and (correction is None or not correction.active):
        raise StoreError(f"{store.url} has no active correction; apply one first")
    logger.info("%s: inspecting", store.url)
    fields: dict[str, Any] = {}
    if correction is not None:
        require_match(
            correction.model, store
        )  # a store that was made anew may have other vectors
        live_queries = (
            _read_live_queries(store, correction, live, compute)
            if correction.active and queries
            else None
        )
        fields = _compare_offsets(store, correction.model, compute)
        if live_queries is not None:
            fields |= _count_hubs(
                store, correction.model, live_queries, queries, names, compute
            )
    logger.info("%s: inspected", store.url)
    facts = (
        store.url,
        store.metric,
        store.dim,
        store.count(),
        correction,
        store.previous(),
    )
    return Inspection(*facts, notes=store.notes(), warnings=store.attention(), **fields)


def _compare_offsets(
    store: Store, model: OffsetModel, compute: Compute
) -> dict[str, Any]:
    """The fields of an inspection that tell what lies in `store` beside what `model` gives."""
    counts, gallery = Counts(), model.gallery
    missing, stale = list[Id](), list[Id]()
    total = squares = 0.0
    edges = (
        np.zeros(2)
        if gallery is None
        else np.linspace(gallery.smallest, gallery.largest, BINS + 1)
    )
    histogram = np.zeros(len(edges) - 1, np.int64)
    batches = store.scan()
    for batch, by_model, wrong in compare(
        store, model, batches, counts, compute, "checking offsets"
    ):
        total, squares = (
            total + by_model.sum(dtype=np.float64),
            squares + np.square(by_model, dtype=np.float64).sum(),
        )
        absent = np.isnan(batch.offsets)
        histogram += np.histogram(
            np.clip(batch.offsets[np.isfinite(batch.offsets)], edges[0], edges[-1]),
            edges,
        )[0]
        for ids, which in ((missing, absent), (stale, wrong & ~absent)):
            ids += [
                batch.ids[row]
                for row in np.flatnonzero(which)[: NAMED - len(ids)].tolist()
            ]
    fields = {
        name: getattr(counts, name)
        for name in ("missing", "stale", "foreign", "invalid_vectors")
    }
    fields |= {"missing_ids": missing, "stale_ids": stale}
    count = counts.scanned
    if gallery is not None:
        fields["offsets"] = Histogram("stored", edges.tolist(), histogram.tolist())
    if gallery is not None and gallery.deviation > 0 and count > 1:
        mean = total / count
        fields["shift"] = mean / gallery.deviation
        fields["spread"] = (
            max(squares / count - mean * mean, 0.0) ** 0.5 / gallery.deviation
        )
    return fields


def _read_live_queries(
    store: Store, correction: Correction, live: BankLike | None, compute: Compute
) -> np.ndarray:
    """A sample of the live queries [m, d], as the bank has its own, without those that are in the bank, which say
    nothing new."""
    model = correction.model
    if live is None:
        since = (
            None
            if correction.made is None
            else datetime.fromisoformat(correction.made).timestamp()
        )
        vectors: Vectors | None = read_recorded(store, since)
    else:
        bank = Bank.of(live, "live queries")
        if bank.answers is not None:
            raise InputError(
                "live queries are searched without answers; evaluate measures R@1 on known ones"
            )
        vectors = bank.vectors(store, compute.progress)
    if vectors is None:
        return np.zeros((0, model.dim), np.float32)
    vectors = Directed.of(vectors, model.metric)
    sample = vectors.select(
        np.sort(np.random.default_rng().permutation(vectors.rows)[: 2 * SEEN])
    )
    if model.metric is Metric.COSINE:
        sample = normalise(sample, vectors.name)
    unseen: np.ndarray = sample[~is_in_bank(model, sample)]
    if live is not None and len(unseen) < FEWEST_LIVE:
        message = "of the live queries %d are not in the bank, and %d are needed: the bank's are looked at"
        logger.warning(message, len(unseen), FEWEST_LIVE)
    return unseen


def is_in_bank(model: OffsetModel, queries: np.ndarray) -> np.ndarray:
    """Whether each of `queries` [m, d], prepared as the bank's are, is in the bank of `model`: bool [m]."""
    bank, rows = (
        np.asarray(part, np.float32).round(5) + 0.0
        for part in (model.terms[0].bank, queries)
    )
    known = {row.tobytes() for row in bank}
    return np.array([row.tobytes() in known for row in rows], bool)


def _count_hubs(
    store: Store,
    model: OffsetModel,
    live: np.ndarray,
    queries: int,
    names: Naming | None,
    compute: Compute,
) -> dict[str, Any]:
    """The fields of an inspection that tell what live queries find, or those of the bank."""
    rng, bank = np.random.default_rng(), model.terms[0].bank
    at_fit = bank[:: max(len(bank) // SEEN, 1)]
    fields: dict[str, Any] = {}
    is_live = len(live) >= FEWEST_LIVE
    if is_live and len(at_fit) >= FEWEST_LIVE:
        fields["drift"] = own_share(live, at_fit, compute, rng)
    searched = rng.permutation(live)[:queries] if is_live else of_bank(model, queries)
    count = store.count()
    if (
        len(searched) < 2 or not count
    ):  # of a model that keeps no more than the mean of its bank; nothing to be found
        return fields
    hits = {
        search: Counter(
            itertools.chain.from_iterable(
                store.search(searched, OCCURRENCE, raw=search == "raw").ids
            )
        )
        for search in ("raw", "corrected")
    }
    raw, corrected = (
        skewness_of_hits(np.array([*counter.values()]), count)
        for counter in hits.values()
    )
    most_found = dict.fromkeys(
        key for counter in hits.values() for key, _ in counter.most_common(HUBS)
    )
    hubs = [
        Hub(key, name, {search: counter[key] for search, counter in hits.items()})
        for key, name in zip(
            most_found, display_names([*most_found], names), strict=True
        )
    ]
    occurrences = {
        search: {0: count - len(counter)} | Counter(counter.values())
        for search, counter in hits.items()
    }
    chance, fit = (
        skewness_by_chance(len(searched), OCCURRENCE, count),
        model.hubness_at_fit,
    )
    return fields | {
        "hubness": HubnessNow(
            len(searched), is_live, raw, corrected, chance, fit, hubs, occurrences
        )
    }


def of_bank(model: OffsetModel, count: int = QUERIES) -> np.ndarray:
    """At most `count` queries of the bank of `model`, the same ones each time: [q, d]."""
    bank = model.terms[0].bank
    queries: np.ndarray = bank[
        np.linspace(0, len(bank) - 1, min(len(bank), count)).astype(int)
    ]
    return queries


def with_hubness(model: OffsetModel, bank: PreparedBank) -> OffsetModel:
    """`model`, fitted on the banks and targets of `bank`, with what its bank found in them."""
    targets, queries = bank.require_targets(), of_bank(model)
    if len(queries) < 2 or targets.rows <= OCCURRENCE:
        return model
    quiet = bank.compute.without_progress
    offsets = model.fitted
    if offsets is None or len(offsets) != targets.rows:  # which lack zero vectors
        offsets = model.offsets(targets, compute=quiet)
    offsets_of_both, nearest = (
        np.stack([np.zeros_like(offsets), offsets]),
        TopK(OCCURRENCE),
    )
    search(
        queries,
        targets,
        model.metric,
        bank.compute,
        nearest,
        offsets=offsets_of_both,
        label="counting hubs",
    )
    rows = list(nearest.rows)
    if model.query_map is not None:
        learned = TopK(OCCURRENCE)
        search(
            model.query_map(queries),
            targets,
            model.metric,
            quiet,
            learned,
            offsets=offsets,
        )
        rows[1] = learned.rows[0]
    raw, corrected = (k_occurrence(rows, targets.rows) for rows in rows)
    chance = skewness_by_chance(len(queries), OCCURRENCE, targets.rows)
    largest = float(corrected.max() / len(queries))
    return replace(
        model,
        hubness_at_fit=HubnessAtFit(
            len(queries), skewness(raw), skewness(corrected), chance, largest
        ),
    )
