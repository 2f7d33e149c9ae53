"""The operations of a corrected client on whole collections. They hide what hubplugin has added."""

from __future__ import annotations

from qdrant_client import models

from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata, versions
from hubplugin_qdrant.cached_manifest import CorrectionCache
from hubplugin_qdrant.operations import Arguments, Operation


def delete_vector_name(cache: CorrectionCache, arguments: Arguments) -> Operation:
    """The correction of a vector goes with it: it is retired, and taken out by the next job or by `remove`."""
    result = yield cache.raw.delete_vector_name(**arguments)
    cache.forget()
    known = yield from cache.lookup(arguments["collection_name"])
    vector = arguments["vector_name"]
    if known.manifest is not None and any(version.vector == vector for version in known.manifest.kept_up()):
        point = metadata.manifest_point(versions.retired(known.manifest, vector))
        yield cache.raw.upsert(m.metadata_collection(known.collection), [point])
        cache.forget()
    return result


def get_collections(cache: CorrectionCache, arguments: Arguments) -> Operation:
    """All but the metadata collections."""
    found = yield cache.raw.get_collections(**arguments)
    metadata_collections = {m.metadata_collection(each.name) for each in found.collections}
    return found.model_copy(
        update={"collections": [each for each in found.collections if each.name not in metadata_collections]}
    )


def get_collection(cache: CorrectionCache, arguments: Arguments) -> Operation:
    """The collection without our vectors and our payload indexes."""
    known = yield from cache.lookup(arguments["collection_name"])
    found = yield cache.raw.get_collection(**arguments)
    vectors = found.config.params.vectors
    if not isinstance(vectors, dict):
        return found if known.manifest is None else _without_our_indexes(found)
    vectors = {name: parameters for name, parameters in vectors.items() if name not in known.augmented_vectors}
    # As it is shown where no augmented vector has ever been beside it.
    shown = vectors[""] if set(vectors) == {""} else vectors
    params = found.config.params.model_copy(update={"vectors": shown})
    config = found.config.model_copy(update={"params": params})
    return _without_our_indexes(found.model_copy(update={"config": config}))


def _without_our_indexes(found: models.CollectionInfo) -> models.CollectionInfo:
    theirs = {key: index for key, index in (found.payload_schema or {}).items() if key.partition(".")[0] != m.KEY}
    return found.model_copy(update={"payload_schema": theirs})


def delete_collection(cache: CorrectionCache, arguments: Arguments) -> Operation:
    result = yield cache.raw.delete_collection(**arguments)
    yield from _forget_correction(cache, arguments["collection_name"])
    return result


def create_collection(cache: CorrectionCache, arguments: Arguments) -> Operation:
    cache.forget()
    return (yield cache.raw.create_collection(**arguments))


def recreate_collection(cache: CorrectionCache, arguments: Arguments) -> Operation:
    result = yield cache.raw.recreate_collection(**arguments)
    yield from _forget_correction(cache, arguments["collection_name"])
    return result


def update_collection_aliases(cache: CorrectionCache, arguments: Arguments) -> Operation:
    cache.forget()
    return (yield cache.raw.update_collection_aliases(**arguments))


def _forget_correction(cache: CorrectionCache, collection: str) -> Operation:
    """What belonged to a collection goes with it; another of its name starts anew."""
    cache.forget()
    if (yield cache.raw.collection_exists(m.metadata_collection(collection))):
        yield cache.raw.delete_collection(m.metadata_collection(collection))
