"""`inspect`: whether the correction in a store is whole, and whether it still does what it did when it was fitted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, replace
from datetime import datetime
from typing import Any

import numpy as np

from hubplugin.bank import SEEN, Bank, BankLike, PreparedBank, own_share
from hubplugin.compute import Compute, TopK, search
from hubplugin.errors import InputError, StoreError
from hubplugin.jobs.naming import Naming, display_names, names_of
from hubplugin.jobs.results import HUBS, HubnessNow, Inspection
from hubplugin.jobs.write import Counts, compare, require_match
from hubplugin.measures.hubness import (
    add_never_found,
    count_targets,
    k_occurrence,
    pick_evenly,
    skewness,
    skewness_by_chance,
)
from hubplugin.measures.significance import Side
from hubplugin.metric import Metric, normalise
from hubplugin.model import HubnessAtFit, OffsetModel
from hubplugin.results import NAMED, Hub
from hubplugin.store import Correction, Id, Store, for_job, read_recorded
from hubplugin.validation import OCCURRENCE
from hubplugin.vectors import Directed, Vectors

logger = logging.getLogger(__name__)

QUERIES = 200
"""Queries that are counted, at the fit and by `inspect`. Skewness depends on how many they are."""

FEWEST_LIVE = 100
"""Live queries that it takes to see whether they are of one kind with the bank."""


def inspect(
    store: Store,
    live: BankLike | None = None,
    *,
    queries: int = QUERIES,
    show: str | Naming | None = None,
    compute: Compute = Compute(),
) -> Inspection:
    """Say whether every target has the offset that its vector gives, and whether hubness is still lower.

    The whole store is read, and nothing is changed.

    Args:
        store: any store.
        live: queries that people ask now [m, d]; by default the queries recorded since the correction was made.
            Queries that are in the bank are left out.
        queries: how many queries, drawn at random, are searched for, raw and corrected; 0 for none. If fewer than 100
            live queries are left, queries of the bank take their place.
        show: what hubs are called by, as in `hubplugin.diagnose`.
        compute: device, memory and progress.

    Raises:
        StoreError: live queries were given, and the store has no active correction.
        InputError: the queries cannot be used.
    """
    store = for_job(store)
    correction = store.correction()
    active = correction is not None and correction.active
    if live is not None and not active:
        raise StoreError(f"{store.url} has no active correction; apply one first")
    logger.info("%s: inspecting", store.url)
    fields: dict[str, Any] = {}
    names = names_of(store, show)
    if correction is not None:
        model = correction.model
        require_match(model, store)  # a store made anew may have other vectors
        asked = None
        if active and queries:
            asked = _read_live_queries(store, correction, live, compute)
        fields = _compare_offsets(store, model, compute)
        if asked is not None:
            fields |= _count_hubs(store, model, asked, queries, names, compute)
    logger.info("%s: inspected", store.url)
    return Inspection(
        store.url,
        store.metric,
        store.dim,
        store.count(),
        correction,
        store.previous(),
        notes=store.notes(),
        warnings=store.attention(),
        shown=getattr(names, "field", None),
        **fields,
    )


def _compare_offsets(
    store: Store, model: OffsetModel, compute: Compute
) -> dict[str, Any]:
    """Return the fields of an inspection that compare stored offsets with the model's."""
    counts = Counts()
    missing = list[Id]()
    stale = list[Id]()
    for batch, _, wrong in compare(
        store, model, store.scan(), counts, compute, "checking offsets"
    ):
        absent = np.isnan(batch.offsets)
        for ids, which in ((missing, absent), (stale, wrong & ~absent)):
            rows = np.flatnonzero(which)[: NAMED - len(ids)]
            ids += [batch.ids[row] for row in rows.tolist()]
    return {
        "missing": counts.missing,
        "stale": counts.stale,
        "foreign": counts.foreign,
        "invalid_vectors": counts.invalid_vectors,
        "missing_ids": missing,
        "stale_ids": stale,
    }


def _read_live_queries(
    store: Store, correction: Correction, live: BankLike | None, compute: Compute
) -> np.ndarray:
    """Return a sample of the live queries [m, d], prepared as those in the bank are.

    Queries that are in the bank are left out: they say nothing new.

    Raises:
        InputError: The live queries come with answers, or cannot be used.
    """
    model = correction.model
    recorded: Vectors | None
    if live is not None:
        bank = Bank.of(live, "live queries")
        if bank.answers is not None:
            raise InputError(
                "live queries are searched without answers; evaluate measures R@1 on known ones"
            )
        recorded = bank.vectors(store, compute.progress)
    elif correction.made is not None:
        since = datetime.fromisoformat(correction.made).timestamp()
        recorded = read_recorded(store, since)
    else:
        recorded = read_recorded(store)
    if recorded is None:
        return np.zeros((0, model.dim), np.float32)
    vectors = Directed.of(recorded, model.metric)
    drawn = np.random.default_rng().permutation(vectors.rows)[: 2 * SEEN]
    sample = vectors.select(np.sort(drawn))
    if model.metric is Metric.COSINE:
        sample = normalise(sample, vectors.name)
    unseen: np.ndarray = sample[~is_in_bank(model, sample)]
    if live is not None and len(unseen) < FEWEST_LIVE:
        message = "of the live queries %d are not in the bank, and %d are needed: the bank's are looked at"
        logger.warning(message, len(unseen), FEWEST_LIVE)
    return unseen


