"""Pure: a corrected request as somebody without `HubQdrantClient` sends it, and which of its constants mean what."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from qdrant_client import models

from hubplugin.abilities import Explanation
from hubplugin.metric import Metric
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.manifest import Version
from hubplugin_qdrant.metadata import MANIFEST_ID, SWITCH_ID


def body_of(request: models.QueryRequest) -> dict[str, Any]:
    """`request` as the JSON that the server takes; a vector in it as short as float32 allows."""
    body = json.loads(request.model_dump_json(exclude_none=True, exclude_defaults=True, by_alias=True))
    short: dict[str, Any] = _shortened(body)
    return short


def explanation(
    version: Version, request: models.QueryRequest, collection: str, address: str, api_key: bool
) -> Explanation:
    """How to send `request`, the corrected one for `collection`, to the server at `address`."""
    path = f"/collections/{collection}/points/query"
    body = body_of(request)
    key = '  -H "api-key: $QDRANT_API_KEY" \\\n' if api_key else ""
    text = (
        f"curl -X POST {address}{path} \\\n  -H 'Content-Type: application/json' \\\n{key}  -d '{_as_text(body)}'\n\n"
        + "\n".join(f"- {line}" for line in _constants(version, collection))
    )
    return Explanation(text, {"method": "POST", "path": path, "body": body})


def shard_explanation(version: Version, request: models.QueryRequest) -> Explanation:
    """What `request` is as JSON, for an engine that runs in somebody's own process."""
    body = body_of(request)
    constants = "\n".join(f"- {line}" for line in _ranking(version))
    return Explanation(f"{_as_text(body)}\n\n{constants}", {"body": body})


def _constants(version: Version, collection: str) -> list[str]:
    place = f"/collections/{m.metadata_collection(collection)}/points"
    current = f"payload.active[{json.dumps(version.vector)}]"
    return [
        *_ranking(version),
        f"these constants are those of version {version.number}; another fit has others. "
        f"GET {place}/{MANIFEST_ID} has the current ones in {current}: "
        "number, storage, offset_key, dim, metric, oversampling, hnsw_ef, ceiling",
        f"GET {place}/{SWITCH_ID} has payload.off, true while the correction is switched off; 404 if it never was",
    ]


def _ranking(version: Version) -> list[str]:
    """What the constants of a request mean, a line each."""
    lines = []
    if version.storage == "payload":
        lines.append(
            f"the prefetch finds candidates by the raw score, {version.oversampling:.3g} for each result and never "
            f"fewer than {version.candidates(1)}; the formula adds the number under {version.key!r}, "
            f"{version.missing:g} where a point has none"
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
