"""A service needs no torch: `walk`, in a process of its own."""

import subprocess
import sys

import numpy as np
import pytest

import hubplugin


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("serving")
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(8, 16))[rng.integers(8, size=320)]
    vectors = (centres + 0.7 * rng.normal(size=(320, 16))).astype(np.float32)
    gallery = vectors[:200]
    queries = vectors[200:]
    np.save(place / "gallery.npy", gallery)
    np.save(place / "queries.npy", queries)
    hubplugin.fit(gallery, queries[:100], "nnn", k=8).save(place / "model.hub")
    hubplugin.fit(gallery, queries[:80], "csls").save(place / "other.hub")
    return place


def run(*arguments):
    program = [sys.executable, *map(str, arguments)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_service_does_not_import_torch_where_it_is_installed(folder):
    run("-m", "tests.serving.walk", folder)


def test_a_service_and_who_keeps_it_work_without_torch(folder):
    run("-m", "tests.serving.walk", folder, "--keep")


def test_an_import_brings_neither_torch_nor_a_command_line():
    program = "import sys, qdrant_client as _; before = {*sys.modules}; import hubplugin_qdrant; "
    program += "print(*({*sys.modules} - before))"
    brought = {name.partition(".")[0] for name in run("-c", program).split()}
    assert {"hubplugin", "hubplugin_qdrant"} <= brought
    never = "torch typer scipy matplotlib pyarrow safetensors faiss"
    assert not brought & set(never.split())
