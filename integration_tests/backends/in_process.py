"""The local mode of qdrant-client in a folder: what a killed process leaves there is tested without a server."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qdrant_client import QdrantClient

from hubplugin_qdrant import HubQdrantClient
from integration_tests.backends.base import Backend
from integration_tests.galleries import Gallery


class Disk(Backend):
    name = "local-path"
    can = frozenset[str]()
    _client: QdrantClient | None = None

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        self._folder = folder
        yield
        self.close()

    def gallery(self, **options) -> Gallery:
        # Each point is a transaction of SQLite, one by one.
        return super().gallery(**({"rows": 60} | options))

    def client(self) -> QdrantClient:
        if self._client is None:
            self._client = QdrantClient(path=str(self._folder))
        return self._client

    def close(self) -> None:
        """Lets another process have the folder, until `client` is called again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def wrapped(self, **options) -> HubQdrantClient:
        return HubQdrantClient.wrap(self.client(), **options)

    def url(self, collection: str) -> str:
        return f"qdrant-local:{self._folder}/{collection}"
