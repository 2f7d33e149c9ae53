"""What becomes of newcomers that look planted, before a corrected client writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hubplugin.admission import Admission
from hubplugin.compute import Compute
from hubplugin.errors import InputError
from hubplugin.methods.robust import floor_of
from hubplugin.model import OffsetModel
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata
from hubplugin_qdrant.cached_manifest import CachedManifest, CorrectionCache
from hubplugin_qdrant.manifest import Version
from hubplugin_qdrant.operations import GivenVector, Operation, PointId, listed_id
from hubplugin_qdrant.stored_offsets import usable

WHO = "admission"
"""Who has decided, in the quarantine list."""


def at_once(function: Callable[[], Any]) -> Any:
    return function()


def kept_out(
    cache: CorrectionCache,
    known: CachedManifest,
    ids: Sequence[PointId],
    vectors: Sequence[GivenVector],
    compute: Callable[[Callable[[], Any]], Any] | None = None,
) -> Operation:
    """Those of the points `ids` that must not be found, once they are in the quarantine list: a set of ids.

    Flagged ones are logged and told to the hook. Raises InputError where they are refused. compute: by default that of
    the client; an upload computes at once.
    """
    admission = cache.admission
    if admission is None or known.manifest is None:
        return frozenset()
    fitted = yield from cache.fitted(known)
    active = [(version, model) for version, model in fitted if version in known.manifest.active.values()]
    reasons = yield (compute or cache.compute)(lambda: flagged(admission, ids, vectors, active))
    admission.tell(reasons, len(ids))
    if not reasons or admission.policy != "quarantine":
        return frozenset()
    for _, model in fitted:
        floor_of(model)  # an error belongs before the first write
    yield from _enter(cache, known.collection, reasons)
    return frozenset(key for key in ids if listed_id(key) in reasons)


def flagged(
    admission: Admission,
    ids: Sequence[PointId],
    vectors: Sequence[GivenVector],
    active: Sequence[tuple[Version, OffsetModel]],
) -> dict[int | str, str]:
    """Why some of the points `ids` are flagged by one of the `active` versions, by id as a quarantine list has it."""
    found: dict[int | str, str] = {}
    for version, model in active:
        if version.group_by:
            raise InputError(
                "admission judges by the gallery of a whole collection, and this one is corrected with "
                f"group_by={version.group_by!r}: write to it with a client without admission"
            )
        rows, matrix, _ = usable(vectors, version)
        if rows:
            for place, reason in admission.reasons(model, matrix, Compute()).items():
                found[listed_id(ids[rows[place]])] = reason
    return found


def _enter(cache: CorrectionCache, collection: str, reasons: dict[int | str, str]) -> Operation:
    """Puts what is flagged into the quarantine list of `collection`, where it is not in it yet."""
    name = m.metadata_collection(collection)
    found = yield cache.raw.retrieve(name, ids=[m.QUARANTINE_ID], with_payload=True)
    before = listed = metadata.quarantine_of(found, collection)
    for key, reason in reasons.items():
        if key not in before.last:
            listed = listed.changed("add", [key], WHO, reason)
    if listed is not before:
        yield cache.raw.upsert(name, [metadata.quarantine_point(listed)], wait=True)
