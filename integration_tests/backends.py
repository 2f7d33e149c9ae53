"""The places where the scenarios run: each says whether it is there, starts, offers clients, and cleans up."""

from __future__ import annotations

import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from qdrant_client import AsyncQdrantClient, QdrantClient

from hubplugin_qdrant import AsyncHubQdrantClient, HubQdrantClient
from integration_tests.galleries import Collection, Gallery, Shard
from integration_tests.servers import Address, Compose, Executable, free_ports, make_certificates
from integration_tests.waiting import wait_until

HERE = Path(__file__).parent
TEST_KEY, READ_ONLY_KEY = "for-tests-only", "for-reading-tests-only"
KEYS = {
    "QDRANT__SERVICE__API_KEY": TEST_KEY,
    "QDRANT__SERVICE__READ_ONLY_API_KEY": READ_ONLY_KEY,
    "QDRANT__SERVICE__JWT_RBAC": "true",
}


ABILITIES = {
    "client": "a shard has no client: tests/qdrant_edge has what else it does",
    "graph": "it builds no graph",
    "threads": "it may be used by one thread only",
    "processes": "no other process can open it by a URL",
    "disk": "nothing can be closed and opened again",
    "server": "it is no server",
    "grpc": "its port for gRPC is not known",
    "restart": "it cannot be restarted from here",
    "fresh": "there is no second, empty server beside it",
    "keyed": "there is no server with an api key beside it",
    "tls": "there is no server with TLS beside it",
    "jwt": "no server beside it takes JSON web tokens",
    "cluster": "it is no cluster",
    "storage-snapshot": "no server beside it can be started from a snapshot of a whole storage",
}
"""What scenarios may need of a backend, and what is said of one that lacks it."""


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
        self.folder = folder
        yield

    @abstractmethod
    def gallery(self, **options) -> Gallery:
        """A fresh gallery under a name of its own; see `galleries`."""


class Edge(Backend):
    name = "edge"
    can = frozenset({"graph", "threads", "processes", "disk"})

    @classmethod
    def missing(cls) -> str | None:
        try:
            import qdrant_edge  # noqa: F401
        except ImportError:
            return "pip install 'hubplugin[edge]'"
        return None

    def gallery(self, **options) -> Gallery:
        return Shard(self.folder / uuid.uuid4().hex, **options)


class ClientBackend(Backend):
    """A backend with qdrant-client's API."""

    def gallery(self, **options) -> Gallery:
        name = f"hubplugin-test-{uuid.uuid4().hex[:12]}"
        return Collection(self, name, **options)

    @abstractmethod
    def client(self) -> QdrantClient: ...

    @abstractmethod
    def wrapped(self, **options) -> HubQdrantClient:
        """As an application makes one."""

    @abstractmethod
    def wrapped_async(self, **options) -> AsyncHubQdrantClient: ...

    @abstractmethod
    def url(self, collection: str) -> str: ...


class Memory(ClientBackend):
    name = "local"
    can = frozenset({"client"})

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        self._client = QdrantClient(":memory:")
        yield
        self._client.close()

    def client(self) -> QdrantClient:
        return self._client

    def wrapped(self, **options) -> HubQdrantClient:
        return HubQdrantClient.wrap(self._client, **options)

    def wrapped_async(self, **options) -> AsyncHubQdrantClient:
        return _async_over(self._client, **options)

    def url(self, collection: str) -> str:
        raise NotImplementedError("memory has no URL")


class Disk(ClientBackend):
    name = "local-path"
    can = frozenset({"client", "disk", "processes"})

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        self._folder, self._client = folder, None
        yield
        self.close()

    def gallery(self, **options) -> Gallery:
        return super().gallery(**({"rows": 60} | options))  # each point is a transaction of SQLite, one by one

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

    def wrapped_async(self, **options) -> AsyncHubQdrantClient:
        return _async_over(self.client(), **options)

    def url(self, collection: str) -> str:
        return f"qdrant-local:{self._folder}/{collection}"


def _async_over(client: QdrantClient, **options) -> AsyncHubQdrantClient:
    """An async client on the collections of a local one: both local modes keep them in the same kind of object."""
    plain = AsyncQdrantClient(":memory:")
    plain._client.collections = client._client.collections
    return AsyncHubQdrantClient.wrap(plain, **options)


class Server(ClientBackend):
    """A backend that is a server at `address`."""

    can = frozenset({"client", "graph", "threads", "processes", "server", "grpc"})
    address: Address

    def client(self) -> QdrantClient:
        return self.address.client()

    def wrapped(self, **options) -> HubQdrantClient:
        return HubQdrantClient(**self.address.options(), **options)

    def wrapped_async(self, **options) -> AsyncHubQdrantClient:
        return AsyncHubQdrantClient(**self.address.options(), **options)

    def url(self, collection: str) -> str:
        return self.address.url(collection)

    def version(self) -> tuple[int, int]:
        major, minor = self.client().info().version.split(".")[:2]
        return int(major), int(minor)


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


