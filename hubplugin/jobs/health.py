"""`inspect`: check that a correction is complete and still works as at the fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from datetime import datetime

import numpy as np

from hubplugin.bank import SEEN, Bank, BankLike, PreparedBank, number_rows, own_share
from hubplugin.compute import Compute
from hubplugin.errors import InputError, StoreError
from hubplugin.jobs.hubs import (
    NOT_FOUND,
    count_found,
    find_hubs,
    find_targets,
    search_store,
)
from hubplugin.jobs.naming import Naming, display_names, display_query, names_of
from hubplugin.jobs.results import HubnessNow, Inspection
from hubplugin.jobs.write import Counts, count_wrong, require_match
from hubplugin.measures.hubness import (
    add_never_found,
    count_targets,
    k_occurrence,
    pick_evenly,
    skewness,
    skewness_by_chance,
)
from hubplugin.measures.significance import Side
from hubplugin.model import HubnessAtFit, OffsetModel
from hubplugin.results import CORRECTED, RAW
from hubplugin.store import Correction, Id, Store, for_job, read_recorded
from hubplugin.validation import OCCURRENCE

logger = logging.getLogger(__name__)

QUERIES = 200
"""The number of queries whose nearest targets are counted, at the fit and by `inspect`.

Skewness depends on this number."""

FEWEST_LIVE = 100
"""The fewest live queries that can show whether they are of the bank's kind."""


def inspect(
    store: Store,
    live: BankLike | None = None,
    *,
    queries: int = QUERIES,
    show: str | Naming | None = None,
    compute: Compute = Compute(),
) -> Inspection:
    """Check that every target has the right offset, and that hubness is still lower.

    The whole store is read, and nothing is changed.

    Args:
        store: Any store.
        live: Queries that people ask now [m, d]; by default the queries recorded since
            the correction was made. Queries that are in the bank are left out.
        queries: The number of queries, drawn at random, that are searched for raw and
            corrected; 0 for none. If fewer than 100 live queries are left, queries of
            the bank replace them.
        show: The names of hubs, as in `hubplugin.diagnose`.
        compute: Device, memory and progress.

    Raises:
        StoreError: Live queries were passed, but the store has no active correction.
        InputError: The queries cannot be used.
    """
    store = for_job(store)
    correction = store.correction()
    is_active = correction is not None and correction.active
    if live is not None and not is_active:
        raise StoreError(f"{store.url} has no active correction; apply one first")
    logger.info("%s: inspecting", store.url)
    names = names_of(store, show)
    counts = Counts()
    drift = hubness = None
    if correction is not None:
        model = correction.model
        require_match(model, store)  # a store made anew may have other vectors
        asked = None
        searches = is_active and queries > 0
        if searches:  # errors in the queries come before the store is read
            asked = _read_live_queries(store, correction, live, compute)
        counts = count_wrong(store, model, compute)
        if searches:
            drift = _measure_drift(model, asked, compute)
            hubness = _count_hubs(store, model, asked, queries, names, compute)
    logger.info("%s: inspected", store.url)
    return Inspection(
        store.url,
        store.metric,
        store.dim,
        store.count(),
        correction,
        store.previous(),
        missing=counts.missing,
        stale=counts.stale,
        foreign=counts.foreign,
        missing_ids=counts.missing_ids,
        stale_ids=counts.stale_ids,
        invalid_vectors=counts.invalid_vectors,
        hubness=hubness,
        drift=drift,
        notes=store.notes(),
        warnings=store.attention(),
        shown=getattr(names, "field", None),
    )


@dataclass(frozen=True)
class LiveQueries:
    """Queries that people ask now and that the bank lacks, in random order.

    vectors: The queries [m, d], prepared like those in the bank.
    names: The names of the queries [m].
    right: The id of the most clicked target of each query [m], -1 for none.
    """

    vectors: np.ndarray
    names: Sequence[str]
    right: Sequence[Id]


def _read_live_queries(
    store: Store, correction: Correction, live: BankLike | None, compute: Compute
) -> LiveQueries | None:
    """Return a sample of the live queries that the bank of the correction lacks.

    Return None if there are fewer than `FEWEST_LIVE`.

    Raises:
        InputError: The live queries come with answers, or cannot be used.
    """
    model = correction.model
    if live is not None:
        bank = Bank.of(live, "live queries")
        if bank.answers is not None:
            raise InputError(
                "live queries have no answers; evaluate measures R@1 on queries with "
                "known answers"
            )
    else:
        since = None
        if correction.made is not None:
            since = datetime.fromisoformat(correction.made).timestamp()
        recorded = read_recorded(store, since)
        if recorded is None:
            return None
        bank = Bank(recorded, recorded.answers)
    asked = bank.prepare(model.metric, compute, store)
    sample = np.random.default_rng().permutation(len(asked.query_bank))[: 2 * SEEN]
    rows = sample[~is_in_bank(model, asked.query_bank[sample])]
    if len(rows) < FEWEST_LIVE:
        if live is not None:
            logger.warning(
                "only %d live queries are not in the bank, and %d are needed: queries "
                "of the bank are used instead",
                len(rows),
                FEWEST_LIVE,
            )
        return None
    names = [display_query(bank, row) for row in rows.tolist()]
    right = [-1] * len(rows) if asked.clicks is None else asked.clicks[rows].tolist()
    return LiveQueries(asked.query_bank[rows], names, right)


