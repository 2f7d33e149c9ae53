"""Both ways in which an offset lies in a collection: as payload, and as one more
dimension of a second vector."""

import json
import subprocess
import uuid

import numpy as np
import pytest
from qdrant_client import models

import hubplugin
from hubplugin.jobs.write import write
from integration_tests.galleries import (
    AGREED,
    EXACT,
    LATER,
    PAIRS,
    QUERIES,
    TARGETS,
    K,
    assert_same,
    exact_scores,
    ids_of,
    point_id,
)
from tests.galleries import assert_near
from tests.qdrant.conftest import widen
from tests.qdrant.test_other_clients import BLOCKS, QUERY, make_collection
from tests.qdrant.test_random_searches import (
    DISTANCES,
    Disturbed,
    World,
    check_random_searches,
)


@pytest.mark.parametrize("distance", DISTANCES, ids=lambda distance: distance.value)
def test_random_requests_find_what_the_definition_says_while_others_write(
    backend, storage, distance
):
    backend.require((1, 17), "a score threshold in a prefetch over a formula")
    name = f"hubplugin-test-{uuid.uuid4().hex[:12]}"
    client = Disturbed(**backend.address.options())
    try:
        world = World(client, distance, storage, name=name, by_server=True)
        check_random_searches(world)
    finally:
        for collection in (name, f"{name}--hub"):
            client.delete_collection(collection)
        client.close()


def test_points_that_come_where_others_were_deleted_are_found(backend, fill, storage):
    gallery = fill(using="code")
    gallery.correct(storage)
    # A server may go on counting the vectors of these.
    gallery.client.delete(gallery.name, gallery.ids[:30], wait=True)
    fresh = {point_id(300 + row): vector for row, vector in enumerate(LATER[:10])}
    points = [gallery.point(key, vector) for key, vector in fresh.items()]
    gallery.client.upsert(gallery.name, points, wait=True)
    found = ids_of(gallery.search(backend.wrapped(), queries=LATER[:10]))
    for key, line in zip(fresh, found, strict=True):
        assert key in line


@pytest.mark.parametrize("datatype", ["float16", "turbo4"])
def test_a_collection_of_few_bits_is_corrected_and_stays_so(
    backend, fill, storage, datatype
):
    """A second vector has sixteen bits a number."""
    if datatype == "turbo4":
        backend.require((1, 19), "vectors of 4 bits")
    gallery = fill(using="code", vector={"datatype": models.Datatype(datatype)})
    before = gallery.content()
    stored = [before[key][0]["code"] for key in gallery.ids]
    gallery.vectors = np.array(stored, np.float32)
    model = gallery.correct(storage)
    if storage == "vector":
        vectors = gallery.client.get_collection(gallery.name).config.params.vectors
        assert vectors["hub_v1"].datatype == models.Datatype.FLOAT16
    assert gallery.health()[1:] == (0, 0)
    assert gallery.agreement(backend.wrapped(), model) >= AGREED - 0.02
    hubplugin.remove(gallery.store())
    assert_same(gallery.content(), before)


QUANTISED = {
    "none": None,
    "scalar": models.ScalarQuantization(
        scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8)
    ),
    "product": models.ProductQuantization(
        product=models.ProductQuantizationConfig(compression=models.CompressionRatio.X4)
    ),
    "binary": models.BinaryQuantization(
        binary=models.BinaryQuantizationConfig(always_ram=True)
    ),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_graph_with_or_without_codes_finds_as_much_as_raw(
    backend, fill, storage, kind
):
    gallery = fill(using="code", graph=True, quantization_config=QUANTISED[kind])
    model, hub = gallery.correct(storage), backend.wrapped()
    # Codes do not count in exact searches.
    assert gallery.agreement(hub, model, search_params=EXACT) >= AGREED
    raw = gallery.agreement(gallery.found(raw=True), None)
    assert gallery.agreement(hub, model) >= raw - 0.03  # by the codes and the graph


@pytest.fixture(scope="module")
def mapped():
    """A default model with the map that 2,500 pairs teach."""
    return hubplugin.fit(TARGETS, PAIRS, learn=True)


def test_a_graph_and_an_exact_search_find_by_the_mapped_query(
    backend, fill, storage, mapped
):
    gallery = fill(using="code", graph=True)
    write(gallery.store(storage), mapped)
    raw = gallery.agreement(gallery.found(raw=True), None)
    assert gallery.agreement(gallery.found(), mapped) >= raw - 0.02
    widen(gallery.store(), len(gallery.ids) / K)
    best = -np.sort(-exact_scores(QUERIES, gallery.vectors, mapped), axis=1)[:, :K]
    for queries in (QUERIES, 2 * QUERIES):
        found = gallery.search(backend.wrapped(), queries, search_params=EXACT)
        given = [[point.score for point in points] for points in found]
        # What float32 loses of an offset, a sum over the bank, is most of it.
        assert_near(given, best)


def test_a_second_vector_beside_an_unnamed_one_disturbs_no_plain_client(backend, fill):
    backend.require((1, 18), "a second vector in place")
    gallery = fill(graph=True)
    client, hub, before = backend.client(), backend.wrapped(), gallery.content()
    model = gallery.correct("vector")
    assert gallery.agreement(hub, model) >= 0.97
    assert gallery.agreement(gallery.found(raw=True), None) >= 0.97
    fresh = point_id(len(gallery.ids))
    for writer, missing in ((client, 1), (hub, 0)):
        writer.upsert(gallery.name, [gallery.point(fresh, LATER[missing])], wait=True)
        assert gallery.health()[1] == missing
    client.delete(gallery.name, [fresh], wait=True)
    hubplugin.remove(gallery.store())
    assert_same(gallery.content(), before)
    assert set(client.get_collection(gallery.name).config.params.vectors) == {""}


def test_the_curl_blocks_of_the_page_find_what_the_wrapped_client_finds(
    backend, storage
):
    """docs/other-clients.md as somebody pastes it."""
    name = f"curl-{storage}"
    hub = backend.wrapped()

    def curl(block):
        """Return what `block` gets from the server, of the collection `name`."""
        place = backend.address.root.removeprefix("http://")
        block = block.replace("localhost:6333", place).replace("/photos", f"/{name}")
        command = ["bash", "-c", f"{block.strip()} --silent --show-error"]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)["result"]

    try:
        make_collection(backend.client(), name, "image", storage)
        block = BLOCKS[storage == "vector"]
        found = curl(block.replace('"limit": 40', '"limit": 40, "using": "image"'))
        wrapped = hub.query_points(name, QUERY, "image").points
        assert [point["id"] for point in found["points"]] == [p.id for p in wrapped]
        (manifest,) = curl(BLOCKS[2])
        assert manifest["payload"]["active"]["image"]["storage"] == storage
    finally:
        hub.delete_collection(name)
