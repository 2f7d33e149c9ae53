"""hubplugin for Qdrant: corrects collections in place, and searches them corrected.

`open_store` returns the store that every job of `hubplugin` takes, as in
`hubplugin.apply(store, bank)`. `HubQdrantClient` searches corrected, and gives offsets to
what it writes.

Jobs: `store` keeps the contract of `hubplugin.store`. `schema` makes room for offsets,
`reading` reads points with theirs, `calibration` chooses how widely searches look.
`transport` sends the requests. `places` knows URLs and ranges of ids.

Clients: `client` has both, whose methods are the operations of `searches` and `writes`.
`calls` drives these, and the pure functions in `requests` correct what they send.
`plain_client` has all that is used of qdrant-client's privates. `langchain` and
`haystack` put the client into frameworks.

Both: `manifest` has the values, `metadata` the collection in which they lie and what a
client knows of them, `offsets` what a point holds.
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
    agreement: float | None = None,
    pace: int | Literal["all"] | None = None,
    record: str | os.PathLike[str] | None = None,
) -> QdrantStore:
    """Open a collection for the jobs of `hubplugin`: `hubplugin.apply(store, bank)`.

    storage="vector" is a second vector with one more dimension, which ranks at the
    speed of the index for the price of its space; it needs server 1.18. "payload" is
    one number a point, added to the scores of the candidates that a search fetches,
    which works everywhere. Beside an unnamed vector a second one leaves a trace when it
    is removed: `get_collection` then shows {"": VectorParams(...)} for
    VectorParams(...).

    Args:
        client: Plain or wrapped.
        collection: A name or an alias; the correction belongs to what an alias stands
            for now.
        vector: The name of the vector that is corrected; None is the unnamed one, or
            the only one there is.
        storage: "auto" keeps the storage of the correction in place. Without one it is
            "vector" if the server can add one beside a named vector that is not
            quantised and whose numbers have 16 bits or more, and "payload" elsewhere.
        agreement: The recall that searches must reach, as a share of the raw index's
            own; by default that of the correction in place, or 0.99. Candidates, or
            hnsw_ef, are chosen by it.
        pace: How many points are written before the graph is waited for, by default a
            tenth; "all" is the quickest, and other searches are slow until it ends.
        record: The folder that `HubQdrantClient(record=...)` was given.

    Returns:
        The store of that vector.

    Raises:
        StoreError: For a collection or vector that is not there or cannot carry
            offsets, and for a server that cannot be reached.
    """
    return QdrantStore(
        client,
        collection,
        vector,
        storage,
        agreement=agreement,
        pace=pace,
        record=record,
    )
