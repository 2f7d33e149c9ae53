"""Queries that people take back: out of what is recorded, and out of every model that was fitted on them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from hubplugin.abilities import Versioned
from hubplugin.bank import Bank
from hubplugin.compute import Compute
from hubplugin.errors import InputError, StoreError
from hubplugin.jobs.correct import Refitted, refit
from hubplugin.metric import Metric, normalise
from hubplugin.model import Dot, OffsetModel
from hubplugin.recording import forget as forget_recorded
from hubplugin.recording.sample import as_digest, id_of
from hubplugin.store import Store, recorded_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Forgotten:
    """What `forget` did. queries: how many of the ids were recorded. refitted: the correction that took the place of
    one that knew them; None where none did."""

    queries: int
    refitted: Refitted | None

    def __str__(self) -> str:
        anew = "" if self.refitted is None else "; the correction knew them, and was fitted anew without them"
        return f"{self.queries} queries forgotten, with their clicks{anew}; earlier versions are deleted"


def forget(store: Store, ids: Collection[str], *, compute: Compute = Compute()) -> Forgotten:
    """Forgets queries that were recorded of `store`, by the ids that `Recorder.id_of` gives, with their clicks.

    A model holds its bank, and what clicks taught it. So an active correction that was fitted on any of them is first
    fitted anew on what stays recorded, as `refit` does it, and activated even if it is worse: nobody has to wait for
    enough other queries. Where too few pairs stay to learn from, it has offsets alone, and says so. Earlier versions
    are deleted, so that none returns with a rollback, and so is what a run that was cut off has written. Files of
    models that you saved are yours to delete. If it is cut off itself, start it again with the same ids.

    Args:
        store: an open store, of which queries are recorded.
        ids: 16 hexadecimal digits each. Those that are not recorded are left alone.
        compute: as in `hubplugin.refit`.

    Raises:
        InputError: an id is none, or nothing is recorded of the store.
        StoreError: no other query stays for the correction to be fitted on; or the store refuses.
    """
    digests, recorded = [as_digest(each) for each in ids], recorded_of(store)
    if recorded is None or store.record is None:
        raise InputError(f"{store.url}: no queries are recorded that could be forgotten")
    gone = np.isin(recorded.ids, [id_of(digest) for digest in digests])
    if not gone.any():
        return Forgotten(0, None)
    correction, refitted, vectors = store.correction(), None, recorded.array()
    knows = correction is not None and _knows(correction.model, vectors[gone])
    if correction is not None and knows and not correction.active:
        store.remove(compute.progress)  # the beginning of a run that was cut off
    elif correction is not None and knows:
        if gone.all():
            raise StoreError(
                f"{store.url}: no query would stay for its correction to be fitted on; take that out (hubplugin "
                "remove), and delete what is recorded (hubplugin bank --clear)"
            )
        answers = None if recorded.answers is None else recorded.answers[~gone]
        refitted = _refitted(store, Bank(vectors[~gone], answers), correction.model, compute)
    if isinstance(store, Versioned):
        store.prune(0, compute.progress)
    forget_recorded(store.record, ids)
    logger.info("%s: %d queries forgotten", store.url, gone.sum())
    return Forgotten(int(gone.sum()), refitted)


def _knows(model: OffsetModel, queries: np.ndarray) -> bool:
    """Whether a bank of `model` has any of `queries` [m, d]; that of `dn` is a mean, which may."""
    if model.metric is Metric.COSINE:
        queries = normalise(queries, "queries")
    known = {row.tobytes() for term in model.terms for row in term.bank.round(5) + 0.0}
    return any(isinstance(term, Dot) for term in model.terms) or any(
        row.tobytes() in known for row in queries.round(5) + 0.0
    )


def _refitted(store: Store, bank: Bank, old: OffsetModel, compute: Compute) -> Refitted:
    """The correction `old` fitted anew on `bank`; without learning where that has too few pairs."""
    if not old.learned:
        return refit(store, replace(bank, answers=None), force=True, keep=0, compute=compute)
    try:
        return refit(store, bank, force=True, keep=0, compute=compute)
    except InputError as error:
        done = refit(store, replace(bank, answers=None), learn=False, force=True, keep=0, compute=compute)
        return replace(done, notes=[f"{error}; nothing was learned, and the correction has offsets alone", *done.notes])
