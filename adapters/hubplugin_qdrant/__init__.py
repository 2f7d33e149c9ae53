"""hubplugin for Qdrant: correct collections in place and search them corrected.

`open_store` returns the store for every job of `hubplugin`, as in
`hubplugin.apply(store, bank)`. `HubQdrantClient` searches with the correction, and
adds offsets to the points that it writes.

Modules for jobs: `store` implements `hubplugin.store`. `schema` makes room for offsets,
`reading` reads points with their offsets, and `calibration` chooses how widely searches
look. `transport` sends the requests. `places` parses URLs and divides ids into ranges.

Modules for clients: `client` defines both clients. Their methods run the operations of
`searches` and `writes`, which `calls` drives. `requests` corrects the requests without
any I/O. `plain_client` contains every use of qdrant-client's private names. `langchain`
and `haystack` integrate the client into frameworks.

Modules for both: `manifest` defines the versions, `metadata` reads and caches them, and
`offsets` computes what a point stores.
"""

from __future__ import annotations

import os
from typing import Literal

from qdrant_client import QdrantClient

from hubplugin_qdrant.client import AsyncHubQdrantClient, HubQdrantClient
from hubplugin_qdrant.schema import Storage
from hubplugin_qdrant.store import QdrantStore

__all__ = ["AsyncHubQdrantClient", "HubQdrantClient", "open_store"]


def open_store(
    client: QdrantClient,
    collection: str,
    vector: str | None = None,
    *,
    storage: Storage | Literal["auto"] = "auto",
    pace: int | Literal["all"] | None = None,
    record: str | os.PathLike[str] | None = None,
) -> QdrantStore:
    """Open a collection for the jobs of `hubplugin`: `hubplugin.apply(store, bank)`.

    storage="vector" adds a second vector with one more dimension. Searches are as fast
    as raw ones, but the vector takes space, and the server must be 1.18 or newer.
    storage="payload" stores one number per point, and adds it to the scores of the
    candidates that a search fetches. It works everywhere. Removing a second vector
    beside an unnamed one leaves a trace: `get_collection` then shows
    {"": VectorParams(...)} instead of VectorParams(...).

    Args:
        client: A plain or corrected client.
        collection: A name or an alias. With an alias, the correction belongs to the
            collection that is behind the alias now.
        vector: The name of the vector to correct. None for the unnamed vector, or for
            the only vector.
        storage: "auto" keeps the storage of an existing correction. Otherwise it
            chooses "vector" if the server can add a second vector, and the corrected
            vector is named, not quantised, and has numbers of 16 bits or more. In all
            other cases it chooses "payload".
        pace: The number of points to write before each wait for the graph, by default a
            tenth of all points. "all" is the fastest, but slows other searches until
            the job ends.
        record: The folder passed to `HubQdrantClient(record=...)`.

    Returns:
        The store of the vector.

    Raises:
        StoreError: If the collection or vector does not exist or cannot have offsets,
            or if the server cannot be reached.
    """
    return QdrantStore(client, collection, vector, storage, pace=pace, record=record)
