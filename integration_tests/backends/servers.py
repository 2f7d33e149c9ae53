"""One server: by its URL, as an executable, as a container."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from qdrant_client import QdrantClient

from hubplugin_qdrant import AsyncHubQdrantClient, HubQdrantClient
from integration_tests.backends.base import Backend
from integration_tests.servers import (
    Address,
    Container,
    Executable,
    Process,
    free_ports,
)

TEST_KEY = "for-tests-only"
KEYS = {
    "QDRANT__SERVICE__API_KEY": TEST_KEY,
    "QDRANT__SERVICE__JWT_RBAC": "true",
}


class Server(Backend):
    """A backend that is a server at `address`."""

    can = frozenset({"server"})
    address: Address

    def client(self) -> QdrantClient:
        return self.address.client()

    def wrapped(self, **options) -> HubQdrantClient:
        return HubQdrantClient(**self.address.options(), **options)

    def wrapped_async(self, **options) -> AsyncHubQdrantClient:
        return AsyncHubQdrantClient(**self.address.options(), **options)

    def url(self, collection: str) -> str:
        return self.address.url(collection)

    def api_key(self) -> str | None:
        return self.address.api_key

    def version(self) -> str:
        return str(self.client().info().version)


class LocalServer(Server):
    """Servers that are started here, each by a `process`."""

    process: type[Process] = Executable

    @classmethod
    def missing(cls) -> str | None:
        return cls.process.missing()

    @classmethod
    def unobtainable(cls) -> str | None:
        return cls.process.unobtainable()


class Binary(LocalServer):
    name = "binary"
    own_key: str | None = None
    _keyed: Server | None = None
    can = Server.can | {"managed"}

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        with ExitStack() as self._stack:
            self._folder = folder
            address = Address("127.0.0.1", *free_ports(2), api_key=self.own_key)
            self._process = self._run("server", address, KEYS if self.own_key else {})
            self.address = address
            yield

    def _run(self, name: str, address: Address, settings: dict[str, str]) -> Process:
        """A server that goes when the session does."""
        process = self.process(self._folder / name, address, settings)
        self._stack.callback(process.remove)
        process.start()
        return process

    def stop(self) -> None:
        self._process.stop()

    def kill(self) -> None:
        """Ends it at once, as a lack of memory does."""
        self._process.kill()

    def start(self) -> None:
        """Returns when it answers again."""
        self._process.start()

    def keyed(self) -> Server:
        """An empty server that asks for an api key, and goes when the session does."""
        if self._keyed is None:
            address = Address("127.0.0.1", *free_ports(2), api_key=TEST_KEY)
            self._run("keyed", address, KEYS)
            self._keyed = Server()
            self._keyed.address = address
        return self._keyed


class BinaryGrpc(Binary):
    """A server that asks for an api key, and is spoken to by gRPC."""

    name = "binary-grpc"
    own_key = TEST_KEY

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        with super().started(folder):
            self.address = replace(self.address, prefer_grpc=True)
            yield


class Docker(Binary):
    name = "docker"
    process = Container


class DockerGrpc(BinaryGrpc):
    name = "docker-grpc"
    process = Container
