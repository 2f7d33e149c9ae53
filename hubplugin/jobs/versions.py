"""Versions of a correction to return to, and the list of targets that no version may show."""

from __future__ import annotations

import getpass
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Literal

import numpy as np

from hubplugin.abilities import Quantising, Quarantining, Versioned, able, quarantined_in, versions_of
from hubplugin.compute import Compute
from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.jobs.facts import ToldVersion
from hubplugin.jobs.write import Applied, refresh
from hubplugin.methods.robust import floor_of
from hubplugin.model import OffsetModel
from hubplugin.quarantine import Quarantine
from hubplugin.store import Id, Store, StoredVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolledBack:
    """What `rollback` did: searches used the version `left`, and use `active` from now on. written: False after a dry
    run. quarantined: how many targets came into quarantine after `active` was made, so that they may have their old
    offset there until a refresh."""

    left: ToldVersion | None
    active: ToldVersion
    written: bool = True
    quarantined: int = 0

    def __str__(self) -> str:
        left = "searches were raw" if self.left is None else f"before: {self.left}"
        lines = [f"{'active now' if self.written else 'nothing was written; would be active'}: {self.active}", left]
        if self.quarantined:
            lines.append(
                f"{self.quarantined} targets came into quarantine after that version was made, and may be found with "
                "their old offset: run refresh"
            )
        return "\n".join(lines)


def rollback(store: Store, to: int | None = None, *, dry_run: bool = False) -> RolledBack:
    """Makes a kept version the active one, in one step: by default the newest before the active one, or the version
    with the number `to`, which may also be a later one that was left by a rollback.

    Targets have the offsets that were written for that version. `refresh` gives theirs to targets that came or
    changed since without it, and the floor to those that came into quarantine since. Raises StoreError if there is no
    such version.
    """
    versions = versions_of(store)
    active = next((version for version in versions if version.state == "active"), None)
    kept = [version for version in versions if version.state == "kept"]
    if to is None:
        candidates = [version for version in kept if active is None or version.number < active.number]
    else:
        candidates = [version for version in kept if version.number == to]
    if not candidates:
        wanted = "version before the active one" if to is None else f"version {to}"
        there = ", ".join(str(version.number) for version in kept)
        offer = (f"; kept: {there}, to be named by ", Parameter("to")) if kept else ()
        raise StoreError(f"{store.url} keeps no {wanted}", *offer)
    quarantined = _quarantined_since(store, candidates[-1])
    if dry_run:
        return RolledBack(active, candidates[-1], written=False, quarantined=quarantined)
    able(store, Versioned).return_to(candidates[-1].number)
    logger.info("%s: version %d is active again", store.url, candidates[-1].number)
    left = None if active is None else replace(active, state="kept")
    return RolledBack(left, replace(candidates[-1], state="active"), quarantined=quarantined)


def _quarantined_since(store: Store, version: StoredVersion) -> int:
    """How many targets of `store` came into quarantine after `version` was made; all of them where nothing says when
    that was."""
    listed = quarantined_in(store).last.values()
    if version.made is None:
        return len(listed)
    made = _moment(version.made).replace(microsecond=0)  # the list counts in seconds
    return sum(_moment(event.when) >= made for event in listed)


def _moment(date: str) -> datetime:
    """UTC, if `date` does not say another zone."""
    moment = datetime.fromisoformat(date)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)


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
    removed, too. who: by default the name of the user. After `rollback` a refresh gives listed targets their floor
    under that version, too.

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
