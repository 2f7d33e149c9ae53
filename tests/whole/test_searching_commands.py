"""`hubplugin explain` as it is typed."""

import json

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import apply
from tests.galleries import flat_index
from tests.whole.commands import hubplugin

pytestmark = pytest.mark.slow

DIM = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A corrected collection in local mode, and a file of queries."""
    folder, rng = tmp_path_factory.mktemp("searching"), np.random.default_rng(1)
    client = QdrantClient(path=str(folder / "local"))
    client.create_collection(
        "photos", models.VectorParams(size=DIM, distance=models.Distance.COSINE)
    )
    client.upload_collection("photos", rng.normal(size=(120, DIM)), wait=True)
    apply(
        hubplugin_qdrant.open_store(client, "photos"),
        rng.normal(size=(120, DIM)),
        "is",
        force=True,
    )
    client.close()
    np.save(folder / "queries.npy", rng.normal(size=(3, DIM)))
    np.save(folder / "other.npy", rng.normal(size=(3, DIM + 1)))
    return folder


def typed(made, *arguments):
    return hubplugin("explain", f"qdrant-local:{made / 'local'}/photos", *arguments)


def test_explain_prints_a_request_to_paste_for_a_file_or_the_first_point(made):
    first = np.load(made / "queries.npy")[0]
    for arguments in (["--vector", made / "queries.npy"], []):
        printed = typed(made, *arguments)
        assert printed.returncode == 0, printed.stderr
        assert printed.stdout.startswith(
            "curl -X POST http://localhost:6333/collections/photos/points/query"
        )
        body = json.loads(printed.stdout.split("-d '")[1].split("'\n")[0])
        asked = body["prefetch"][0]["query"]
        assert np.allclose(asked, first) == bool(arguments)
        assert len(asked) == DIM
    request = json.loads(typed(made, "--json").stdout)["request"]
    assert request["method"] == "POST"
    assert request["path"] == "/collections/photos/points/query"


def test_what_explain_cannot_say_is_one_line(made, tmp_path):
    other = typed(made, "--vector", made / "other.npy")
    assert "--vector has 7 dimensions, qdrant-local:" in other.stderr
    url = flat_index(tmp_path / "photos.faiss", np.eye(DIM))
    faiss = hubplugin("explain", url)
    for said in (other, faiss):
        assert said.returncode == 1
        assert len(said.stderr.splitlines()) == 1
