"""docs/other-clients.md as somebody pastes it: curl against a server."""

import json
import subprocess

import numpy as np
import pytest
from qdrant_client import models

import hubplugin_qdrant
from tests.qdrant.conftest import apply_to, set_constants
from tests.qdrant.test_other_clients import BLOCKS, QUERY

pytestmark = pytest.mark.needs("server")


def test_the_curl_blocks_of_the_page_find_what_the_wrapped_client_finds(
    backend, storage
):
    client, rng, name = backend.client(), np.random.default_rng(5), f"curl-{storage}"
    client.create_collection(
        name, {"image": models.VectorParams(size=4, distance=models.Distance.COSINE)}
    )
    try:
        client.upload_collection(name, {"image": rng.normal(size=(200, 4))}, wait=True)
        bank = rng.normal(size=(120, 4)) + 0.5
        apply_to(
            client, name, bank, method="is", force=True, storage=storage, vector="image"
        )
        set_constants(
            hubplugin_qdrant.open_store(client, name), oversampling=4.0, hnsw_ef=160
        )
        block = BLOCKS[storage == "vector"].replace(
            '"limit": 40', '"limit": 40, "using": "image"'
        )
        wrapped = backend.wrapped().query_points(name, QUERY, "image").points
        assert [point["id"] for point in curl(block, backend, name)["points"]] == [
            point.id for point in wrapped
        ]
        assert (
            curl(BLOCKS[2], backend, name)[0]["payload"]["active"]["image"]["storage"]
            == storage
        )
    finally:
        backend.wrapped().delete_collection(name)


def curl(block, backend, name):
    """What `block` gets from the server of `backend`, of the collection `name`."""
    address = backend.url(name).removeprefix("qdrant://").rpartition("/")[0]
    block = block.replace("localhost:6333", address).replace("/photos", f"/{name}")
    run = subprocess.run(
        ["bash", "-c", f"{block.strip()} --silent --show-error"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)["result"]
