"""Back to a version of the correction that the store has kept."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from datetime import datetime

from hubplugin.errors import Parameter, StoreError
from hubplugin.store import Store, StoredVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolledBack:
    """What `rollback` did: searches used the version `left`, and use `active` from now on. written: False after a dry
    run. quarantined: how many targets came into quarantine after `active` was made, so that they may have their old
    offset there until a refresh."""

    left: StoredVersion | None
    active: StoredVersion
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

    Nothing is computed: targets have the offsets that were written for that version. `refresh` gives theirs to
    targets that came or changed since without it, and the floor to those that came into quarantine since. Raises
    StoreError if there is no such version.
    """
    versions = store.versions()
    active = next((version for version in versions if version.state == "active"), None)
    kept = [version for version in versions if version.state == "kept"]
    if to is None:
        found = [version for version in kept if active is None or version.number < active.number]
    else:
        found = [version for version in kept if version.number == to]
    if not found:
        wanted = "version before the active one" if to is None else f"version {to}"
        there = ", ".join(str(version.number) for version in kept)
        offer = (f"; kept: {there}, to be named by ", Parameter("to")) if kept else ()
        raise StoreError(f"{store.url} keeps no {wanted}", *offer)
    quarantined = _quarantined_since(store, found[-1])
    if dry_run:
        return RolledBack(active, found[-1], written=False, quarantined=quarantined)
    store.return_to(found[-1].number)
    logger.info("%s: version %d is active again", store.url, found[-1].number)
    left = None if active is None else replace(active, state="kept")
    return RolledBack(left, replace(found[-1], state="active"), quarantined=quarantined)


def _quarantined_since(store: Store, version: StoredVersion) -> int:
    """How many targets of `store` came into quarantine after `version` was made; all of them where nothing says when
    that was."""
    listed = store.quarantined().last.values()
    if version.made is None:
        return len(listed)
    made = datetime.fromisoformat(version.made).replace(microsecond=0)  # the list counts in seconds
    return sum(datetime.fromisoformat(event.when) >= made for event in listed)
