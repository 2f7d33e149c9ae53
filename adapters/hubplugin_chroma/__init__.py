"""hubplugin for Chroma: keeps offsets in a collection beside the corrected one.

`HubCollection` is a `Collection` that reranks candidates with the offsets.
"""

from __future__ import annotations

import chromadb
from chromadb.api import ClientAPI

from hubplugin_chroma.client import HubCollection
from hubplugin_chroma.store import ChromaStore

__all__ = ["HubCollection", "open_store"]


def open_store(client: ClientAPI, collection: chromadb.Collection) -> ChromaStore:
    """Open a collection as a store for the jobs of `hubplugin`.

    Use it in a program that has a client. Otherwise, pass a URL to
    `hubplugin.open_store`.

    Args:
        client: The client of `collection`.
        collection: The collection to correct. Nothing is written to it.

    Raises:
        StoreError: The collection cannot carry offsets.
    """
    return ChromaStore(client, collection)
