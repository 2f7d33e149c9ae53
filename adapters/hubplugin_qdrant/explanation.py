"""Pure: a corrected request as somebody without `HubQdrantClient` sends it, and which of its constants mean what."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from qdrant_client import models

from hubplugin.metric import Metric
from hubplugin.store import Explanation
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.manifest import QdrantVersion
from hubplugin_qdrant.metadata import MANIFEST_ID, part_ids


def explain(
    version: QdrantVersion,
    request: models.QueryRequest,
    collection: str,
    address: str,
    api_key: bool,
) -> Explanation:
    """How to send a corrected request without hubplugin.

    Args:
        version: the version that corrects it.
        request: the corrected request.
        collection: the collection that it searches.
        address: of the server.
        api_key: the server asks for a key.
    """
    path = f"/collections/{collection}/points/query"
    # A vector in it is as short as float32 allows.
    body = _shorten(
        json.loads(
            request.model_dump_json(
                exclude_none=True, exclude_defaults=True, by_alias=True
            )
        )
    )
    key = '  -H "api-key: $QDRANT_API_KEY" \\\n' if api_key else ""
    # A line for each field, and one for each vector.
    data = re.sub(
        r"\[[-+\d.eE,\s]+\]",
        lambda match: " ".join(match[0].split()),
        json.dumps(body, indent=2),
    )
    data = data.replace("'", "'\\''")
    command = f"curl -X POST {address}{path} \\\n  -H 'Content-Type: application/json' \\\n{key}  -d '{data}'\n\n"
    text = command + "\n".join(f"- {line}" for line in _constants(version, collection))
    return Explanation(text, {"method": "POST", "path": path, "body": body})


def _constants(version: QdrantVersion, collection: str) -> Iterator[str]:
    """What the constants of a request mean, a line each."""
    place = f"/collections/{m.metadata_collection(collection)}/points"
    is_distance, is_cosine = (
        version.metric is Metric.EUCLIDEAN,
        version.metric is Metric.COSINE,
    )
    if version.storage == "payload":
        yield (
            f"the prefetch finds candidates by the raw score, {version.oversampling:.3g} for each result and never "
            f"fewer than {version.candidates(1)}; the formula adds the number under {version.key!r}, "
            "0 where a point has none"
        )
    else:
        vector = "the vector divided by its length" if is_cosine else "the vector"
        width = (
            f"hnsw_ef {version.hnsw_ef}"
            if version.hnsw_ef
            else "the server's own hnsw_ef"
        )
        yield (
            f"the query in {version.augmented_vector!r} has {version.dim + 1} components: {vector}, then "
            f"{0 if is_distance else 1}; searched with {width}, and without codes"
        )
        if version.everywhere and not is_distance:
            yield (
                f"every point has {version.augmented_vector!r} now; one that another client writes without it is not "
                "found by this request until `hubplugin refresh`"
            )
    if is_distance:
        yield "a score s is a similarity: the corrected distance is sqrt(-2 s), or -sqrt(2 s) where s is above 0"
    if version.mapped and version.storage == "vector":
        yield f"the query map lies in {version.augmented_vector!r}: send the query as it is, not mapped"
    elif version.mapped:
        of = "for the query q divided by its length" if is_cosine else "for the query q"
        weight = (
            "; the server divides by the length of that, so the formula multiplies $score by it"
            if is_cosine
            else ""
        )
        parts = ", ".join(part_ids(version))
        yield f"the query in the prefetch is mapped: q + S q, {of}{weight}"
        yield "a search by a point's id is not mapped, and its $score stands alone"
        yield (
            f"S is the tensor query_map.step of the model, a safetensors file: POST {place} with these ids has it in "
            f"payload.part of each, in base64, to be decoded and joined in this order: {parts}"
        )
    yield (
        f"these constants are those of version {version.number}; another fit has others. "
        f"GET {place}/{MANIFEST_ID} has the current ones in payload.active[{json.dumps(version.vector)}]: "
        "number, storage, dim, metric, oversampling, hnsw_ef, ceiling, mapped, model, parts"
    )


def _shorten(value: Any) -> Any:
    """`value` with each number that a float32 holds as short as that can be written."""
    if isinstance(value, dict):
        return {name: _shorten(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shorten(item) for item in value]
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value
