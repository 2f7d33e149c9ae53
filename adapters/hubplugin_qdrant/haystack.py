"""Haystack's QdrantDocumentStore over a corrected collection; needs qdrant-haystack.

The store makes its client itself and takes no other, so its subclass wraps what it has
made. Haystack's retrievers take that store, but read none but their own from a
pipeline's YAML: these here read it.
"""

from __future__ import annotations

from typing import Any

from haystack import component, default_from_dict
from haystack_integrations.components.retrievers.qdrant import (
    QdrantEmbeddingRetriever,
    QdrantHybridRetriever,
    QdrantSparseEmbeddingRetriever,
)
from haystack_integrations.document_stores.qdrant import QdrantDocumentStore

from hubplugin_qdrant.client import AsyncHubQdrantClient, HubQdrantClient


class HubQdrantDocumentStore(QdrantDocumentStore):
    """A QdrantDocumentStore that searches a corrected collection corrected.

    It has the same parameters, and gives offsets to the documents that are written to
    it.
    """

    def _initialize_client(self) -> None:
        super()._initialize_client()
        if not isinstance(self._client, HubQdrantClient):
            self._client = HubQdrantClient.wrap(self._client)

    async def _initialize_async_client(self) -> None:
        await super()._initialize_async_client()
        if not isinstance(self._async_client, AsyncHubQdrantClient):
            self._async_client = AsyncHubQdrantClient.wrap(self._async_client)


class _OwnStore:
    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """Return the retriever that its `to_dict` has written, with the store in it."""
        given = data["init_parameters"]
        store = HubQdrantDocumentStore.from_dict(given["document_store"])
        parameters = given | {"document_store": store}
        return default_from_dict(cls, data | {"init_parameters": parameters})


@component
class HubQdrantEmbeddingRetriever(_OwnStore, QdrantEmbeddingRetriever):
    """A QdrantEmbeddingRetriever whose store in a YAML is a HubQdrantDocumentStore."""


@component
class HubQdrantSparseEmbeddingRetriever(_OwnStore, QdrantSparseEmbeddingRetriever):
    """A QdrantSparseEmbeddingRetriever whose store in a YAML is a
    HubQdrantDocumentStore."""


@component
class HubQdrantHybridRetriever(_OwnStore, QdrantHybridRetriever):
    """A QdrantHybridRetriever whose store in a YAML is a HubQdrantDocumentStore."""
