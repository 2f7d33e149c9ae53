"""The requests in docs/other-clients.md are those that the wrapped client sends."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin_qdrant import HubQdrantClient
from tests.qdrant.conftest import apply_to, ids, served, set_constants

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "other-clients.md").read_text()
PROGRAMS = sorted((ROOT / "examples" / "other_clients").iterdir())
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
PAYLOAD, VECTOR, MANIFEST = (
    json.loads(block.split("-d '")[1].rsplit("'", 1)[0]) for block in BLOCKS
)
QUERY = [0.5, 0.5, 0.5, 0.5]


def photos(using: str, storage: str, **constants) -> QdrantClient:
    """A corrected collection of 4 dimensions, searched with the constants of the page."""
    client, rng = QdrantClient(":memory:"), np.random.default_rng(5)
    parameters = models.VectorParams(size=4, distance=models.Distance.COSINE)
    client.create_collection("photos", {using: parameters} if using else parameters)
    vectors = rng.normal(size=(200, 4))
    client.upload_collection("photos", {using: vectors} if using else vectors)
    bank = rng.normal(size=(120, 4)) + 0.5
    apply_to(
        client, "photos", bank, method="is", force=True, storage=storage, vector=using
    )
    store = hubplugin_qdrant.open_store(client, "photos", vector=using)
    set_constants(store, **constants)
    return client


def found(client: QdrantClient, body: dict) -> list[int]:
    request = models.QueryRequest(**body)
    return ids(client.query_batch_points("photos", [request])[0])


def test_the_request_over_payloads_is_the_one_that_explain_prints():
    client = photos("", "payload", oversampling=4.0)
    assert (
        hubplugin_qdrant.open_store(client, "photos")
        .explain(np.float32(QUERY))
        .request["body"]
        == PAYLOAD
    )
    wrapped = HubQdrantClient.wrap(client).query_points("photos", QUERY)
    raw = client.query_points("photos", QUERY)
    assert found(client, PAYLOAD) == ids(wrapped) != ids(raw)


@pytest.mark.filterwarnings("ignore:.*search_params:UserWarning")
def test_the_request_for_a_second_vector_is_the_one_that_explain_prints():
    client = photos("image", "vector", hnsw_ef=160)
    wrapped = HubQdrantClient.wrap(client)
    expected = ids(wrapped.query_points("photos", QUERY, "image"))
    assert found(client, VECTOR) == expected
    served(client)  # a server has codes to ignore
    store = hubplugin_qdrant.open_store(client, "photos", vector="image")
    assert store.explain(np.float32(QUERY)).request["body"] == VECTOR


def test_the_manifest_has_the_fields_that_the_page_names():
    client = photos("", "payload")
    (manifest,) = client.retrieve("photos--hub", **MANIFEST)
    table = PAGE.split("| field | is |")[1].split("\n\n")[0]
    names = re.findall(
        r"`(\w+)`",
        "\n".join(
            row.split("|")[1] for row in table.splitlines() if row.count("|") > 2
        ),
    )
    assert len(names) == 10
    assert set(names) <= set(manifest.payload["active"][""])


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.suffix)
def test_each_language_uses_the_key_and_the_limits_of_the_curl_request(path):
    block = path.read_text()
    for constant in ("hub_offset.v1", "$score", "photos", "40", "10", "hub_offset"):
        assert constant in block
