"""The core without stores, each adapter without the other, and no torch until something is computed."""

import subprocess
import sys

import pytest

import hubplugin

BLOCK = "import sys\nfor name in {missing!r}: sys.modules[name] = None\n"


def run(program, missing):
    result = subprocess.run(
        [sys.executable, "-c", BLOCK.format(missing=missing) + program],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


STORES = (
    *("chromadb", "faiss", "lancedb", "qdrant_client"),
    *("hubplugin_chroma", "hubplugin_faiss", "hubplugin_lancedb", "hubplugin_qdrant"),
)


FIT = "import numpy as np, hubplugin.cli, hubplugin.jobs.correct; x = np.eye(4); hubplugin.fit(x, x).offsets(x)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "needed"),
    [
        (FIT, set()),
        ("import hubplugin_chroma.store", {"chromadb", "hubplugin_chroma"}),
        ("import hubplugin_faiss.store", {"faiss", "hubplugin_faiss"}),
        ("import hubplugin_lancedb.store", {"lancedb", "hubplugin_lancedb"}),
        ("import hubplugin_qdrant.store", {"qdrant_client", "hubplugin_qdrant"}),
    ],
)
def test_the_core_fits_without_any_store_and_each_adapter_imports_without_the_others(
    program, needed
):
    run(program, tuple(set(STORES) - needed))


def test_every_public_name_is_there():
    for name in hubplugin.__all__:
        assert getattr(hubplugin, name) is not None
