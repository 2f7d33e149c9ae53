"""The operations of a corrected client on whole collections. They hide what hubplugin has added."""

from __future__ import annotations

from qdrant_client import models

from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata, versions
from hubplugin_qdrant.cached_manifest import CorrectionCache
from hubplugin_qdrant.offsets_in_writes import require_free_vectors
from hubplugin_qdrant.operations import Arguments, Operation


def delete_vector_name(cache: CorrectionCache, arguments: Arguments) -> Operation:
    """The correction of a vector goes with it: it is retired, and taken out by the next job or by `remove`.

    The manifest is written as it lies there: what this client knows of it has its own settings in it.
    """
    known = yield from cache.lookup(arguments["collection_name"])
    require_free_vectors([arguments["vector_name"]], known.augmented_vectors)
    result = yield cache.raw.delete_vector_name(**arguments)
    cache.forget()
    known = yield from cache.lookup(arguments["collection_name"])
    vector = arguments["vector_name"]
    if known.manifest is not None and any(version.vector == vector for version in known.manifest.kept_up()):
        place = m.metadata_collection(known.collection)
        for found in (yield cache.raw.retrieve(place, ids=[m.MANIFEST_ID], with_payload=True)):
            manifest = versions.retired(m.parse(found.payload or {}, known.collection), vector)
            yield cache.raw.upsert(place, [metadata.manifest_point(manifest)])
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
    name = arguments["collection_name"]
    known = yield from cache.lookup(name)
    found = yield cache.raw.get_collection(**arguments)
    vectors = found.config.params.vectors
    keys = {key.partition(".")[0] for key in found.payload_schema or ()}
    known = yield from cache.lookup_shown(name, known, keys.union(vectors if isinstance(vectors, dict) else ()))
    if known.manifest is None:
        return found
    if not isinstance(vectors, dict):
        return _without_our_indexes(found, known.offset_key)
    vectors = {name: parameters for name, parameters in vectors.items() if name not in known.augmented_vectors}
    # As it is shown where no augmented vector has ever been beside it.
    shown = vectors[""] if set(vectors) == {""} else vectors
    params = found.config.params.model_copy(update={"vectors": shown})
    config = found.config.model_copy(update={"params": params})
    return _without_our_indexes(found.model_copy(update={"config": config}), known.offset_key)


def _without_our_indexes(found: models.CollectionInfo, key: str | None) -> models.CollectionInfo:
    if key is None:
        return found
    theirs = {name: index for name, index in (found.payload_schema or {}).items() if name.partition(".")[0] != key}
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
    name = m.metadata_collection(collection)
    if (yield cache.raw.collection_exists(name)) and metadata.is_metadata((yield cache.raw.get_collection(name))):
        yield cache.raw.delete_collection(name)
