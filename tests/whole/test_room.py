"""What finds no right to write, or no room, is refused before the gallery is read, in each store that is a folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hubplugin
from hubplugin import open_store
from tests.galleries import flat_index

RNG = np.random.default_rng(0)
GALLERY, BANK = (
    (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    for rows in (RNG.normal(size=(300, 8)), RNG.normal(size=(200, 8)))
)


def faiss(folder: Path) -> str:
    return flat_index(folder / "photos.faiss", GALLERY)


def chroma(folder: Path) -> str:
    chromadb = pytest.importorskip(
        "chromadb", reason="needs chromadb: pip install '.[chroma]'"
    )
    made = chromadb.PersistentClient(str(folder)).create_collection(
        "photos", metadata={"hnsw:space": "cosine"}
    )
    made.add(ids=[str(row) for row in range(len(GALLERY))], embeddings=GALLERY)
    return f"chroma:{folder}/photos"


def lancedb(folder: Path) -> str:
    lance = pytest.importorskip(
        "lancedb", reason="needs lancedb: pip install '.[lancedb]'"
    )
    rows = [
        {"id": row, "vector": vector.tolist()} for row, vector in enumerate(GALLERY)
    ]
    lance.connect(folder).create_table("photos", rows)
    return f"lancedb:{folder}/photos"


def qdrant(folder: Path) -> str:
    qdrant_client = pytest.importorskip(
        "qdrant_client", reason="needs qdrant-client: pip install '.[qdrant]'"
    )
    client, models = qdrant_client.QdrantClient(path=str(folder)), qdrant_client.models
    client.create_collection(
        "photos", models.VectorParams(size=8, distance=models.Distance.COSINE)
    )
    client.upload_collection("photos", GALLERY, ids=range(len(GALLERY)))
    client.close()
    return f"qdrant-local:{folder}/photos"


STORES = {"faiss": faiss, "chroma": chroma, "lancedb": lancedb, "qdrant": qdrant}


def lying(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(params=STORES)
def url(request, tmp_path) -> str:
    (tmp_path / "store").mkdir()
    return STORES[request.param](tmp_path / "store")


def test_a_disk_that_is_too_small_is_told_before_the_gallery_is_read(url, monkeypatch):
    store, full = open_store(url), shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    monkeypatch.setattr(
        type(store), "scan", lambda *_: pytest.fail("the gallery was read")
    )
    needed = r"^cannot write in '.*store': No space left on device, [\d,]+ bytes are needed and 100 were free; nothing"
    for method in ("csls", hubplugin.fit(None, BANK, "csls")):
        with pytest.raises(hubplugin.StoreError, match=needed):
            hubplugin.apply(
                store, BANK, "csls"
            ) if method == "csls" else hubplugin.apply(store, method)


def unprivileged(folder: Path) -> list[str]:
    """What runs a command for which `folder` is not to be written to."""
    folder.chmod(0o555)
    if os.geteuid():
        return []
    without = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    if (
        shutil.which("setpriv") is None
        or subprocess.run([*without, "true"], capture_output=True).returncode
    ):
        pytest.skip(
            "needs setpriv, which takes from root the right to write everywhere, or another user than root"
        )
    return without


def said_by(command: list[str], *arguments: str) -> str:
    run = subprocess.run(
        [*command, sys.executable, "-m", "hubplugin", *arguments],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1, run.stderr
    return run.stderr


@pytest.mark.slow
def test_a_folder_that_may_not_be_written_is_told_in_one_line_and_before_the_fit(
    url, tmp_path
):
    np.save(tmp_path / "bank.npy", BANK)
    before = lying(tmp_path)
    command = unprivileged(tmp_path / "store")
    said = said_by(
        command,
        "apply",
        url,
        "--bank",
        str(tmp_path / "bank.npy"),
        "--method",
        "csls",
        "--force",
    )
    assert "Permission denied" in said or "attempt to write a readonly database" in said
    assert said.count("\n") == 1, "the gallery was read"
    assert lying(tmp_path) == before
