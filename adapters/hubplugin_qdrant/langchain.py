"""LangChain's QdrantVectorStore for a corrected collection; needs langchain-qdrant.

The class methods `from_texts`, `from_documents` and `from_existing_collection` create a
client and pass it to the constructor, so the subclass wraps the client there.
"""

from __future__ import annotations

from typing import Any

from langchain_qdrant import QdrantVectorStore
from qdrant_client import QdrantClient

from hubplugin_qdrant.client import HubQdrantClient


class HubQdrantVectorStore(QdrantVectorStore):
    """A QdrantVectorStore that applies the correction of a collection.

    The parameters are the same. Documents are added with their offsets, also if the
    store was made by a class method.
    """

    def __init__(self, client: QdrantClient, *args: Any, **kwargs: Any):
        if not isinstance(client, HubQdrantClient):
            client = HubQdrantClient.wrap(client)
        super().__init__(client, *args, **kwargs)
