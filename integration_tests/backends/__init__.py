"""The places where the scenarios run: each says whether it is there, starts, offers clients, and cleans up."""

from integration_tests.backends.base import ABILITIES, Backend
from integration_tests.backends.clusters import BinaryCluster, Cluster
from integration_tests.backends.in_process import Disk
from integration_tests.backends.servers import (
    Binary,
    BinaryGrpc,
    Docker,
    DockerGrpc,
    Server,
)

BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend
    for backend in (
        Disk,
        Binary,
        BinaryGrpc,
        BinaryCluster,
        Docker,
        DockerGrpc,
        Cluster,
    )
}

__all__ = ["ABILITIES", "BACKENDS", "Backend", "Server"]
