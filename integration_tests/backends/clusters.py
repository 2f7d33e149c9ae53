"""Three servers that are one cluster: as executables, as containers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from integration_tests.backends.servers import Binary, ByCompose, Server
from integration_tests.galleries import Gallery
from integration_tests.servers import Address, Compose, Executable, free_ports
from integration_tests.waiting import wait_until


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
                    "QDRANT__CLUSTER__RESHARDING_ENABLED": "true",
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
        """Returns when it answers again."""
        self._processes[node].start()


class Cluster(ByCompose, Nodes):
    """The nodes of docker-compose.cluster.yml."""

    name = "cluster"

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        with Compose("docker-compose.cluster.yml", self.nodes, {}, folder).started() as self._compose:
            self.addresses = {node: Address("127.0.0.1", *self._compose.ports[node]) for node in self.nodes}
            self._gather()
            yield

    def stop(self, node: str) -> None:
        self._compose.run(f"stop {node}")

    def start(self, node: str) -> None:
        """Returns when it answers again."""
        self._compose.run(f"start {node}")
        wait_until(self.addresses[node].ready)
