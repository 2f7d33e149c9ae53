"""`hubplugin explain` as it is typed."""

import json

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import apply
from tests.commands import asked, complains, typed
from tests.galleries import flat_index

pytestmark = pytest.mark.slow

DIM = 6
URL = "qdrant-local:local/photos"


@pytest.fixture(autouse=True)
def made(tmp_path, monkeypatch):
    """A corrected collection in local mode, and a file of queries."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    client = QdrantClient(path="local")
    client.create_collection(
        "photos", models.VectorParams(size=DIM, distance=models.Distance.COSINE)
    )
    client.upload_collection("photos", rng.normal(size=(120, DIM)), wait=True)
    store = hubplugin_qdrant.open_store(client, "photos")
    apply(store, rng.normal(size=(120, DIM)), "is", force=True)
    client.close()
    np.save("queries.npy", rng.normal(size=(3, DIM)))


def test_explain_prints_a_request_to_paste_for_a_file_or_the_first_point():
    first = np.load("queries.npy")[0]
    for words in (["--vector", "queries.npy"], []):
        printed = typed("explain", URL, *words)
        request = "http://localhost:6333/collections/photos/points/query"
        assert printed.startswith(f"curl -X POST {request}")
        body = json.loads(printed.split("-d '")[1].split("'\n")[0])
        query = body["prefetch"][0]["query"]
        assert np.allclose(query, first) == bool(words)
        assert len(query) == DIM
    request = asked("explain", URL)["request"]
    assert request["method"] == "POST"
    assert request["path"] == "/collections/photos/points/query"


def test_what_explain_cannot_say_is_one_line():
    np.save("other.npy", np.ones((3, DIM + 1)))
    said = "--vector has 7 dimensions, qdrant-local:"
    complains("explain", URL, "--vector", "other.npy", said=said)
    complains("explain", flat_index("photos.faiss", np.eye(DIM)), said="")
