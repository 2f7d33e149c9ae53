"""hubplugin for Qdrant: corrects collections in place, and searches them corrected.

Correcting: `jobs` apply, refresh, inspect and remove a correction through `store` and `writing`, the contract of
`hubplugin.store`. They use `transport` (requests), `points` (points as batches), `schema` (index or augmented vector),
`calibration`, and `metadata` and `collection_metadata` (manifest and models in `<collection>--hub`). `edge` is the same
for a Qdrant Edge shard. `versioned_store` and `versions` (the states of a correction, pure) are common to both.

Searching: `client` drives the operations of `searches`, `write_operations` and `collection_operations`, which
send what the pure functions in `requests` make, and know of corrections from `cached_manifest`. `plain_client` has all
that is used of qdrant-client's privates. `langchain` and `haystack` put the client into frameworks.

Both: `manifest` (values), `stored_offsets` (what a point holds, pure) and `errors`.
"""

from hubplugin_qdrant.client import AsyncHubQdrantClient, HubQdrantClient
from hubplugin_qdrant.jobs import apply, inspect, refresh, remove, switch
from hubplugin_qdrant.store import QdrantStore

__all__ = [
    "AsyncHubQdrantClient",
    "HubQdrantClient",
    "QdrantStore",
    "apply",
    "inspect",
    "refresh",
    "remove",
    "switch",
]