def is_in_bank(model: OffsetModel, queries: np.ndarray) -> np.ndarray:
    """Return which of the prepared `queries` [m, d] are in the bank of `model`: bool [m]."""
    known = set(_as_keys(model.terms[0].bank))
    return np.array([key in known for key in _as_keys(queries)], bool)


def _as_keys(rows: np.ndarray) -> list[bytes]:
    """Return the bytes of each row, rounded, so that equal rows have equal bytes.

    Adding 0 makes -0 a 0.
    """
    return [row.tobytes() for row in np.asarray(rows, np.float32).round(5) + 0.0]


def _count_hubs(
    store: Store,
    model: OffsetModel,
    live: np.ndarray,
    queries: int,
    names: Naming | None,
    compute: Compute,
) -> dict[str, Any]:
    """Return the fields of an inspection that need searches: `drift` and `hubness`.

    `queries` of the `live` queries [m, d] are searched for, or of the bank's if the live
    ones are fewer than `FEWEST_LIVE`.
    """
    rng = np.random.default_rng()
    bank = model.terms[0].bank
    at_fit = bank[:: max(len(bank) // SEEN, 1)]
    fields: dict[str, Any] = {}
    is_live = len(live) >= FEWEST_LIVE
    if is_live and len(at_fit) >= FEWEST_LIVE:
        fields["drift"] = own_share(live, at_fit, compute, rng)
    searched = pick_evenly(bank, queries)
    if is_live:
        searched = rng.permutation(live)[:queries]
    count = store.count()
    # The model of `dn` keeps only the mean of its bank, and a store may be empty.
    if len(searched) < 2 or not count:
        return fields
    raw = _count_hits(store.search(searched, OCCURRENCE, raw=True).ids)
    corrected = _count_hits(store.search(searched, OCCURRENCE).ids)
    most_found = [*raw.most_common(HUBS), *corrected.most_common(HUBS)]
    ids = [*dict.fromkeys(target for target, _ in most_found)]
    occurrence_raw = add_never_found(np.array([*raw.values()]), count)
    occurrence = add_never_found(np.array([*corrected.values()]), count)
    fields["hubness"] = HubnessNow(
        len(searched),
        is_live,
        skewness(occurrence_raw),
        skewness(occurrence),
        skewness_by_chance(len(searched), OCCURRENCE, count),
        model.hubness_at_fit,
        [
            Hub(target, name, {"raw": raw[target], "corrected": corrected[target]})
            for target, name in zip(ids, display_names(ids, names), strict=True)
        ],
        {
            "raw": count_targets(occurrence_raw),
            "corrected": count_targets(occurrence),
        },
    )
    return fields


def _count_hits(found: Iterable[Iterable[Id]]) -> Counter[Id]:
    """Return how many queries find each target."""
    return Counter(target for ids in found for target in ids)


def with_hubness(
    model: OffsetModel, bank: PreparedBank, right: Side | None = None
) -> OffsetModel:
    """Return `model` with its `hubness_at_fit`, or as it is if there is too little to count.

    Args:
        model: The fitted model.
        bank: The bank that it was fitted on, with the gallery.
        right: The forecast of R@1; None without known answers.
    """
    targets = bank.require_targets()
    queries = pick_evenly(model.terms[0].bank, QUERIES)
    if len(queries) < 2 or targets.rows <= OCCURRENCE:
        return model
    offsets = model.fitted
    if offsets is None or len(offsets) != targets.rows:  # which lack zero vectors
        offsets = model.offsets(targets, compute=bank.compute.without_progress)
    # One pass over the targets serves both searches: the first half is ranked raw, the
    # second corrected.
    asked = np.concatenate([queries, queries])
    if model.query_map is not None:
        asked[len(queries) :] = model.query_map(queries)
    both = np.stack([np.zeros_like(offsets), offsets])
    top = TopK(OCCURRENCE)
    compute = bank.compute
    label = "counting hubs"
    search(asked, targets, model.metric, compute, top, offsets=both, label=label)
    raw = k_occurrence(top.rows[0][: len(queries)], targets.rows)
    corrected = k_occurrence(top.rows[1][len(queries) :], targets.rows)
    forecast = None
    if right is not None:
        forecast = [right.before, right.after, *astuple(right.change)]
    hubness = HubnessAtFit(
        len(queries),
        skewness(raw),
        skewness(corrected),
        skewness_by_chance(len(queries), OCCURRENCE, targets.rows),
        float(corrected.max() / len(queries)),
        forecast,
    )
    return replace(model, hubness_at_fit=hubness)
