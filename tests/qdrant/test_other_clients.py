"""The requests that `explain` and docs/other-clients.md print are the client's."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import StoreError
from tests.qdrant.conftest import (
    COSINE,
    EUCLID,
    apply_to,
    ids,
    named,
    served,
    set_constants,
)

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "other-clients.md").read_text()
PROGRAMS = sorted((ROOT / "examples" / "other_clients").iterdir())
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
PAYLOAD, VECTOR, MANIFEST = (
    json.loads(block.split("-d '")[1].rsplit("'", 1)[0]) for block in BLOCKS
)
QUERY = [0.5, 0.5, 0.5, 0.5]


def make_collection(client, name, using, storage):
    """Make a corrected collection of 4 dimensions, searched with the constants of the
    page."""
    rng = np.random.default_rng(5)
    parameters = models.VectorParams(size=4, distance=COSINE)
    client.create_collection(name, named(using, parameters))
    vectors = rng.normal(size=(200, 4))
    client.upload_collection(name, named(using, vectors), wait=True)
    bank = rng.normal(size=(120, 4)) + 0.5
    given = {"method": "is", "force": True, "storage": storage}
    apply_to(client, name, bank, vector=using, **given)
    store = hubplugin_qdrant.open_store(client, name, vector=using)
    set_constants(store, oversampling=4.0, hnsw_ef=160)


@pytest.mark.filterwarnings("ignore:.*search_params:UserWarning")
def test_the_printed_request_finds_what_the_wrapped_client_finds(photos):
    client, store = photos.corrected(), photos.store()
    for query in (*photos.queries[:3], 7):
        explained = store.explain(query, 5)
        request = models.QueryRequest.model_validate(explained.request["body"])
        found = photos.plain.query_batch_points("photos", [request])[0].points
        expected = photos.search(client, query, limit=5).points
        assert ids(found) == ids(expected)
        assert all("hub_offset" not in point.payload for point in found)
        printed = explained.text.split("-d '")[1].removesuffix("'")
        assert json.loads(printed) == explained.request["body"]
        if photos.distance is EUCLID:
            distances = np.sqrt(-2 * np.array([point.score for point in found]))
            wanted = [point.score for point in expected]
            np.testing.assert_allclose(distances, wanted, rtol=1e-5)


def test_the_command_names_the_server_and_never_the_key(cosine, monkeypatch):
    cosine.apply()
    command = cosine.store().explain(cosine.queries[0], 10).text
    place = "http://localhost:6333/collections/photos/points/query"
    assert command.startswith(f"curl -X POST {place}")
    assert "api-key" not in command
    monkeypatch.setenv("QDRANT_API_KEY", "secret")
    command = cosine.store().explain(cosine.queries[0]).text
    assert '"api-key: $QDRANT_API_KEY"' in command
    assert "secret" not in command


def test_without_a_correction_there_is_no_request_to_explain(cosine):
    with pytest.raises(StoreError, match="no correction is active"):
        cosine.store().explain(cosine.queries[0])


@pytest.mark.parametrize(
    ("using", "storage", "body"),
    [(None, "payload", PAYLOAD), ("image", "vector", VECTOR)],
)
def test_the_request_of_the_page_is_the_printed_one(using, storage, body):
    client = QdrantClient(":memory:")
    make_collection(client, "photos", using, storage)
    served(client)  # a server has codes to ignore
    store = hubplugin_qdrant.open_store(client, "photos", vector=using)
    assert store.explain(np.float32(QUERY)).request["body"] == body


def test_the_manifest_has_the_fields_that_the_page_names():
    client = QdrantClient(":memory:")
    make_collection(client, "photos", None, "payload")
    (manifest,) = client.retrieve("photos--hub", **MANIFEST)
    table = PAGE.split("| field | meaning |")[1].split("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.count("|") > 2]
    names = re.findall(r"`(\w+)`", " ".join(cells))
    assert len(names) == 10
    assert set(names) <= set(manifest.payload["active"][""])


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.suffix)
def test_each_language_uses_the_key_and_the_limits_of_the_curl_request(path):
    block = path.read_text()
    for constant in ("hub_offset.v1", "$score", "photos", "40", "10", "hub_offset"):
        assert constant in block
