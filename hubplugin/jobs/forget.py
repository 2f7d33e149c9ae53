"""Queries that people take back: out of what is recorded, and out of every model that was fitted on them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from hubplugin.abilities import Versioned, versions_of
from hubplugin.bank import Bank
from hubplugin.compute import Compute, same_rows
from hubplugin.errors import CorrectionRefused, InputError, StoreError
from hubplugin.jobs.correct import Refitted, refit
from hubplugin.metric import Metric, normalise
from hubplugin.model import Dot
from hubplugin.recording import Recorded
from hubplugin.recording import forget as forget_recorded
from hubplugin.recording.sample import as_digest
from hubplugin.store import Store, recorded_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Forgotten:
    """What `forget` did. queries: how many of the ids were recorded, as queries or with clicks. refitted: the
    correction that took the place of one that knew them; None where none did."""

    queries: int
    refitted: Refitted | None

    def __str__(self) -> str:
        anew = "" if self.refitted is None else "; the correction knew them, and was fitted anew without them"
        return f"{self.queries} recorded queries forgotten, with their clicks{anew}"


def forget(store: Store, ids: Collection[str], *, compute: Compute = Compute()) -> Forgotten:
    """Forgets queries that were recorded of `store`, by the ids that `Recorder.id_of` gives, with their clicks.

    A model holds its bank, and what clicks taught it. So an active correction that was fitted on any of them is first
    fitted anew on what stays recorded, as `refit` does it, and activated even if it is worse. Where too few pairs stay
    to learn from, it has offsets alone, and says so. Earlier versions are deleted, so that none returns with a
    rollback. If it is cut off, start it again with the same ids; do not run it beside an `apply` or a `refit`.

    An id finds what the record has. A query that its sample has dropped since may still be in a model, and model files
    that you saved are yours to delete.

    Args:
        store: an open store, of which queries are recorded.
        ids: 16 hexadecimal digits each. Those that are not recorded are left alone.
        compute: as in `hubplugin.refit`.

    Raises:
        InputError: an id is none, or nobody has said where queries to the store are recorded.
        StoreError: the correction knows them, and cannot be fitted anew, since other queries of its bank are not
            recorded, or too few stay; a run that was cut off may know them; a part of the record cannot be read.
            Nothing is forgotten then.
    """
    digests = [as_digest(each) for each in ids]
    if store.record is None:
        raise InputError(f"{store.url}: nobody has said where its queries are recorded; {store.how_to_record}")
    recorded, refitted = recorded_of(store), None
    gone = np.isin([] if recorded is None else recorded.ids, list(ids))
    if recorded is not None and gone.any():
        refitted = _without(store, recorded, gone, compute)
    if isinstance(store, Versioned) and len(versions_of(store)) > 1:
        store.prune(0, compute.progress)
    count = forget_recorded(store.record, digests)
    logger.info("%s: %d queries forgotten", store.url, count)
    return Forgotten(count, refitted)


def _without(store: Store, recorded: Recorded, gone: np.ndarray, compute: Compute) -> Refitted | None:
    """Fits the active correction of `store` anew without the recorded queries that are `gone` [m], if it knows any."""
    correction, vectors = store.correction(), recorded.array()
    if any(version.state == "half-written" for version in versions_of(store)):
        raise StoreError(
            f"{store.url}: a run that was cut off may know these queries; start it again, or take the correction out "
            "(hubplugin remove), and then forget"
        )
    if correction is None or correction.model.dim != recorded.dim:
        return None
    model = correction.model
    asked = normalise(vectors, "queries") if model.metric is Metric.COSINE else vectors
    rows = same_rows(model.terms[0].bank, asked)
    known = rows[rows >= 0]
    if isinstance(model.terms[0], Dot) or (gone[known].any() and len(known) < len(rows)):
        raise StoreError(
            f"{store.url}: its correction was fitted on queries that are not recorded; apply it anew on a bank without "
            "those that shall be forgotten, or take it out (hubplugin remove), and then forget"
        )
    if not gone[known].any():
        return None
    answers = None if recorded.answers is None or not model.learned else recorded.answers[~gone]
    learning: list[bool | None] = [None, False] if model.learned else [None]
    for learn in learning:
        try:
            bank_left = Bank(vectors[~gone], answers if learn is None else None)
            done = refit(store, bank_left, learn=learn, force=True, keep=0, compute=compute)
        except (InputError, CorrectionRefused) as error:
            reason = str(error)
        else:
            note = [] if learn is None else [f"{reason}; nothing was learned, and the correction has offsets alone"]
            return replace(done, notes=[*note, *done.notes])
    raise StoreError(
        f"{store.url}: no correction can be fitted without these queries ({reason}); take it out (hubplugin remove), "
        "and then forget"
    )
