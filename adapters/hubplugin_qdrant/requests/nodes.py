"""One node of a request: the request itself, or a prefetch in it."""

from __future__ import annotations

from typing import Any, TypeAlias
from uuid import UUID

import numpy as np
from qdrant_client import grpc, models

from hubplugin.errors import InputError
from hubplugin_qdrant.manifest import Manifest, Version

Node: TypeAlias = models.QueryRequest | models.Prefetch


def prefetches_of(prefetch: list[models.Prefetch] | models.Prefetch | None) -> list[models.Prefetch]:
    """A prefetch of a node, or several or none, as a list."""
    if prefetch is None:
        return []
    return prefetch if isinstance(prefetch, list) else [prefetch]


def nearest(query: object) -> Any:
    """What a nearest query asks for the nearest of."""
    return query.nearest if isinstance(query, models.NearestQuery) else query


def corrected_version(query: object, using: str | None, manifest: Manifest) -> Version | None:
    """The active version for what `query` searches, if it is a plain nearest query on a corrected vector."""
    if query is None:
        return None
    version = manifest.active.get(using or "")
    if version is None or not is_nearest(query):
        return None
    wanted = nearest(query)
    if version.storage == "payload" or (isinstance(wanted, list) and len(wanted) == version.dim):
        return version
    if isinstance(wanted, (models.Document, models.Image, models.InferenceObject)):
        raise InputError(
            f"a {type(wanted).__name__} that the server embeds cannot be augmented for storage='vector': "
            "embed it in the client (cloud_inference=False), or apply storage='payload'"
        )
    return None  # another dimension, or a point that is not there, is the server's to refuse


def is_exact(params: models.SearchParams | None) -> bool:
    """Whether a search asks to be more exact than the index is by itself: without the graph, or without codes."""
    if params is None:
        return False
    return params.exact is True or (params.quantization is not None and params.quantization.ignore is True)


def is_corrected(node: Node, manifest: Manifest) -> bool:
    """Whether a correction changes anything in the tree of `node`."""
    here = (node.using or "") in manifest.active and is_nearest(node.query)
    return here or any(is_corrected(child, manifest) for child in prefetches_of(node.prefetch))


def is_nearest(query: object) -> bool:
    """Whether `query` asks for the nearest of one dense vector, point or document, with no diversity (MMR) in it."""
    if isinstance(query, models.NearestQuery):
        return getattr(query, "mmr", None) is None and is_nearest(query.nearest)
    if isinstance(query, list):
        return not query or not isinstance(query[0], list)
    return isinstance(
        query, (int, str, UUID, np.ndarray, models.Document, models.Image, models.InferenceObject, grpc.PointId)
    )
