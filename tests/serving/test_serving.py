"""A service needs no torch: every step of `walk`, in a process in which torch cannot be imported."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.serving.walk import STEPS

NEVER = ["search", "search_second_vector", "search_async", "write", "command_line"]
"""What does not import torch where it is installed, either."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import hubplugin

    place, rng = tmp_path_factory.mktemp("serving"), np.random.default_rng(0)
    centres = rng.normal(size=(8, 16))
    gallery, queries = (
        centres[rng.integers(8, size=n)] + 0.7 * rng.normal(size=(n, 16))
        for n in (200, 120)
    )
    np.save(place / "gallery.npy", gallery.astype(np.float32))
    np.save(place / "queries.npy", queries.astype(np.float32))
    hubplugin.fit(gallery, queries[:100], "nnn", k=8).save(place / "model.hub")
    hubplugin.fit(gallery, queries[:80], "csls").save(place / "other.hub")
    return place


def walk(folder: Path, *given: str) -> tuple[dict[str, str], str]:
    """How each step ended, and what was written about those that failed."""
    program = [sys.executable, "-m", "tests.serving.walk", str(folder), *given]
    run = subprocess.run(program, capture_output=True, text=True, check=True)
    return dict(line.split() for line in run.stdout.splitlines()), run.stderr


@pytest.fixture(scope="module")
def without_torch(folder: Path) -> tuple[dict[str, str], str]:
    return walk(folder, *STEPS)


@pytest.fixture(scope="module")
def beside_torch(folder: Path) -> tuple[dict[str, str], str]:
    return walk(folder, *NEVER, "--may-import")


@pytest.mark.parametrize("name", STEPS)
def test_a_service_works_without_torch(without_torch, name):
    ends, written = without_torch
    assert ends[name] == "done", written


@pytest.mark.parametrize("name", NEVER)
def test_a_service_does_not_import_torch_where_it_is_installed(beside_torch, name):
    ends, written = beside_torch
    assert ends[name] == "done", written


def test_an_import_brings_neither_torch_nor_a_command_line():
    program = "import sys, qdrant_client as _; before = {*sys.modules}; import hubplugin_qdrant; "
    program += "print(*({*sys.modules} - before))"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    brought = {name.partition(".")[0] for name in run.stdout.split()}
    assert {"hubplugin", "hubplugin_qdrant"} <= brought
    assert not brought & {
        "torch",
        "typer",
        "scipy",
        "matplotlib",
        "pyarrow",
        "safetensors",
        "faiss",
    }
