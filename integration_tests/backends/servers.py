"""One server: by its URL, as an executable, as a container."""

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
from qdrant_client import QdrantClient

from hubplugin_qdrant import AsyncHubQdrantClient, HubQdrantClient
from integration_tests.backends.base import Backend
from integration_tests.servers import Address, Compose, Executable, free_ports, make_certificates
from integration_tests.waiting import wait_until

TEST_KEY = "for-tests-only"
KEYS = {
    "QDRANT__SERVICE__API_KEY": TEST_KEY,
    "QDRANT__SERVICE__JWT_RBAC": "true",
}


class Server(Backend):
    """A backend that is a server at `address`."""

    can = frozenset({"graph", "threads", "processes", "server", "grpc"})
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


class Url(Server):
    name = "url"
    can = Server.can - {"grpc"}

    @classmethod
    def missing(cls) -> str | None:
        return (
            None
            if os.environ.get("HUBPLUGIN_QDRANT_URL")
            else "set HUBPLUGIN_QDRANT_URL, and QDRANT_API_KEY if it asks"
        )

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        url = httpx.URL(os.environ["HUBPLUGIN_QDRANT_URL"])
        if url.scheme not in ("http", "https"):
            raise ValueError("HUBPLUGIN_QDRANT_URL: expected http://HOST:6333 or https://HOST:6333")
        self.address = Address(
            url.host, url.port or 6333, 6334, api_key=os.environ.get("QDRANT_API_KEY"), https=url.scheme == "https"
        )
        wait_until(self.address.ready)
        yield


class Binary(Server):
    name = "binary"
    own_key: str | None = None
    can = Server.can | {"restart", "fresh", "keyed", "tls", "jwt", "storage-snapshot"}

    @classmethod
    def missing(cls) -> str | None:
        return None if shutil.which("qdrant") else "put a qdrant executable on PATH"

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        with ExitStack() as stack:
            address = Address("127.0.0.1", *free_ports(2), api_key=self.own_key)
            self._process = Executable(folder / "server", address, KEYS if self.own_key else {})
            stack.callback(self._process.stop)
            self.address = self._process.address
            self._process.start()
            self._stack, self._folder = stack, folder
            self._others: dict[str, Address] = {}
            yield

    def stop(self) -> None:
        self._process.stop()

    def start(self) -> None:
        """Returns when it answers again."""
        self._process.start()

    def fresh(self) -> Address:
        """The address of an empty server, which goes when the session does."""
        return self._beside("fresh", Address("127.0.0.1", *free_ports(2)), {})

    def keyed(self) -> Address:
        return self._beside("keyed", Address("127.0.0.1", *free_ports(2), api_key=TEST_KEY), KEYS)

    def tls(self) -> Address:
        folder = make_certificates(self._folder / "certificates")
        address = Address("localhost", *free_ports(2), https=True, authority=folder / "cacert.pem")
        settings = {
            "QDRANT__SERVICE__ENABLE_TLS": "true",
            "QDRANT__TLS__CERT": str(folder / "cert.pem"),
            "QDRANT__TLS__KEY": str(folder / "key.pem"),
            "QDRANT__TLS__CA_CERT": str(folder / "cacert.pem"),
        }
        return self._beside("tls", address, settings)

    def restored(self, snapshot: bytes) -> Address:
        """The address of a server that began with a snapshot of a whole storage."""
        name = f"restored-{uuid.uuid4().hex[:8]}"
        file = self._folder / f"{name}.snapshot"
        file.write_bytes(snapshot)
        address = Address("127.0.0.1", *free_ports(2))
        return self._beside(name, address, {}, ("--storage-snapshot", str(file)))

    def _beside(self, name: str, address: Address, settings: dict[str, str], arguments: Sequence[str] = ()) -> Address:
        """The address of one more server, of which there is one of each name; it goes when the session does."""
        if name not in self._others:
            process = Executable(self._folder / name, address, settings, arguments)
            self._stack.callback(process.stop)
            process.start()
            self._others[name] = process.address
        return self._others[name]


class BinaryGrpc(Binary):
    """The same executable, which asks for an api key here and is spoken to by gRPC."""

    name = "binary-grpc"
    own_key = TEST_KEY

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        with super().started(folder):
            self.address = replace(self.address, prefer_grpc=True)
            yield


class ByCompose:
    """What a backend of containers needs to be there."""

    @classmethod
    def missing(cls) -> str | None:
        return Compose.missing()

    @classmethod
    def unobtainable(cls) -> str | None:
        return Compose.unobtainable()


class Docker(ByCompose, Server):
    """The four servers of docker-compose.yml; this one is the open one, spoken to by REST."""

    name = "docker"
    can = Server.can | {"restart", "fresh", "keyed", "tls", "jwt"}
    service = "open"

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        services = ("open", "keyed", "tls", "fresh")
        certificates = make_certificates(folder / "certificates")
        environment = {"HUBPLUGIN_TEST_CERTIFICATES": str(certificates), "HUBPLUGIN_TEST_KEY": TEST_KEY}
        with Compose("docker-compose.yml", services, environment, folder).started() as self._compose:
            self._addresses = {
                service: Address(
                    "localhost" if service == "tls" else "127.0.0.1",
                    *self._compose.ports[service],
                    api_key=TEST_KEY if service == "keyed" else None,
                    https=service == "tls",
                    authority=certificates / "cacert.pem" if service == "tls" else None,
                )
                for service in services
            }
            self.address = self._chosen(self._addresses)
            for address in self._addresses.values():
                wait_until(address.ready)
            yield

    def _chosen(self, addresses: dict[str, Address]) -> Address:
        return addresses["open"]

    def stop(self) -> None:
        self._compose.run(f"stop {self.service}")

    def start(self) -> None:
        """Returns when it answers again."""
        self._compose.run(f"start {self.service}")
        wait_until(self.address.ready)

    def fresh(self) -> Address:
        """The address of an empty server."""
        return self._addresses["fresh"]

    def keyed(self) -> Address:
        return self._addresses["keyed"]

    def tls(self) -> Address:
        return self._addresses["tls"]


class DockerGrpc(Docker):
    """The same servers; this one asks for an api key, and is spoken to by gRPC."""

    name = "docker-grpc"
    service = "keyed"

    def _chosen(self, addresses: dict[str, Address]) -> Address:
        return replace(addresses["keyed"], prefer_grpc=True)
