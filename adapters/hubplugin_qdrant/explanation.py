"""Pure: a corrected request as somebody without `HubQdrantClient` sends it, and which of its constants mean what."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from qdrant_client import models

from hubplugin.metric import Metric
from hubplugin.store import Explanation
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.manifest import Version
from hubplugin_qdrant.metadata import MANIFEST_ID, part_id


def explanation(
    version: Version, request: models.QueryRequest, collection: str, address: str, api_key: bool
) -> Explanation:
    """How to send `request`, the corrected one for `collection`, to the server at `address`."""
    path = f"/collections/{collection}/points/query"
    # A vector in it is as short as float32 allows.
    body = _shortened(json.loads(request.model_dump_json(exclude_none=True, exclude_defaults=True, by_alias=True)))
    key = '  -H "api-key: $QDRANT_API_KEY" \\\n' if api_key else ""
    text = (
        f"curl -X POST {address}{path} \\\n  -H 'Content-Type: application/json' \\\n{key}  -d '{_as_text(body)}'\n\n"
        + "\n".join(f"- {line}" for line in _constants(version, collection))
    )
    return Explanation(text, {"method": "POST", "path": path, "body": body})


def _constants(version: Version, collection: str) -> list[str]:
    place = f"/collections/{m.metadata_collection(collection)}/points"
    current = f"payload.active[{json.dumps(version.vector)}]"
    return [
        *_ranking(version),
        *_mapping(version, place),
        f"these constants are those of version {version.number}; another fit has others. "
        f"GET {place}/{MANIFEST_ID} has the current ones in {current}: "
        "number, storage, offset_key, dim, metric, oversampling, hnsw_ef, ceiling, mapped, model, parts",
    ]


def _mapping(version: Version, place: str) -> list[str]:
    """How the query became what is sent, where a query map lies not in the store; its model lies at `place`."""
    if not version.mapped:
        return []
    if version.storage == "vector":
        return [f"the query map lies in {version.augmented_vector!r}: send the query as it is, not mapped"]
    unit = version.metric is Metric.COSINE
    of = "for the query q divided by its length" if unit else "for the query q"
    weighed = "; the server divides by the length of that, so the formula multiplies $score by it" if unit else ""
    parts = ", ".join(part_id(version.number, number) for number in range(version.parts))
    return [
        f"the query in the prefetch is mapped: q + S q, {of}{weighed}",
        "a search by a point's id is not mapped, and its $score stands alone",
        f"S is the tensor query_map.step of the model, a safetensors file: POST {place} with these ids has it in "
        f"payload.part of each, in base64, to be decoded and joined in this order: {parts}",
    ]


def _ranking(version: Version) -> list[str]:
    """What the constants of a request mean, a line each."""
    lines = []
    if version.storage == "payload":
        lines.append(
            f"the prefetch finds candidates by the raw score, {version.oversampling:.3g} for each result and never "
            f"fewer than {version.candidates(1)}; the formula adds the number under {version.key!r}, "
            "0 where a point has none"
        )
    else:
        vector = "the vector divided by its length" if version.metric is Metric.COSINE else "the vector"
        last = 0 if version.metric is Metric.EUCLIDEAN else 1
        width = f"hnsw_ef {version.hnsw_ef}" if version.hnsw_ef else "the server's own hnsw_ef"
        lines.append(
            f"the query in {version.augmented_vector!r} has {version.dim + 1} components: {vector}, then {last}; "
            f"searched with {width}, and without codes"
        )
        if version.everywhere and version.metric is not Metric.EUCLIDEAN:
            lines.append(
                f"every point has {version.augmented_vector!r} now; one that another client writes without it is not "
                "found by this request until `hubplugin refresh`"
            )
    if version.metric is Metric.EUCLIDEAN:
        lines.append(
            "a score s is a similarity: the corrected distance is sqrt(-2 s), or -sqrt(2 s) where s is above 0"
        )
    return lines


def _shortened(value: Any) -> Any:
    """`value` with each number that a float32 holds as short as that can be written."""
    if isinstance(value, dict):
        return {name: _shortened(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def _as_text(body: dict[str, Any]) -> str:
    """`body` as JSON with a line for each field, and one for each vector."""
    text = json.dumps(body, indent=2)
    return re.sub(r"\[[-+\d.eE,\s]+\]", lambda found: " ".join(found[0].split()), text).replace("'", "'\\''")
