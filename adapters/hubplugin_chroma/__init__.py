"""hubplugin for Chroma: offsets in a collection beside the one that they correct.

`HubCollection` is a `Collection` that ranks its candidates by them.
"""

from __future__ import annotations

import chromadb
from chromadb.api import ClientAPI

from hubplugin_chroma.client import HubCollection
from hubplugin_chroma.store import ChromaStore

__all__ = ["HubCollection", "open_store"]


def open_store(client: ClientAPI, collection: chromadb.Collection) -> ChromaStore:
    """Open a collection as a store for the jobs of `hubplugin`.

    It is for a program that has a client. Elsewhere `hubplugin.open_store` takes a URL.

    Args:
        client: The client of `collection`.
        collection: The collection that is corrected; nothing is written to it.

    Raises:
        StoreError: The collection cannot carry offsets.
    """
    return ChromaStore(client, collection)
