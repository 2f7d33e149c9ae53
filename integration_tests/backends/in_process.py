"""Backends without a server: the local mode of qdrant-client in memory and on disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qdrant_client import AsyncQdrantClient, QdrantClient

from hubplugin_qdrant import AsyncHubQdrantClient, HubQdrantClient
from integration_tests.backends.base import Backend
from integration_tests.galleries import Gallery


class Local(Backend):
    def wrapped(self, **options) -> HubQdrantClient:
        return HubQdrantClient.wrap(self.client(), **options)

    def wrapped_async(self, **options) -> AsyncHubQdrantClient:
        """On the collections of the sync client: both keep them in the same kind of object."""
        plain = AsyncQdrantClient(":memory:")
        plain._client.collections = self.client()._client.collections
        return AsyncHubQdrantClient.wrap(plain, **options)


class Memory(Local):
    name = "local"
    can = frozenset[str]()

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        self._client = QdrantClient(":memory:")
        yield
        self._client.close()

    def client(self) -> QdrantClient:
        return self._client

    def url(self, collection: str) -> str:
        raise NotImplementedError("memory has no URL")


class Disk(Local):
    name = "local-path"
    can = frozenset({"processes"})

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        self._folder, self._client = folder, None
        yield
        self.close()

    def gallery(self, **options) -> Gallery:
        return super().gallery(
            **({"rows": 60} | options)
        )  # each point is a transaction of SQLite, one by one

    def client(self) -> QdrantClient:
        if self._client is None:
            self._client = QdrantClient(path=str(self._folder))
        return self._client

    def close(self) -> None:
        """Lets another process have the folder, until `client` is called again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def url(self, collection: str) -> str:
        return f"qdrant-local:{self._folder}/{collection}"
