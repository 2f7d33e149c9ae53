"""The core without stores, each adapter without the other, and no torch until something is computed."""

import subprocess
import sys

import pytest

import hubplugin

STORES = (
    *("chromadb", "faiss", "lancedb", "qdrant_client"),
    *("hubplugin_chroma", "hubplugin_faiss", "hubplugin_lancedb", "hubplugin_qdrant"),
)


FIT = "import numpy as np, hubplugin.cli, hubplugin.jobs.correct; x = np.eye(4); hubplugin.fit(x, x).offsets(x)"


@pytest.mark.slow
@pytest.mark.parametrize("own", ["", "chroma", "faiss", "lancedb", "qdrant"])
def test_the_core_fits_without_any_store_and_each_adapter_imports_without_the_others(
    own,
):
    program = f"import hubplugin_{own}.store" if own else FIT
    missing = [name for name in STORES if not own or own not in name]
    block = f"import sys\nfor name in {missing}: sys.modules[name] = None\n"
    subprocess.run([sys.executable, "-c", block + program], check=True)


def test_every_public_name_is_there():
    for name in hubplugin.__all__:
        assert getattr(hubplugin, name) is not None
