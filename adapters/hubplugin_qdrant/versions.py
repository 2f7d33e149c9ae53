"""Which version a collection searches, writes and gives up: pure functions from manifest to manifest.

A vector has at most one active version, versions before it that are kept, and a collection at most one that is being
written. Everything else whose offsets may still be in the points is retired, and is deleted by the next job:

    begun -> activated            a new version takes the place of the one before, which is kept
    begun -> begun                another run gives up what is half-written
    returned                      a kept version and the active one change places
    pruned                        the versions that were kept longest are given up
    retired                       the correction of one vector is given up
    cleared                       what was retired is deleted
"""

from __future__ import annotations

from hubplugin_qdrant.manifest import Manifest, Version


def amended(manifest: Manifest, vector: str, model: str, storage: str) -> Version | None:
    """The active version of `vector`, if it is of that model (a fingerprint) and storage."""
    version = manifest.active.get(vector)
    return version if version is not None and (version.model, version.storage) == (model, storage) else None


def half_written(manifest: Manifest, vector: str, model: str, storage: str) -> Version | None:
    """The version of `vector` that was cut off, if it is of that model (a fingerprint) and storage."""
    version = manifest.writing
    return version if version is not None and _identity(version) == (vector, model, storage) else None


def begun(manifest: Manifest, version: Version) -> Manifest:
    """`version` is written from now on; another that is half-written, perhaps by a run that goes on, is given up."""
    before = manifest.writing
    if before is not None and before.number == version.number:  # taken up by another run
        return manifest.changed(writing=version)
    given_up = () if before is None else (before,)
    return manifest.changed(writing=version, last_number=version.number, retired=(*manifest.retired, *given_up))


def activated(manifest: Manifest, version: Version) -> Manifest:
    """Searches use `version` from now on."""
    before, active = manifest.active.get(version.vector), manifest.active | {version.vector: version}
    if before is not None and before.number == version.number:
        return manifest.changed(active=active)
    replaced = () if before is None else (before,)
    return manifest.changed(active=active, writing=None, kept=(*manifest.kept, *replaced))


def returned(manifest: Manifest, version: Version) -> Manifest:
    """Searches use the kept `version` from now on, and what they used is kept."""
    before = manifest.active.get(version.vector)
    kept = (*(each for each in manifest.kept if each is not version), *(() if before is None else (before,)))
    return manifest.changed(active=manifest.active | {version.vector: version}, kept=kept)


def pruned(manifest: Manifest, vector: str, keep: int) -> Manifest:
    """Of the kept versions of `vector` all are retired but for the `keep` that were active last."""
    mine = [version for version in manifest.kept if version.vector == vector]
    gone = mine[: max(len(mine) - keep, 0)]
    kept = tuple(version for version in manifest.kept if version not in gone)
    return manifest.changed(kept=kept, retired=(*manifest.retired, *gone))


def retired(manifest: Manifest, vector: str) -> Manifest:
    """The correction of `vector`, active, kept and half-written, is given up."""
    gone = tuple(version for version in manifest.kept_up() if version.vector == vector)
    active = {name: version for name, version in manifest.active.items() if name != vector}
    kept = tuple(version for version in manifest.kept if version not in gone)
    writing = manifest.writing if manifest.writing not in gone else None
    return manifest.changed(active=active, writing=writing, kept=kept, retired=(*manifest.retired, *gone))


def given_up(manifest: Manifest, vector: str) -> Manifest:
    """What is half-written for `vector` is retired."""
    writing = manifest.writing
    if writing is None or writing.vector != vector:
        return manifest
    return manifest.changed(writing=None, retired=(*manifest.retired, writing))


def cleared(manifest: Manifest) -> Manifest:
    """What was retired has been deleted from the points."""
    return manifest.changed(retired=())


def unused_models(manifest: Manifest) -> tuple[Version, ...]:
    """The retired versions whose models no other version needs."""
    needed = {version.model for version in manifest.kept_up()}
    return tuple(version for version in manifest.retired if version.model not in needed)


def is_undisturbed(manifest: Manifest, version: Version) -> bool:
    """Whether `version` is still what its run took it for: no other run has begun it anew, or taken its place."""
    return version.is_same_writing(manifest.writing) or version.is_same_writing(manifest.active.get(version.vector))


def _identity(version: Version) -> tuple[str, str, str]:
    return version.vector, version.model, version.storage
