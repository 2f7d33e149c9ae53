import copy
import functools
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hubplugin.compute import has_torch

# Triton reads it when a kernel is made: without a card its interpreter runs the kernel.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

DATA = Path(__file__).parent.parent / "examples" / "data"


def pytest_ignore_collect(collection_path, config):
    """Leaves out files whose tests are all slow where slow tests are: to import what they need takes seconds, and the
    frameworks longer than all that is fast."""
    if "not slow" not in config.getoption("markexpr"):
        return None
    wholly = (
        collection_path.suffix == ".py"
        and "\npytestmark = pytest.mark.slow\n" in collection_path.read_text()
    )
    return True if wholly or collection_path.name == "frameworks" else None


def copied(value):
    """Copy as `copy.deepcopy` does, in a fifth of the time if it is JSON."""
    if type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    if type(value) is list:
        return [copied(each) for each in value]
    return (
        value
        if type(value) in (str, int, float, bool, type(None))
        else copy.deepcopy(value)
    )


def pytest_collection_finish():
    """Qdrant's local mode parses the key of an offset, asks for the types of a union and copies the payload for each
    point that it ranks, and a client copies all schemas: half of the time of the tests that use it. Here what it has
    parsed and asked for is kept, and it copies quicker; it computes the same."""
    for module, name, quick in (
        ("local.payload_value_extractor", "parse_json_path", functools.cache),
        ("hybrid.formula", "get_args_subscribed", functools.cache),
        ("local.local_collection", "deepcopy", lambda _: copied),
        ("embed.schema_parser", "deepcopy", lambda _: copied),
    ):
        found = sys.modules.get(f"qdrant_client.{module}")
        if hasattr(found, name):
            setattr(found, name, quick(getattr(found, name)))


def pytest_collection_modifyitems(items):
    """The tests of the wheel first, which take longest: behind all others, one process would wait for the other."""
    items.sort(key=lambda item: item.path.name != "test_wheel.py")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Skip tests that ask for a device of torch if it is not installed (`make light`)."""
    outcome = yield
    report, error = outcome.get_result(), call.excinfo
    if (
        error is not None
        and not has_torch()
        and "torch, which is not installed" in str(error.value)
    ):
        path, line, _ = item.location
        report.outcome, report.longrepr = (
            "skipped",
            (path, line, "asks for a device of torch"),
        )


@pytest.fixture(scope="session")
def real():
    """The example set: bank_queries, bank_targets, test_queries, test_targets, each [rows, 384] float16."""
    return {path.stem: np.load(path) for path in DATA.glob("*.npy")}


@pytest.fixture(autouse=True)
def few_calibration_queries(request, monkeypatch):
    """Local mode of Qdrant searches in Python, where a calibration would take most of the time of a test."""
    if request.path.parent.name not in ("adapters", "chroma"):
        monkeypatch.setattr("hubplugin.calibration.QUERIES", 6)


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    """The folder of this process."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def full_disk():
    """`with full_disk():` no file of this process can be longer than `size` bytes: what is written beyond is refused
    half-way, as by a disk that is full, with "File too large"."""
    resource = pytest.importorskip("resource")

    @contextmanager
    def full(size=50_000):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return full
