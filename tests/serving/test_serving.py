"""A service needs no torch: `walk`, in a process of its own."""

import subprocess
import sys

import numpy as np
import pytest

import hubplugin


def run(*arguments):
    program = [sys.executable, *map(str, arguments)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_service_does_not_import_torch_where_it_is_installed(tmp_path, rng):
    centres = rng.normal(size=(8, 16))[rng.integers(8, size=320)]
    vectors = (centres + 0.7 * rng.normal(size=(320, 16))).astype(np.float32)
    gallery, queries = vectors[:200], vectors[200:]
    np.save(tmp_path / "gallery.npy", gallery)
    np.save(tmp_path / "queries.npy", queries)
    hubplugin.fit(gallery, queries[:100], "nnn", k=8).save(tmp_path / "model.hub")
    run("-m", "tests.serving.walk", tmp_path)


WITHOUT_TORCH = r"""
import sys
sys.modules["torch"] = None
import numpy as np, pytest, hubplugin
lacking = r"needs torch, which is not installed; .*pip install '\.\[fit\]'"
with pytest.raises(hubplugin.InputError, match=lacking):
    hubplugin.fit(np.eye(4), np.eye(4), compute=hubplugin.Compute("cpu"))
sys.exit(pytest.main(["-rs", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_who_keeps_a_service_needs_no_torch():
    """Jobs and conformance; numpy fits, too."""
    tests = (
        "adapters/test_faiss.py",
        "looking/test_diagnose.py",
        "looking/test_in_store.py",
    )
    said = run("-c", WITHOUT_TORCH, *(f"tests/{each}" for each in tests))
    assert "asks for a device of torch" not in said


def test_an_import_brings_neither_torch_nor_a_command_line():
    program = "import sys, qdrant_client as _; before = {*sys.modules}; import hubplugin_qdrant; "
    program += "print(*({*sys.modules} - before))"
    brought = {name.partition(".")[0] for name in run("-c", program).split()}
    assert {"hubplugin", "hubplugin_qdrant"} <= brought
    never = "torch typer scipy matplotlib pyarrow safetensors faiss"
    assert not brought & set(never.split())