def is_in_bank(model: OffsetModel, queries: np.ndarray) -> np.ndarray:
    """Return which of the prepared `queries` [m, d] are in the bank of `model`: bool [m].

    The vectors are rounded before they are compared.
    """
    bank = model.terms[0].bank
    both = np.concatenate([bank, queries]).astype(np.float32).round(5)
    return number_rows(both)[len(bank) :] < len(bank)


def _measure_drift(
    model: OffsetModel, live: LiveQueries | None, compute: Compute
) -> float | None:
    """Return the own share of live queries and bank; None if either is too small."""
    bank = model.terms[0].bank
    sample = bank[:: max(len(bank) // SEEN, 1)]
    if live is None or len(sample) < FEWEST_LIVE:
        return None
    return own_share(live.vectors, sample, compute, np.random.default_rng())


def _count_hubs(
    store: Store,
    model: OffsetModel,
    live: LiveQueries | None,
    queries: int,
    names: Naming | None,
    compute: Compute,
) -> HubnessNow | None:
    """Search a store for some queries, raw and corrected, and return the hubness.

    Return None if there are fewer than two queries, or no targets.

    Args:
        store: The store.
        model: The model of its correction.
        live: The live queries; None to search for queries of the bank instead.
        queries: The most queries to search for.
        names: The function that names targets.
        compute: Device, memory and progress.
    """
    asked = live or LiveQueries(pick_evenly(model.terms[0].bank, queries), (), ())
    searched = asked.vectors[:queries]
    count = store.count()
    # The model of `dn` keeps only the mean of its bank, and a store may be empty.
    if len(searched) < 2 or not count:
        return None
    # In each search, a target is known by its place among all targets found so far.
    found = {}
    place_of: dict[Id, int] = {}
    for label in (RAW, CORRECTED):
        found[label] = search_store(
            store, searched, OCCURRENCE, label, compute, place_of
        )
    ids = [*place_of]
    occurrence = {}
    for label, nearest in found.items():
        times = count_found(nearest, len(ids))
        occurrence[label] = add_never_found(times, count)
    row_of = {**place_of, -1: -1}
    right = np.array([row_of.get(id, NOT_FOUND) for id in asked.right[:queries]])

    def describe(rows: list[int]) -> tuple[list[Id], list[str]]:
        """Return the ids and names of the targets in `rows`."""
        described = [ids[row] for row in rows]
        return described, display_names(described, names)

    hubs, _ = find_hubs(found, len(ids), describe, asked.names, right)
    return HubnessNow(
        len(searched),
        live is not None,
        skewness(occurrence[RAW]),
        skewness(occurrence[CORRECTED]),
        skewness_by_chance(len(searched), OCCURRENCE, count),
        model.hubness_at_fit,
        hubs,
        {label: count_targets(each) for label, each in occurrence.items()},
    )


def with_hubness(
    model: OffsetModel, bank: PreparedBank, right: Side | None = None
) -> OffsetModel:
    """Return `model` with the hubness of the gallery, for `inspect` to compare later.

    The model is returned unchanged if there are too few queries or targets to count.

    Args:
        model: The fitted model.
        bank: The bank that it was fitted on, with the gallery.
        right: The forecast of R@1; None without known answers.
    """
    count = bank.require_targets().rows
    queries = pick_evenly(model.terms[0].bank, QUERIES)
    if len(queries) < 2 or count <= OCCURRENCE:
        return model
    label = "counting hubs"
    raw = k_occurrence(find_targets(bank, queries, label), count)
    corrected = k_occurrence(find_targets(bank, queries, label, model), count)
    forecast = None
    if right is not None:
        forecast = [right.before, right.after, *astuple(right.change)]
    hubness = HubnessAtFit(
        queries=len(queries),
        raw=skewness(raw),
        corrected=skewness(corrected),
        chance=skewness_by_chance(len(queries), OCCURRENCE, count),
        largest=float(corrected.max() / len(queries)),
        right=forecast,
    )
    return replace(model, hubness_at_fit=hubness)
