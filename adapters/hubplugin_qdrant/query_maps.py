"""Pure: what a query becomes by the query map of a version, where clients map it."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
from pydantic import BaseModel
from qdrant_client import models

from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.model import QueryMap
from hubplugin_qdrant.manifest import Manifest, Version
from hubplugin_qdrant.plain_client import changed

EMBEDDED = (models.Document, models.Image, models.InferenceObject)
"""What somebody embeds: the client, before a request is rewritten, or else the server."""

WITH_EXAMPLES = tuple(
    getattr(models, name)
    for name in ("NearestQuery", "RecommendQuery", "DiscoverQuery", "ContextQuery", "RelevanceFeedbackQuery")
    if hasattr(models, name)  # qdrant-client 1.18 lacks the last
)
"""Queries that hold vectors, which a query map maps."""


def mapped(query: list[float], version: Version) -> tuple[list[float], float]:
    """What is searched with for the vector `query`, and by what its scores are multiplied: by its length under cosine,
    since the server divides by that. Without a query map the query, and 1."""
    if not version.mapped:
        return query, 1.0
    if version.metric is not Metric.COSINE or len(query) != version.dim:
        return _mapped(query, version.map), 1.0
    given = _packed(query)
    square = float(given @ given)
    if not abs(square - 1.0) < UNIT:
        # Of a very short or very long one float32 loses the square.
        given = given / math.sqrt(square) if SMALL < square < 1 / SMALL else _packed(unit(query))
    asked = version.map(given)
    return asked.tolist(), math.sqrt(float(asked @ asked))


SMALL = 1e-20


def _packed(vector: list[float]) -> np.ndarray:
    """`vector` in float32, in a third of the time that numpy takes of a list."""
    return np.frombuffer(struct.pack(f"{len(vector)}f", *vector), np.float32)


def _mapped(vector: list[float], query_map: QueryMap) -> list[float]:
    if len(vector) != len(query_map.step):
        return vector  # the server's to refuse
    asked: list[float] = query_map(np.array(vector, np.float32)).tolist()
    return asked


def with_mapped_examples(query: Any, using: str | None, manifest: Manifest) -> Any:
    """A `query` that is not corrected, with the vectors in it mapped where the vector that it searches has a map that
    clients apply."""
    version = manifest.active.get(using or "")
    if version is None or not version.mapped or version.storage == "vector" or not isinstance(query, WITH_EXAMPLES):
        return query
    return _mapped_within(query, version.map)


def _mapped_within(part: Any, query_map: QueryMap) -> Any:
    """`part` of a query with the vectors in it mapped. Each keeps its length, by which an average weighs it."""
    if isinstance(part, list):
        if part and isinstance(part[0], float):
            return _mapped(part, query_map)
        return [_mapped_within(each, query_map) for each in part]
    if isinstance(part, EMBEDDED):
        raise unmappable(part)
    if not isinstance(part, BaseModel) or isinstance(part, models.SparseVector):
        return part
    return changed(part, {name: _mapped_within(value, query_map) for name, value in part.__dict__.items()})


def unmappable(document: object) -> InputError:
    return InputError(
        f"a {type(document).__name__} that the server embeds cannot go through the query map of the correction: "
        "embed it in the client (cloud_inference=False), or apply without learn"
    )


UNIT = 1e-6
"""By how much the length of a vector may differ from 1 for it to go as it is: what its numbers are rounded by."""


def unit(vector: list[float]) -> list[float]:
    length = math.hypot(*vector) or 1.0
    if abs(length - 1.0) < UNIT:
        return vector
    return [value / length for value in vector]
