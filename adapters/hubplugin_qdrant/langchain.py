"""LangChain's QdrantVectorStore over a corrected collection; needs langchain-qdrant.

Its `from_texts`, `from_documents` and `from_existing_collection` connect by themselves,
so this subclass wraps the client that they hand to the constructor.
"""

from __future__ import annotations

from typing import Any

from langchain_qdrant import QdrantVectorStore
from qdrant_client import QdrantClient

from hubplugin_qdrant.client import HubQdrantClient


class HubQdrantVectorStore(QdrantVectorStore):
    """A QdrantVectorStore that searches a corrected collection corrected.

    It has the same parameters, and gives offsets to the documents that are added to it,
    however it is made.
    """

    def __init__(self, client: QdrantClient, *args: Any, **kwargs: Any):
        if not isinstance(client, HubQdrantClient):
            client = HubQdrantClient.wrap(client)
        super().__init__(client, *args, **kwargs)
