"""Qdrant servers that are started from here, as executables and as containers, and
where they listen."""

import os
import shlex
import shutil
import socket
import subprocess
import time
import uuid
from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
from pytest_docker.plugin import DockerComposeExecutor, execute
from qdrant_client.http.exceptions import ResponseHandlingException

IMAGE = f"qdrant/qdrant:{os.environ.get('QDRANT_VERSION') or 'v1.19.0'}"
COMPOSE_FILE = Path(__file__).with_name("docker-compose.yml")

PATIENCE_SECONDS = 600.0
"""Nothing takes so long, on a busy machine either: whoever has waited for it waits in
vain."""


def wait_until(condition):
    """Return as soon as `condition()` is true; it is not of a server that does not
    answer in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError, ResponseHandlingException):
            if condition():
                return
        time.sleep(0.05)
    raise TimeoutError(f"waited for {PATIENCE_SECONDS} seconds")


@dataclass(frozen=True)
class Address:
    """The ports of a server on this machine, and how it wants to be spoken to."""

    http: int
    grpc: int
    api_key: str | None = None
    prefer_grpc: bool = False

    @property
    def root(self):
        return f"http://127.0.0.1:{self.http}"

    def options(self):
        return {
            "host": "127.0.0.1",
            "port": self.http,
            "grpc_port": self.grpc,
            "api_key": self.api_key,
            "prefer_grpc": self.prefer_grpc,
            "timeout": 60,
            # Servers older than the client are tested on purpose.
            "check_compatibility": False,
            "https": False,
        }

    def request(self, method, path, **options):
        """Return what the server answers to a request past the client."""
        headers = {"api-key": self.api_key} if self.api_key else {}
        url = f"{self.root}/{path}"
        answer = httpx.request(method, url, headers=headers, timeout=60, **options)
        return answer.raise_for_status()

    def is_ready(self):
        try:
            return httpx.get(f"{self.root}/readyz").is_success
        except httpx.TransportError:
            return False


class Process(ABC):
    """A server that can be stopped and started again, on ports that stay the same.

    folder: Holds what it reads.
    settings: Environment variables.
    arguments: Of the command line.
    peer: The URL by which other nodes of its cluster reach it.
    """

    peer: str
    arguments: tuple[str, ...] = ()

    def __init__(self, folder, api_key=None, **settings):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.address = Address(*free_ports(2), api_key)
        self.settings = {"QDRANT__TELEMETRY_DISABLED": "true", **settings}
        if api_key:
            self.settings["QDRANT__SERVICE__API_KEY"] = api_key
            self.settings["QDRANT__SERVICE__JWT_RBAC"] = "true"

    @staticmethod
    @abstractmethod
    def missing():
        """Say why there is no such process here, and what to do; None if there is."""

    @abstractmethod
    def start(self):
        """Return when it answers."""

    @abstractmethod
    def stop(self): ...

    @abstractmethod
    def kill(self): ...

    def remove(self):
        """Stop it, and leave nothing behind but files in its folder."""
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
    def missing():
        return None if shutil.which("qdrant") else "put a qdrant executable on PATH"

    def start(self):
        with (self.folder / "log").open("ab") as log:
            self._running = subprocess.Popen(
                ["qdrant", *self.arguments],
                cwd=self.folder,
                env=os.environ | self.settings,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._answers)

    def _answers(self):
        assert self._running is not None
        status = self._running.poll()
        assert status is None, f"qdrant ended with {status}: see {self.folder / 'log'}"
        return self.address.is_ready()

    def stop(self):
        if self._running is not None:
            self._running.terminate()
            try:
                self._running.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
            self._running = None

    def kill(self):
        assert self._running is not None
        self._running.kill()
        self._running.wait()


class Container(Process):
    """A container of `IMAGE`: docker-compose.yml, as a compose project of its own."""

    network = "bridge"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        project = f"hubplugin-{uuid.uuid4().hex[:8]}"
        self._variables = self.folder / "server.env"
        self._compose = DockerComposeExecutor(
            f'docker compose --env-file "{self._variables}"', str(COMPOSE_FILE), project
        )
        self.peer = f"http://{project}:6335"

    @staticmethod
    @cache
    def missing():
        if shutil.which("docker") is None:
            return "install Docker with its compose plugin"
        for command in (["compose", "version"], ["info"]):
            if docker(*command).returncode:
                said = f"docker {' '.join(command)} fails"
                return f"{said}: start the engine, with its compose plugin"
        if docker("image", "inspect", IMAGE).returncode == 0:
            return None
        pull = docker("pull", "--quiet", IMAGE)
        if pull.returncode == 0:
            return None
        return f"the Docker engine cannot get {IMAGE}: {pull.stderr.strip()[-200:]}"

    def start(self):
        variables = self.settings | {
            "SERVER_IMAGE": IMAGE,
            "SERVER_ARGUMENTS": shlex.join(self.arguments),
            "SERVER_FOLDER": str(self.folder),
            "SERVER_NETWORK": self.network,
            "SERVER_HTTP": str(self.address.http),
            "SERVER_GRPC": str(self.address.grpc),
        }
        lines = [f"{name}={value}\n" for name, value in variables.items()]
        self._variables.write_text("".join(lines))
        self._compose.execute("up --detach --wait")
        wait_until(self.address.is_ready)

    def stop(self):
        self._compose.execute("stop")

    def kill(self):
        self._compose.execute("kill")

    def remove(self):
        self._compose.execute("down --volumes --timeout 5")


def docker(*command):
    return subprocess.run(["docker", *command], capture_output=True, text=True)


@contextmanager
def container_network():
    """Yield the name of a network in which containers find each other by name."""
    name = f"hubplugin-{uuid.uuid4().hex[:8]}"
    execute(f"docker network create {name}")
    try:
        yield name
    finally:
        execute(f"docker network rm {name}")


def free_ports(count):
    """Return ports that the system has free.

    All are held until all are known, so that no two are the same.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]
