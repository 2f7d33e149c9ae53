"""Every scenario on every backend that is there; a skipped one says what is missing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from integration_tests.backends import ABILITIES, BACKENDS, Backend
from integration_tests.galleries import Gallery

_missing: dict[str, str] = {}
"""Why backends are not there, by name."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hubplugin integration tests")
    group.addoption(
        "--require-backend",
        action="append",
        default=[],
        choices=[*BACKENDS],
        help="fail at once if this backend is not there; may be given several times",
    )
    group.addoption(
        "--kills",
        type=int,
        default=4,
        help="how often the applying process is killed on each backend",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "needs(*abilities): what a scenario asks of a backend; see backends.ABILITIES",
    )
    # Servers with keys are spoken to without TLS here, on this machine alone.
    for expected in (
        "Api key is used with an insecure connection",
        "Local mode performs exact",
        "Payload indexes have no",
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{expected}:UserWarning")
    required = config.getoption("--require-backend")
    servers_left_out = "not server" in config.getoption("markexpr")
    for name, backend in BACKENDS.items():
        # Where servers are left out nothing asks for Docker, which may be slow to say that it lacks an image.
        if servers_left_out and "server" in backend.can:
            _missing[name] = "make integration runs it"
            continue
        reason = backend.missing()
        if reason is None and name in required:
            reason = backend.unobtainable()
        if reason is not None:
            _missing[name] = reason
    for name in required:
        if name in _missing:
            raise pytest.UsageError(
                f"--require-backend {name}: it is not there: {_missing[name]}"
            )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("needs")
    needed = set(marker.args if marker else ())
    assert needed <= ABILITIES.keys()
    chosen = []
    for name, backend in BACKENDS.items():
        if not needed <= backend.can:
            continue
        marks = [pytest.mark.slow]
        if "server" in backend.can:
            marks.append(pytest.mark.server)
        if name in _missing:
            marks.append(pytest.mark.skip(reason=f"{name}: {_missing[name]}"))
        chosen.append(pytest.param(name, marks=marks))
    metafunc.parametrize("backend", chosen, indirect=True, scope="session")


@pytest.fixture(scope="session")
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backend]:
    """One of the backends, running."""
    running = BACKENDS[request.param]()
    reason = running.unobtainable()
    if reason is not None:
        pytest.skip(reason)
    with running.started(tmp_path_factory.mktemp(running.name)):
        yield running


@pytest.fixture(autouse=True)
def api_key(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the backend, if it asks for one, is where a user has it: all that opens a URL takes it from there."""
    monkeypatch.delenv("QDRANT_API_KEY", raising=False)
    if "backend" in request.fixturenames and (
        key := request.getfixturevalue("backend").api_key()
    ):
        monkeypatch.setenv("QDRANT_API_KEY", key)


@pytest.fixture
def fill(backend: Backend) -> Iterator[Callable[..., Gallery]]:
    """Makes galleries in the backend that are gone when the scenario ends."""
    made: list[Gallery] = []

    def fill(**options: Any) -> Gallery:
        made.append(backend.gallery(**options))
        return made[-1]

    yield fill
    for gallery in made:
        gallery.drop()


@pytest.fixture
def gallery(fill: Callable[..., Gallery]) -> Gallery:
    return fill()


@pytest.fixture(params=["payload", "vector"])
def storage(request: pytest.FixtureRequest, backend: Backend) -> str:
    """Where offsets lie."""
    if request.param == "vector":
        backend.require((1, 18), "a second vector in place")
    return str(request.param)
