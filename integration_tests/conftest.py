"""Every scenario on every backend that is there; a skipped one says what is missing."""

import pytest

from integration_tests.backends import BACKENDS
from integration_tests.galleries import Gallery


def pytest_addoption(parser):
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


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "nodes(number): runs on backends with so many nodes only"
    )
    # Servers with keys are spoken to without TLS here, on this machine alone.
    ignored = "ignore:Api key is used with an insecure connection:UserWarning"
    config.addinivalue_line("filterwarnings", ignored)
    for name in config.getoption("--require-backend"):
        if reason := BACKENDS[name].process.missing():
            said = f"--require-backend {name}: it is not there: {reason}"
            raise pytest.UsageError(said)


def pytest_generate_tests(metafunc):
    if "backend" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("nodes")
    marks = (pytest.mark.slow, pytest.mark.server)
    chosen = [
        pytest.param(name, marks=marks)
        for name, backend in BACKENDS.items()
        if marker is None or backend.nodes in marker.args
    ]
    metafunc.parametrize("backend", chosen, indirect=True, scope="session")


@pytest.fixture(scope="session")
def backend(request, tmp_path_factory):
    """Run one of the backends."""
    kind = BACKENDS[request.param]
    if reason := kind.process.missing():
        pytest.skip(f"{kind.name}: {reason}")
    running = kind(tmp_path_factory.mktemp(kind.name))
    with running.started():
        yield running


@pytest.fixture(autouse=True)
def api_key(request, monkeypatch):
    """The key of the backend, if it asks for one, is where a user has it: all that
    opens a URL takes it from there."""
    monkeypatch.delenv("QDRANT_API_KEY", raising=False)
    if "backend" in request.fixturenames:
        key = request.getfixturevalue("backend").address.api_key
        if key:
            monkeypatch.setenv("QDRANT_API_KEY", key)


@pytest.fixture
def fill(backend):
    """Makes galleries in the backend that are gone when the scenario ends."""
    made: list[Gallery] = []

    def fill(**options):
        made.append(backend.gallery(**options))
        return made[-1]

    yield fill
    for gallery in made:
        gallery.drop()


@pytest.fixture
def gallery(fill):
    return fill()


@pytest.fixture(params=["payload", "vector"])
def storage(request, backend):
    """The place of offsets: each that the server can have."""
    if request.param == "vector":
        backend.require((1, 18), "a second vector in place")
    return str(request.param)
