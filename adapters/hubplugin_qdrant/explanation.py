"""A corrected request as somebody without `HubQdrantClient` sends it."""

from __future__ import annotations

import json
import os

from qdrant_client import QdrantClient, models

from hubplugin.store import Explanation
from hubplugin_qdrant import plain_client, searches
from hubplugin_qdrant.calls import run
from hubplugin_qdrant.metadata import CorrectionCache


def explain(
    client: QdrantClient, collection: str, request: models.QueryRequest
) -> Explanation:
    """Return `request` to a corrected `collection` as another client sends it.

    What its numbers mean, and what Euclidean distance and a query map change, says
    docs/other-clients.md.
    """
    cache = CorrectionCache(client)
    cached = run(cache.lookup(collection))
    ((corrected, _),) = run(searches.rewrite_requests(cache, cached, [request]))
    fields = corrected.model_dump_json(
        exclude_none=True, exclude_defaults=True, by_alias=True
    )
    path = f"/collections/{collection}/points/query"
    quoted = fields.replace("'", "'\\''")
    lines = [
        f"curl -X POST {plain_client.address(client)}{path}",
        "  -H 'Content-Type: application/json'",
        f"  -d '{quoted}'",
    ]
    if "QDRANT_API_KEY" in os.environ:
        lines.insert(2, '  -H "api-key: $QDRANT_API_KEY"')
    return Explanation(
        " \\\n".join(lines),
        {"method": "POST", "path": path, "body": json.loads(fields)},
    )
