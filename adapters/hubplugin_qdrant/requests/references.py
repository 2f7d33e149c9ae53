"""References: points whose stored vectors are the query, which must be read before a request can be rewritten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from qdrant_client import models

from hubplugin_qdrant.manifest import Manifest
from hubplugin_qdrant.requests.nodes import Node, nearest, prefetches_of


@dataclass(frozen=True)
class Reference:
    """A point whose vector is the query: its id, and where it lies if not in the collection searched."""

    point: int | str
    collection: str | None
    vector: str


def references(node: Node, manifest: Manifest) -> list[Reference]:
    """The points in the tree of `node` whose vectors must be known before it can be rewritten."""
    found = [reference for child in prefetches_of(node.prefetch) for reference in references(child, manifest)]
    reference = _reference(node, manifest)
    return [*found, reference] if reference is not None else found


def resolved(node: Any, manifest: Manifest, vectors: dict[Reference, list[float]]) -> Any:
    """`node` with the vectors of its `references` in the place of the ids; the points themselves are left out."""
    update: dict[str, Any] = {}
    if node.prefetch is not None:
        update["prefetch"] = [resolved(child, manifest, vectors) for child in prefetches_of(node.prefetch)]
    reference = _reference(node, manifest)
    if reference is not None and reference in vectors:
        update |= {"query": vectors[reference], "lookup_from": None}
        if reference.collection is None:
            itself = models.Filter(must_not=[models.HasIdCondition(has_id=[reference.point])])
            update["filter"] = itself if node.filter is None else models.Filter(must=[node.filter, itself])
    return node.model_copy(update=update)


def _reference(node: Node, manifest: Manifest) -> Reference | None:
    version = manifest.active.get(node.using or "")
    query = nearest(node.query)
    if version is None or version.storage != "vector" or not isinstance(query, (int, str, UUID)):
        return None
    place = node.lookup_from
    if place is None:
        return Reference(query if isinstance(query, int) else str(query), None, version.vector)
    return Reference(query if isinstance(query, int) else str(query), place.collection, place.vector or version.vector)