class Single(Server):
    """A server that may be stopped and started again."""

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def start(self) -> None:
        """Returns when it answers again."""


class Binary(Single):
    name = "binary"
    read_only_key = READ_ONLY_KEY
    can = Server.can | {"disk", "restart", "fresh", "keyed", "tls", "jwt", "storage-snapshot"}

    @classmethod
    def missing(cls) -> str | None:
        return None if shutil.which("qdrant") else "put a qdrant executable on PATH"

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        with ExitStack() as stack:
            self._process = Executable(folder / "server")
            stack.callback(self._process.stop)
            self.address = self._process.address
            self._process.start()
            self._stack, self._folder = stack, folder
            self._others: dict[str, Address] = {}
            yield

    def stop(self) -> None:
        self._process.stop()

    def start(self) -> None:
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


class Docker(Single):
    """The four servers of docker-compose.yml; this one is the open one, spoken to by REST."""

    name = "docker"
    read_only_key = READ_ONLY_KEY
    can = Server.can | {"disk", "restart", "fresh", "keyed", "tls", "jwt"}
    service = "open"

    @classmethod
    def missing(cls) -> str | None:
        return Compose.missing()

    @classmethod
    def unobtainable(cls) -> str | None:
        return Compose.unobtainable()

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        services = ("open", "keyed", "tls", "fresh")
        certificates = make_certificates(folder / "certificates")
        environment = {"HUBPLUGIN_TEST_CERTIFICATES": str(certificates), "HUBPLUGIN_TEST_KEY": TEST_KEY}
        environment["HUBPLUGIN_TEST_READ_ONLY_KEY"] = READ_ONLY_KEY
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
    can = Docker.can - {"processes"}  # a store's URL speaks REST
    service = "keyed"

    def _chosen(self, addresses: dict[str, Address]) -> Address:
        keyed = addresses["keyed"]
        return Address(keyed.host, keyed.http, keyed.grpc, keyed.api_key, prefer_grpc=True)


class Nodes(Server):
    """Three nodes, spoken to through the first."""

    can = Server.can | {"cluster"}
    nodes = ("node1", "node2", "node3")
    addresses: dict[str, Address]

    @property
    def address(self) -> Address:  # type: ignore[override]
        return self.addresses["node1"]

    def gallery(self, **options) -> Gallery:
        return super().gallery(**({"shard_number": 3, "replication_factor": 2} | options))

    @abstractmethod
    def stop(self, node: str) -> None: ...

    @abstractmethod
    def start(self, node: str) -> None:
        """Returns when it answers again."""

    def _gather(self) -> None:
        """Returns when every node knows every other."""
        wait_until(lambda: all(self._peers(node) == len(self.nodes) for node in self.nodes))

    def _peers(self, node: str) -> int:
        address = self.addresses[node]
        answer = httpx.get(f"http://{address.host}:{address.http}/cluster").json()
        return len(answer["result"]["peers"])


class BinaryCluster(Nodes):
    name = "binary-cluster"

    @classmethod
    def missing(cls) -> str | None:
        return Binary.missing()

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        ports = free_ports(3 * len(self.nodes))
        among = [f"http://127.0.0.1:{port}" for port in ports[2::3]]
        self._processes: dict[str, Executable] = {}
        with ExitStack() as stack:
            for number, node in enumerate(self.nodes):
                settings = {
                    "QDRANT__CLUSTER__ENABLED": "true",
                    "QDRANT__CLUSTER__P2P__PORT": str(ports[3 * number + 2]),
                }
                first = () if number == 0 else ("--bootstrap", among[0])
                address = Address("127.0.0.1", *ports[3 * number : 3 * number + 2])
                process = Executable(folder / node, address, settings, ("--uri", among[number], *first))
                stack.callback(process.stop)
                process.start()
                self._processes[node] = process
            self.addresses = {node: process.address for node, process in self._processes.items()}
            self._gather()
            yield

    def stop(self, node: str) -> None:
        self._processes[node].stop()

    def start(self, node: str) -> None:
        self._processes[node].start()


class Cluster(Nodes):
    """The nodes of docker-compose.cluster.yml."""

    name = "cluster"

    @classmethod
    def missing(cls) -> str | None:
        return Compose.missing()

    @classmethod
    def unobtainable(cls) -> str | None:
        return Compose.unobtainable()

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        with Compose("docker-compose.cluster.yml", self.nodes, {}, folder).started() as self._compose:
            self.addresses = {node: Address("127.0.0.1", *self._compose.ports[node]) for node in self.nodes}
            self._gather()
            yield

    def stop(self, node: str) -> None:
        self._compose.run(f"stop {node}")

    def start(self, node: str) -> None:
        self._compose.run(f"start {node}")
        wait_until(self.addresses[node].ready)


BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend for backend in (Memory, Disk, Edge, Binary, BinaryCluster, Url, Docker, DockerGrpc, Cluster)
}
