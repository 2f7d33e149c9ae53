"""Haystack's QdrantDocumentStore for a corrected collection; needs qdrant-haystack.

A QdrantDocumentStore creates its client and accepts no other, so the subclass wraps the
client after that. Haystack's retrievers work with the subclass, but cannot load it from
a pipeline's YAML. The retrievers in this module can.
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
    """A QdrantDocumentStore that applies the correction of a collection.

    The parameters are the same. Documents are written with their offsets.
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
        """Return the retriever, with its store, from the result of `to_dict`."""
        init_parameters = data["init_parameters"]
        store = HubQdrantDocumentStore.from_dict(init_parameters["document_store"])
        parameters = init_parameters | {"document_store": store}
        return default_from_dict(cls, data | {"init_parameters": parameters})


@component
class HubQdrantEmbeddingRetriever(_OwnStore, QdrantEmbeddingRetriever):
    """A QdrantEmbeddingRetriever that loads our document store from YAML."""


@component
class HubQdrantSparseEmbeddingRetriever(_OwnStore, QdrantSparseEmbeddingRetriever):
    """A QdrantSparseEmbeddingRetriever that loads our document store from YAML."""


@component
class HubQdrantHybridRetriever(_OwnStore, QdrantHybridRetriever):
    """A QdrantHybridRetriever that loads our document store from YAML."""
