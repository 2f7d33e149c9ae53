"""The list of targets that no correction may show."""

from __future__ import annotations

import getpass
import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np

from hubplugin.abilities import Quantising, Quarantining, able
from hubplugin.compute import Compute
from hubplugin.errors import InputError, StoreError
from hubplugin.jobs.write import Applied, refresh
from hubplugin.methods.robust import floor_of
from hubplugin.model import OffsetModel
from hubplugin.quarantine import Quarantine
from hubplugin.store import Id, Store

logger = logging.getLogger(__name__)


COARSEST = 1e-3
"""A store that rounds offsets by more has codes, and a floor among them would leave nothing of the others."""


def quarantine(
    store: Store,
    what: Literal["add", "remove"],
    ids: Sequence[Id],
    why: str,
    *,
    who: str | None = None,
    compute: Compute | None = None,
) -> Applied:
    """Adds targets to the quarantine list of `store` or removes them, and refreshes its offsets.

    A target on the list has an offset with which it is not found, after each refresh, apply and refit, until it is
    removed from the list; its vector stays as it is. The list says who did what, when and why, and keeps what was
    removed, too. who: by default the name of the user. A `rollback` gives listed targets
    the floor of that model, too.

    Raises StoreError where there is no active correction, or the store cannot keep such offsets; InputError for ids
    that are not there or not listed, and without a reason.
    """
    able(store, Quarantining).write_quarantine(planned(store, what, ids, why, who))
    logger.info("%s: quarantine list written, %s of %d targets", store.url, what, len(ids))
    compute = compute or Compute()
    return refresh(store, compute=compute)


def planned(store: Store, what: Literal["add", "remove"], ids: Sequence[Id], why: str, who: str | None) -> Quarantine:
    """The list that `quarantine` would write. Raises what it raises, and changes nothing."""
    correction = store.correction()
    if correction is None or not correction.active:
        raise StoreError(f"{store.url} has no active correction; apply one first")
    floor_of(correction.model)
    if _coarseness(store, correction.model) > COARSEST:
        raise StoreError(
            f"{store.url} rounds offsets to its codes, and a quarantined one lies too far from the others; "
            "remove the vector instead"
        )
    if not why.strip():
        raise InputError("a quarantine needs a reason, for whoever reads the list later")
    listed = able(store, Quarantining).quarantined()
    known = {name for batch in store.scan() for name in map(_plain, batch.ids)} if what == "add" else set(listed.last)
    unknown = [name for name in ids if name not in known]
    if unknown:
        there = "no target" if what == "add" else "nothing in quarantine"
        raise InputError(f"{store.url} has {there} with the id {unknown[0]!r}; nothing was changed")
    return listed.changed(what, ids, who or getpass.getuser(), why)


def _coarseness(store: Store, model: OffsetModel) -> float:
    """By how much `store` rounds offsets at most, of those between the smallest and the largest of the gallery."""
    if model.gallery is None or not isinstance(store, Quantising):
        return 0.0
    batch = next(iter(store.scan()), None)
    if batch is None:
        return 0.0
    tried = np.linspace(model.gallery.smallest, model.gallery.largest, len(batch.ids))
    return float(store.rounding(batch, tried).max())


def _plain(name: Id) -> Id:
    return int(name) if isinstance(name, int) else name
