"""Who the hubs are: the targets that most queries find, each with queries that it misleads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from hubplugin.bank import PreparedBank
from hubplugin.compute import TopK, search
from hubplugin.model import OffsetModel
from hubplugin.results import CORRECTED, Hub, Misled
from hubplugin.store import Id
from hubplugin.validation import OCCURRENCE

LISTED = 20
"""Hubs of each search that are named, and targets that are never found."""

MISLED = 3
"""Queries that a hub is shown with."""

Found: TypeAlias = Sequence[Sequence[Any]]
"""The targets that each query finds, best first."""


def count_found(found: Found) -> Counter[Any]:
    """Return how many queries find each target."""
    return Counter(chain.from_iterable(found))


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
        label: What progress calls the work.
        model: Corrects the search; None searches raw.
    """
    gallery = bank.require_targets()
    offsets = None
    if model is not None:
        offsets = model.fitted
        if (
            offsets is None or len(offsets) != gallery.rows
        ):  # they have zero vectors, too
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
    found: Mapping[str, Found],
    describe: Callable[[list[Any]], tuple[Sequence[Id], Sequence[str]]],
    queries: Sequence[str] = (),
    right: Sequence[Any] | None = None,
) -> list[Hub]:
    """Return the targets that most queries find, by any of the searches.

    Args:
        found: The finds by "raw" and, if there is a correction, "corrected".
        describe: Returns the ids and names of targets, given as in `found`.
        queries: What each query is called. Without it, or without a correction, hubs
            have no `misled`.
        right: The right answer to each query, -1 if unknown; None without any.
    """
    counts = {search: count_found(each) for search, each in found.items()}
    most = [count.most_common(LISTED) for count in counts.values()]
    hubs = [*dict.fromkeys(target for each in most for target, _ in each)]
    first = [each[0] if each else None for each in found["raw"]]
    after = [each[0] if each else None for each in found.get(CORRECTED, ())]
    answers = right or [-1] * len(first)
    misled: dict[Any, list[int]] = {}
    if queries and after:
        misled = {hub: _pick_misled(hub, first, after, answers) for hub in hubs}
    instead = [after[row] for rows in misled.values() for row in rows]
    shown = [*dict.fromkeys([*hubs, *instead])]
    ids, names = describe(shown)
    id_of = dict(zip(shown, ids, strict=True))
    name_of = dict(zip(shown, names, strict=True))
    described = []
    for hub in hubs:
        examples = []
        for row in misled.get(hub, ()):
            target = after[row]
            is_right = None if answers[row] == -1 else target == answers[row]
            name = name_of[target].removesuffix(f" [{id_of[target]}]")
            examples.append(Misled(queries[row], name, is_right))
        found_by = {search: count[hub] for search, count in counts.items()}
        described.append(Hub(id_of[hub], name_of[hub], found_by, examples))
    return described


def _pick_misled(
    hub: Any, first: Sequence[Any], after: Sequence[Any], right: Sequence[Any]
) -> list[int]:
    """Return the rows of up to `MISLED` queries for which `hub` wrongly comes first.

    Queries that the correction answers rightly come before those that it only changes. If
    the right answer is unknown, only queries that it changes count as misled.

    Args:
        hub: The target.
        first, after: What comes first for each query, raw and corrected [m].
        right: The right answer to each query, -1 if unknown [m].
    """
    ranks = {}
    for row, target in enumerate(first):
        if target != hub or right[row] == hub:
            continue
        if after[row] == right[row]:
            ranks[row] = 0
        elif after[row] != hub:
            ranks[row] = 1
        elif right[row] != -1:
            ranks[row] = 2
    return sorted(ranks, key=ranks.__getitem__)[:MISLED]
