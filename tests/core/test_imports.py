"""The core without stores, each adapter without the other, and no torch until something is computed."""

import subprocess
import sys

import pytest

import hubplugin

BLOCK = "import sys\nfor name in {missing!r}: sys.modules[name] = None\n"


def run(program: str, missing: tuple[str, ...] = ()) -> str:
    result = subprocess.run(
        [sys.executable, "-c", BLOCK.format(missing=missing) + program], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


STORES = (
    *("chromadb", "faiss", "lancedb", "qdrant_client"),
    *("hubplugin_chroma", "hubplugin_faiss", "hubplugin_lancedb", "hubplugin_qdrant"),
)


@pytest.mark.slow
def test_the_core_fits_and_corrects_with_neither_store_installed():
    run(
        "import numpy as np, hubplugin, hubplugin.cli, hubplugin.jobs.correct\n"
        "x = np.eye(4)\n"
        "assert hubplugin.fit(x, x).offsets(x).shape == (4,)\n",
        missing=STORES,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "needed"),
    [
        ("hubplugin_chroma", {"chromadb", "hubplugin_chroma"}),
        ("hubplugin_faiss", {"faiss", "hubplugin_faiss"}),
        ("hubplugin_lancedb", {"lancedb", "hubplugin_lancedb"}),
        ("hubplugin_qdrant", {"qdrant_client", "hubplugin_qdrant"}),
    ],
)
def test_each_adapter_imports_without_the_others(adapter, needed):
    run(f"import {adapter}, {adapter}.store", tuple(set(STORES) - needed))


def test_every_public_name_is_there():
    for name in hubplugin.__all__:
        assert getattr(hubplugin, name) is not None
