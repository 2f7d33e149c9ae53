"""Three servers that are one cluster: as executables, as containers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from integration_tests.backends.servers import LocalServer, Server
from integration_tests.galleries import Gallery
from integration_tests.servers import Container, Process, container_network
from integration_tests.waiting import wait_until


class BinaryCluster(LocalServer):
    """Three nodes, spoken to through the first."""

    name = "binary-cluster"
    can = Server.can | {"cluster"}

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        settings = {
            "QDRANT__CLUSTER__ENABLED": "true",
        }
        self._processes: dict[str, Process] = {}
        with ExitStack() as stack:
            for node in ("node1", "node2", "node3"):
                process = self._processes[node] = self.process(
                    folder / node, settings=settings
                )
                first = self._processes["node1"]
                process.arguments = ("--uri", process.peer) + (
                    () if process is first else ("--bootstrap", first.peer)
                )
                stack.callback(process.remove)
                process.start()
            self.addresses = {
                node: process.address for node, process in self._processes.items()
            }
            self.address = self.addresses["node1"]
            wait_until(self._has_one_leader)
            yield

    def gallery(self, **options) -> Gallery:
        return super().gallery(
            **({"shard_number": 3, "replication_factor": 2} | options)
        )

    def _has_one_leader(self) -> bool:
        """Whether each node knows all three and the same leader: a change that goes to a former leader is lost."""
        urls = [
            f"http://{address.host}:{address.http}/cluster"
            for address in self.addresses.values()
        ]
        states = [httpx.get(url).json()["result"] for url in urls]
        leaders = {state["raft_info"]["leader"] for state in states}
        return (
            len(leaders) == 1
            and all(leaders)
            and all(len(state["peers"]) == 3 for state in states)
        )

    def stop(self, node: str) -> None:
        self._processes[node].stop()

    def start(self, node: str) -> None:
        """Returns when it answers again, and is one of the cluster."""
        self._processes[node].start()
        wait_until(self._has_one_leader)


class Cluster(BinaryCluster):
    name = "cluster"

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        with container_network() as network:
            self.process = type("Node", (Container,), {"network": network})
            with super().started(folder):
                yield
