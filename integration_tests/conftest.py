"""Every scenario on every backend that is there, and at the end a table that says what was seen working where."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from integration_tests.backends import ABILITIES, BACKENDS, Backend
from integration_tests.galleries import Gallery

NO_BACKEND = "here"
"""The column of scenarios that need no Qdrant."""

_missing: dict[str, str] = {}
_cells: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))


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
        reason = (
            "make integration runs it"
            if servers_left_out and "server" in backend.can
            else backend.missing()
        )
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
    able = [name for name, backend in BACKENDS.items() if needed <= backend.can]
    there = [name for name in able if name not in _missing]
    scenario = _scenario(metafunc.definition)
    for name in BACKENDS:
        if name not in able:
            _cells[scenario][name] = [
                next(
                    text
                    for need, text in ABILITIES.items()
                    if need in needed - BACKENDS[name].can
                )
            ]
        elif name in _missing:
            _cells[scenario][name] = [_missing[name]]
    absent = "; or ".join(
        f"{name}: {_missing[name]}" for name in able if name in _missing
    )
    nowhere = pytest.param(
        None,
        id="nowhere",
        marks=pytest.mark.skip(reason=f"no backend can run it; {absent}"),
    )
    metafunc.parametrize("backend", there or [nowhere], indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and item.module.__name__.startswith(
            "integration_tests."
        ):
            item.add_marker("slow")
            chosen = getattr(item, "callspec", None)
            backend = BACKENDS.get(chosen.params.get("backend", "")) if chosen else None
            if backend is not None and "server" in backend.can:
                item.add_marker("server")


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


def _scenario(item: pytest.Item) -> str:
    return (
        getattr(item, "originalname", item.name).removeprefix("test_").replace("_", " ")
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:
    report: Any = yield  # type: ignore[misc]
    if item.path.is_relative_to(__file__.removesuffix("conftest.py")):
        chosen = getattr(item, "callspec", None)
        where = chosen.params.get("backend", NO_BACKEND) if chosen else NO_BACKEND
        if report.failed:
            _cells[_scenario(item)][where].append("failed")
        elif report.skipped and where is not None:
            _cells[_scenario(item)][where].append(
                report.longrepr[2].removeprefix("Skipped: ")
            )
        elif report.when == "call":
            _cells[_scenario(item)][where].append("passed")
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    ran = {
        report.nodeid
        for kind in ("passed", "failed", "skipped")
        for report in terminalreporter.getreports(kind)
    }
    if not _cells or not any(name.startswith("integration_tests/") for name in ran):
        return
    columns = [NO_BACKEND, *BACKENDS]
    table = Table(title="What was seen working where", title_justify="left")
    table.add_column("scenario", max_width=60)
    for column in columns:
        table.add_column(column)
    notes: dict[str, int] = {}
    for scenario, row in _cells.items():
        table.add_row(scenario, *(_cell(row[column], notes) for column in columns))
    console = Console(width=150, file=terminalreporter._tw._file)
    console.print(table)
    for note, number in notes.items():
        console.print(
            f"  {number}  not run: {note}",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )


def _cell(outcomes: list[str], notes: dict[str, int]) -> str:
    """`passed`, `failed`, or the number of the note that says why it, or a part of it, was not run."""
    if "failed" in outcomes:
        return "[red]failed[/]"
    reasons = dict.fromkeys(outcome for outcome in outcomes if outcome != "passed")
    numbers = [str(notes.setdefault(reason, len(notes) + 1)) for reason in reasons]
    return ", ".join((["[green]passed[/]"] if "passed" in outcomes else []) + numbers)
