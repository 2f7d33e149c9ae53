"""What scenarios ask of a place where they run."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from qdrant_client import QdrantClient

from hubplugin_qdrant import HubQdrantClient
from integration_tests.galleries import Gallery

ABILITIES = {
    "server": "builds graphs, and may be used by many threads",
    "managed": "is started from here, and so are servers beside it",
    "cluster": "has three nodes",
}
"""What scenarios may need of a backend."""


class Backend(ABC):
    """One place where scenarios run. `can` names what it has of ABILITIES."""

    name: str
    can: frozenset[str]

    @classmethod
    def missing(cls) -> str | None:
        """Why it is not there, and what to start; None if it is there."""
        return None

    @classmethod
    def unobtainable(cls) -> str | None:
        """Why what it needs from elsewhere cannot be had, once that was tried; None if it is here now."""
        return None

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        """Runs it, with `folder` to keep files in, until the session ends."""
        yield

    def api_key(self) -> str | None:
        """The key that its server asks for; None where it asks for none, or is no server."""
        return None

    def version(self) -> str | None:
        """Of its server; None where there is none."""
        return None

    def require(self, oldest: tuple[int, int], what: str) -> None:
        """Skips a test of `what`, which servers have from version `oldest` on, where this server is older."""
        version = self.version()
        if version is not None and tuple(map(int, version.split(".")[:2])) < oldest:
            wanted = ".".join(map(str, oldest))
            pytest.skip(
                f"{what}: this server is {version}; start one of {wanted} or newer (docs/integration.md)"
            )

    def gallery(self, **options) -> Gallery:
        """A fresh gallery under a name of its own; see `galleries`."""
        name = f"hubplugin-test-{uuid.uuid4().hex[:12]}"
        return Gallery(self, name, **options)

    @abstractmethod
    def client(self) -> QdrantClient: ...

    @abstractmethod
    def wrapped(self, **options) -> HubQdrantClient:
        """As an application makes one."""

    @abstractmethod
    def url(self, collection: str) -> str: ...
