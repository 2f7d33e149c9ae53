"""The places where the scenarios run: one server or three, as executables or as
containers."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property

import httpx
import pytest
from qdrant_client import QdrantClient

from hubplugin_qdrant import AsyncHubQdrantClient, HubQdrantClient
from integration_tests.galleries import Gallery
from integration_tests.servers import (
    Container,
    Executable,
    Process,
    container_network,
    wait_until,
)

TEST_KEY = "for-tests-only"


class Server:
    """A running server, as scenarios use it."""

    def __init__(self, address):
        self.address = address

    def client(self):
        return QdrantClient(**self.address.options())

    def wrapped(self):
        """Return a client as an application makes one."""
        return HubQdrantClient(**self.address.options())

    def wrapped_async(self):
        return AsyncHubQdrantClient(**self.address.options())

    def url(self, collection):
        url = f"qdrant://{self.address.root.removeprefix('http://')}/{collection}"
        if self.address.prefer_grpc:
            url += f"?grpc={self.address.grpc}"
        return url

    def require(self, oldest, what):
        """Skip a test of `what` on a server older than the `oldest` that has it."""
        version = self.client().info().version
        if tuple(map(int, version.split(".")[:2])) < oldest:
            newer = ".".join(map(str, oldest))
            pytest.skip(f"{what}: this server is {version}; start one of {newer}")

    def gallery(self, **options):
        return Gallery(self, **options)


class Binary(Server):
    """Run one server by `process`."""

    name = "binary"
    nodes = 1
    process: type[Process] = Executable
    api_key: str | None = None
    prefer_grpc = False

    def __init__(self, folder):
        self._folder = folder

    @contextmanager
    def started(self):
        """Run it until the session ends."""
        with ExitStack() as self._stack:
            self._server = self._run("server", self.api_key)
            address = self._server.address
            self.address = replace(address, prefer_grpc=self.prefer_grpc)
            yield

    def _run(self, name, *args, **settings):
        """Return a process that goes when the session does."""
        process = self.process(self._folder / name, *args, **settings)
        self._stack.callback(process.remove)
        process.start()
        return process

    def kill(self):
        """End it at once, as a lack of memory does."""
        self._server.kill()

    def start(self):
        """Return when it answers again."""
        self._server.start()

    @cached_property
    def keyed(self):
        """An empty server that asks for an api key."""
        return Server(self._run("keyed", TEST_KEY).address)


class BinaryGrpc(Binary):
    """A server that asks for an api key, and is spoken to by gRPC."""

    name = "binary-grpc"
    api_key = TEST_KEY
    prefer_grpc = True


class BinaryCluster(Binary):
    """Three nodes, spoken to through the first."""

    name = "binary-cluster"
    nodes = 3

    @contextmanager
    def started(self):
        self._processes: dict[str, Process] = {}
        with ExitStack() as stack:
            for node in ("node1", "node2", "node3"):
                folder = self._folder / node
                process = self.process(folder, QDRANT__CLUSTER__ENABLED="true")
                process.arguments = ("--uri", process.peer)
                if self._processes:
                    process.arguments += ("--bootstrap", self._processes["node1"].peer)
                self._processes[node] = process
                stack.callback(process.remove)
                process.start()
            self.address = self._processes["node1"].address
            wait_until(self._has_one_leader)
            yield

    def gallery(self, **options):
        return Gallery(self, **({"shard_number": 3, "replication_factor": 2} | options))

    def _has_one_leader(self):
        """Tell whether each node knows all three and the same leader: a change that
        goes to a former leader is lost."""
        states = [
            httpx.get(f"{process.address.root}/cluster").json()["result"]
            for process in self._processes.values()
        ]
        leaders = {state["raft_info"]["leader"] for state in states}
        knows_all = all(len(state["peers"]) == 3 for state in states)
        return len(leaders) == 1 and all(leaders) and knows_all

    def stop_node(self, node):
        self._processes[node].stop()

    def start_node(self, node):
        """Return when it answers again, and is one of the cluster."""
        self._processes[node].start()
        wait_until(self._has_one_leader)


class Docker(Binary):
    name = "docker"
    process = Container


class DockerGrpc(BinaryGrpc):
    name = "docker-grpc"
    process = Container


class Cluster(BinaryCluster):
    name = "cluster"
    process = Container

    @contextmanager
    def started(self):
        with container_network() as network:
            self.process = type("Node", (Container,), {"network": network})
            with super().started():
                yield


BACKENDS: dict[str, type[Binary]] = {
    backend.name: backend
    for backend in (Binary, BinaryGrpc, BinaryCluster, Docker, DockerGrpc, Cluster)
}
