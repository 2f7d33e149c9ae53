"""Hubs: the targets that most queries find, each with some queries that it misleads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hubplugin.bank import PreparedBank
from hubplugin.compute import Compute, TopK, search
from hubplugin.measures import hubness
from hubplugin.model import OffsetModel
from hubplugin.results import RAW, Hub, Outcome
from hubplugin.store import Id, Store
from hubplugin.validation import OCCURRENCE

LISTED = 20
"""The most hubs of each search that are named, and the most targets never found."""

MISLED = 3
"""The most misled queries that are shown with a hub."""

NOT_FOUND = -2
"""The row that stands for a right answer that no query finds, or that is unknown."""

BATCH = 256
"""The number of queries in one request to a store."""


def count_found(nearest: np.ndarray, size: int) -> np.ndarray:
    """Return how many queries find each of `size` targets: int64 [size].

    `nearest` [q, k] has the rows that the queries find, -1 for none.
    """
    return hubness.k_occurrence(nearest[nearest >= 0], size)


def search_store(
    store: Store,
    queries: np.ndarray,
    k: int,
    label: str,
    compute: Compute,
    place_of: dict[Id, int],
) -> np.ndarray:
    """Return the places in `place_of` of the targets that queries find, int64 [q, k].

    The best target comes first. If a query finds fewer than k targets, the rest is -1.

    Args:
        store: The store.
        queries: The queries [q, d].
        k: The number of targets that each query finds.
        label: The search, "raw" or "corrected".
        compute: Only its `progress` is used.
        place_of: The place of each id found so far. It is updated: ids that were not
            found before get the next places.
    """
    nearest = np.full((len(queries), k), -1, np.int64)
    for start in range(0, len(queries), BATCH):
        batch = queries[start : start + BATCH]
        hits = store.search(batch, k, raw=label == RAW).ids
        for row, ids in enumerate(hits, start):
            found = [place_of.setdefault(id, len(place_of)) for id in ids]
            nearest[row, : len(ids)] = found
        compute.report(f"searching {label}", start + len(hits), len(queries))
    return nearest


def find_targets(
    bank: PreparedBank,
    queries: np.ndarray,
    label: str,
    model: OffsetModel | None = None,
) -> np.ndarray:
    """Return the rows that queries find in the gallery of `bank`, best first: [m, k].

    Args:
        bank: The bank, with its gallery.
        queries: Prepared queries [m, d].
        label: The name of this step in progress reports.
        model: The model that corrects the search; None for a raw search.
    """
    gallery = bank.require_targets()
    offsets = None
    if model is not None:
        offsets = model.fitted
        # Offsets from the fit also count zero vectors, which `gallery` leaves out.
        if offsets is None or len(offsets) != gallery.rows:
            offsets = model.offsets(gallery, compute=bank.compute.without_progress)
        if model.query_map is not None:
            queries = model.query_map(queries)
    top = TopK(OCCURRENCE)
    search(
        queries, gallery, bank.metric, bank.compute, top, offsets=offsets, label=label
    )
    found: np.ndarray = top.rows[0]
    return found


def find_hubs(
    found: Mapping[str, np.ndarray],
    size: int,
    describe: Callable[[list[int]], tuple[Sequence[Id], Sequence[str]]],
    queries: Sequence[str] = (),
    right: np.ndarray | None = None,
) -> tuple[list[Hub], list[str]]:
    """Return the hubs of each search, and the names of some targets never found raw.

    Args:
        found: The rows of the targets that queries find in each search: "raw" and, as
            the last, perhaps a corrected search. Best first, -1 for none [q, k].
        size: The number of targets.
        describe: A function from rows of targets to their ids and names.
        queries: The names of the queries. Without names, or without a corrected search,
            hubs have no `misled`.
        right: The row of the right answer to each query [q], negative if unknown.
    """
    counts = {search: count_found(rows, size) for search, rows in found.items()}
    # The queries that each hub misleads.
    misled: dict[int, list[int]] = {}
    for count in counts.values():
        most = hubness.hubs(count, LISTED)
        misled |= {hub: [] for hub in most[count[most] > 0].tolist()}
    before = found[RAW][:, 0]
    after = [*found.values()][-1][:, 0]  # as before, without a corrected search
    if right is None:
        right = np.full(len(before), NOT_FOUND)
    if queries:
        changed = _changed_queries(before, after, right)
        for hub in misled:
            misled[hub] = changed[before[changed] == hub][:MISLED].tolist()
    never = hubness.pick_evenly(np.flatnonzero(counts[RAW] == 0), LISTED).tolist()
    replacements = [int(after[query]) for rows in misled.values() for query in rows]
    described = [*dict.fromkeys([*misled, *never, *replacements])]
    targets = {}
    for row, id, name in zip(described, *describe(described), strict=True):
        found_by = {search: int(count[row]) for search, count in counts.items()}
        targets[row] = Hub(id, name, found_by)
    hubs = []
    for hub, misled_queries in misled.items():
        outcomes = []
        for query in misled_queries:
            title = targets[after[query]].title
            is_right = bool(after[query] == right[query])
            outcomes.append(Outcome(queries[query], title, is_right))
        hubs.append(replace(targets[hub], misled=outcomes))
    return hubs, [targets[row].name for row in never]


def _changed_queries(
    before: np.ndarray, after: np.ndarray, right: np.ndarray
) -> np.ndarray:
    """Return the queries whose wrong first target is replaced by the correction.

    Queries with a right answer after the correction come first.

    Args:
        before, after: The first target of each query, raw and corrected [q]; -1 for
            none.
        right: The right answer to each query, negative if unknown [q].
    """
    changed = np.flatnonzero((after != before) & (before != right) & (after >= 0))
    is_wrong = after[changed] != right[changed]
    return changed[np.argsort(is_wrong, kind="stable")]
