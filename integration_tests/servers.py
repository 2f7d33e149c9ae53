"""Qdrant servers that are started from here, as executables and as containers, and where they listen."""

import os
import shlex
import shutil
import socket
import subprocess
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
from pytest_docker.plugin import DockerComposeExecutor, execute
from qdrant_client import QdrantClient

from integration_tests.waiting import wait_until

IMAGE = f"qdrant/qdrant:{os.environ.get('QDRANT_VERSION') or 'v1.19.0'}"
COMPOSE_FILE = Path(__file__).with_name("docker-compose.yml")


@dataclass(frozen=True)
class Address:
    """Where one server answers, and how it wants to be spoken to."""

    host: str
    http: int
    grpc: int
    api_key: str | None = None
    prefer_grpc: bool = False

    def options(self) -> dict:
        return {
            "host": self.host,
            "port": self.http,
            "grpc_port": self.grpc,
            "api_key": self.api_key,
            "prefer_grpc": self.prefer_grpc,
            "timeout": 60,
            "check_compatibility": False,  # the matrix holds servers older than the client on purpose
            "https": False,
        }

    def client(self) -> QdrantClient:
        return QdrantClient(**self.options())

    def ready(self) -> bool:
        try:
            return httpx.get(f"http://{self.host}:{self.http}/readyz").is_success
        except httpx.TransportError:
            return False

    def url(self, collection: str) -> str:
        by_grpc = f"?grpc={self.grpc}" if self.prefer_grpc else ""
        return f"qdrant://{self.host}:{self.http}/{collection}{by_grpc}"


class Process(ABC):
    """A server that can be stopped and started again, on ports that stay the same. What it reads lies under `folder`.

    settings: environment variables. arguments: of the command line. peer: the URL by which other nodes of its cluster
    reach it."""

    peer: str

    def __init__(
        self,
        folder: Path,
        address: Address | None = None,
        settings: dict[str, str] | None = None,
        arguments: Sequence[str] = (),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.address = (
            folder,
            address or Address("127.0.0.1", *free_ports(2)),
        )
        self.settings = {"QDRANT__TELEMETRY_DISABLED": "true", **(settings or {})}
        self.arguments = tuple(arguments)

    @staticmethod
    @abstractmethod
    def missing() -> str | None:
        """Why there is no such process here, and what to do; None if there is."""

    @staticmethod
    def unobtainable() -> str | None:
        """Why what it needs from elsewhere cannot be had, once that was tried; None if it is here now."""
        return None

    @abstractmethod
    def start(self) -> None:
        """Returns when it answers."""

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def kill(self) -> None: ...

    def remove(self) -> None:
        """Stops it, and leaves nothing behind but files in its folder."""
        self.stop()


class Executable(Process):
    """A qdrant executable."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._running: subprocess.Popen[bytes] | None = None
        (port,) = free_ports(1)
        self.peer = f"http://127.0.0.1:{port}"
        self.settings |= {
            "QDRANT__STORAGE__STORAGE_PATH": str(self.folder / "storage"),
            "QDRANT__STORAGE__SNAPSHOTS_PATH": str(self.folder / "snapshots"),
            "QDRANT__SERVICE__HOST": "127.0.0.1",
            "QDRANT__SERVICE__HTTP_PORT": str(self.address.http),
            "QDRANT__SERVICE__GRPC_PORT": str(self.address.grpc),
            "QDRANT__CLUSTER__P2P__PORT": str(port),
        }

    @staticmethod
    def missing() -> str | None:
        return None if shutil.which("qdrant") else "put a qdrant executable on PATH"

    def start(self) -> None:
        command, environment = ["qdrant", *self.arguments], os.environ | self.settings
        with (self.folder / "log").open("ab") as log:
            self._running = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self._running is not None
        if self._running.poll() is not None:
            raise RuntimeError(
                f"qdrant ended with status {self._running.returncode}: see {self.folder / 'log'}"
            )
        return self.address.ready()

    def stop(self) -> None:
        if self._running is not None:
            self._running.terminate()
            try:
                self._running.wait(30)
            except subprocess.TimeoutExpired:
                self._running.kill()
                self._running.wait()
            self._running = None

    def kill(self) -> None:
        assert self._running is not None
        self._running.kill()
        self._running.wait()


class Container(Process):
    """A container of `IMAGE`: docker-compose.yml, as a compose project of its own."""

    network = "bridge"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        project, variables = (
            f"hubplugin-{uuid.uuid4().hex[:8]}",
            self.folder / "server.env",
        )
        self._compose = DockerComposeExecutor(
            f'docker compose --env-file "{variables}"', str(COMPOSE_FILE), project
        )
        self.peer = f"http://{project}:6335"

    @staticmethod
    @cache
    def missing() -> str | None:
        if shutil.which("docker") is None:
            return "install Docker with its compose plugin"
        for command in ("compose version", "info"):
            run = subprocess.run(["docker", *command.split()], capture_output=True)
            if run.returncode:
                return (
                    f"docker {command} fails: start the engine, with its compose plugin"
                )
        return None

    @staticmethod
    @cache
    def unobtainable() -> str | None:
        """Pulls the image if it is not here."""
        if not subprocess.run(
            ["docker", "image", "inspect", IMAGE], capture_output=True
        ).returncode:
            return None
        pull = subprocess.run(
            ["docker", "pull", "--quiet", IMAGE], capture_output=True, text=True
        )
        reason = (pull.stderr.strip().splitlines() or ["no reason given"])[-1]
        return (
            f"the Docker engine cannot get {IMAGE}: {reason}"
            if pull.returncode
            else None
        )

    def start(self) -> None:
        variables = self.settings | {
            "SERVER_IMAGE": IMAGE,
            "SERVER_ARGUMENTS": shlex.join(self.arguments),
            "SERVER_FOLDER": str(self.folder),
            "SERVER_NETWORK": self.network,
            "SERVER_HTTP": str(self.address.http),
            "SERVER_GRPC": str(self.address.grpc),
        }
        lines = [f"{name}={value}\n" for name, value in variables.items()]
        (self.folder / "server.env").write_text("".join(lines))
        self._compose.execute("up --detach --wait")
        wait_until(self.address.ready)

    def stop(self) -> None:
        self._compose.execute("stop")

    def kill(self) -> None:
        self._compose.execute("kill")

    def remove(self) -> None:
        self._compose.execute("down --volumes --timeout 5")


@contextmanager
def container_network() -> Iterator[str]:
    """The name of a network in which containers find each other by name."""
    name = f"hubplugin-{uuid.uuid4().hex[:8]}"
    execute(f"docker network create {name}")
    try:
        yield name
    finally:
        execute(f"docker network rm {name}")


def free_ports(count: int) -> list[int]:
    """Ports that the system has free. All are held until all are known, so that no two are the same."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]
