"""Qdrant servers that are started from here: where they listen, as an executable, and as containers."""

import os
import shutil
import socket
import ssl
import subprocess
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
import trustme
from pytest_docker.plugin import DockerComposeExecutor, get_docker_services
from qdrant_client import QdrantClient

from integration_tests.waiting import wait_until

HERE = Path(__file__).parent
DEFAULT_VERSION = "v1.19.0"
"""The image of the compose files, where QDRANT_VERSION names no other."""


@dataclass(frozen=True)
class Address:
    """Where one server answers, and how it wants to be spoken to. `authority` is the certificate to trust, where it
    is none that the system trusts."""

    host: str
    http: int
    grpc: int
    api_key: str | None = None
    https: bool = False
    authority: Path | None = None
    prefer_grpc: bool = False

    def options(self) -> dict:
        trust = {"verify": self._trusting()} if self.authority else {}
        return {
            "host": self.host,
            "port": self.http,
            "grpc_port": self.grpc,
            "api_key": self.api_key,
            "prefer_grpc": self.prefer_grpc,
            "timeout": 60,
            "check_compatibility": False,  # the matrix holds servers older than the client on purpose
            "https": self.https,
            **trust,
        }

    def _trusting(self) -> ssl.SSLContext | bool:
        return ssl.create_default_context(cafile=self.authority) if self.authority else True

    def client(self) -> QdrantClient:
        return QdrantClient(**self.options())

    def ready(self) -> bool:
        scheme = "https" if self.https else "http"
        try:
            return httpx.get(f"{scheme}://{self.host}:{self.http}/readyz", verify=self._trusting()).is_success
        except httpx.TransportError:
            return False

    def url(self, collection: str) -> str:
        by_grpc = f"?grpc={self.grpc}" if self.prefer_grpc else ""
        return f"qdrant{'+https' if self.https else ''}://{self.host}:{self.http}/{collection}{by_grpc}"


class Executable:
    """A qdrant executable with its storage under `folder`, on ports that stay the same when it is started again.
    settings: environment variables. arguments: of the command line."""

    def __init__(
        self,
        folder: Path,
        address: Address | None = None,
        settings: dict[str, str] | None = None,
        arguments: Sequence[str] = (),
    ):
        self._folder, self._running = folder, None
        folder.mkdir(parents=True)
        self.address = address or Address("127.0.0.1", *free_ports(2))
        self._settings, self._command = settings or {}, ["qdrant", *arguments]

    def start(self) -> None:
        settings = {
            "QDRANT__STORAGE__STORAGE_PATH": str(self._folder / "storage"),
            "QDRANT__STORAGE__SNAPSHOTS_PATH": str(self._folder / "snapshots"),
            "QDRANT__SERVICE__HOST": "127.0.0.1",
            "QDRANT__SERVICE__HTTP_PORT": str(self.address.http),
            "QDRANT__SERVICE__GRPC_PORT": str(self.address.grpc),
            "QDRANT__TELEMETRY_DISABLED": "true",
            **self._settings,
        }
        with (self._folder / "log").open("ab") as log:
            self._running = subprocess.Popen(
                self._command, cwd=self._folder, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT
            )
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self._running is not None
        if self._running.poll() is not None:
            raise RuntimeError(f"qdrant ended with status {self._running.returncode}: see {self._folder / 'log'}")
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


class Stalling:
    """Ports of this machine that lead to `others`, the ports of a server here, and can be made to pass nothing on."""

    def __init__(self, *others: int):
        self._passing = threading.Event()
        self._passing.set()
        self._listening = [socket.create_server(("127.0.0.1", 0)) for _ in others]
        self.ports = [each.getsockname()[1] for each in self._listening]
        for listening, other in zip(self._listening, others, strict=True):
            threading.Thread(target=self._accept, args=(listening, other), daemon=True).start()

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """In here nothing arrives; afterwards it does."""
        self._passing.clear()
        try:
            yield
        finally:
            self._passing.set()

    def close(self) -> None:
        for each in self._listening:
            each.close()

    def _accept(self, listening: socket.socket, other: int) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = listening.accept()
                server = socket.create_connection(("127.0.0.1", other))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError), source, sink:
            while content := source.recv(1 << 16):
                self._passing.wait()
                sink.sendall(content)


class Compose:
    """A compose file, run as a project of its own on free ports."""

    def __init__(self, file: str, services: tuple[str, ...], environment: dict[str, str], folder: Path):
        ports = iter(free_ports(2 * len(services)))
        self.ports = {service: (next(ports), next(ports)) for service in services}
        for service, (http, grpc) in self.ports.items():
            environment = environment | {f"{service.upper()}_HTTP": str(http), f"{service.upper()}_GRPC": str(grpc)}
        version = os.environ.get("QDRANT_VERSION")
        if version:
            environment = environment | {"QDRANT_VERSION": version}
        folder.mkdir(parents=True, exist_ok=True)
        settings = folder / "compose.env"
        settings.write_text("".join(f"{name}={value}\n" for name, value in environment.items()))
        self._project = f"hubplugin-{uuid.uuid4().hex[:8]}"
        self._command, self._file = f'docker compose --env-file "{settings}"', str(HERE / file)

    @staticmethod
    @cache
    def missing() -> str | None:
        if shutil.which("docker") is None:
            return "install Docker with its compose plugin"
        for command, reason in (
            (["docker", "compose", "version"], "install Docker's compose plugin"),
            (["docker", "info"], "start the Docker engine, which does not answer"),
        ):
            try:
                if subprocess.run(command, capture_output=True, timeout=60).returncode:
                    return reason
            except subprocess.TimeoutExpired:
                return reason
        return None

    @staticmethod
    @cache
    def unobtainable() -> str | None:
        """Pulls the image if it is not here."""
        image = f"qdrant/qdrant:{os.environ.get('QDRANT_VERSION') or DEFAULT_VERSION}"
        if not subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode:
            return None
        pulled = subprocess.run(["docker", "pull", "--quiet", image], capture_output=True, text=True)
        if not pulled.returncode:
            return None
        said = (pulled.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"the Docker engine cannot get {image}: {said}"

    @contextmanager
    def started(self) -> Iterator["Compose"]:
        clean_up = ["down --volumes --remove-orphans --timeout 5"]
        with get_docker_services(self._command, self._file, self._project, [], clean_up):
            self.run("up --detach --wait --wait-timeout 600")  # in here, so that a failure is cleaned up, too
            yield self

    def run(self, subcommand: str) -> None:
        DockerComposeExecutor(self._command, self._file, self._project).execute(subcommand)


def free_ports(count: int) -> list[int]:
    """Ports that the system has free. All are held until all are known, so that no two are the same."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def make_certificates(folder: Path) -> Path:
    """A folder with a fresh authority (cacert.pem) and a server's certificate by it (cert.pem, key.pem)."""
    folder.mkdir(parents=True)
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(str(folder / "cacert.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    return folder
