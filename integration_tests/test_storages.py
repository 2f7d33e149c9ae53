"""Both ways in which an offset lies in a collection: as payload, and as one more dimension of a second vector."""

import numpy as np
import pytest
from qdrant_client import models

import hubplugin
import hubplugin_qdrant
from integration_tests.galleries import AGREED, APPLY, BANK, LATER, QUERIES, K, assert_same, point_id
from integration_tests.waiting import wait_until
from tests.qdrant.conftest import apply_to


def test_either_storage_corrects_is_kept_up_and_is_removed_without_a_trace(backend, fill, storage):
    gallery = fill(using="code")
    before, client = gallery.content(), backend.client()
    given = {"vector": "code", "storage": storage}
    model = apply_to(client, gallery.name, BANK, **given, **APPLY).model
    assert gallery.agreement(gallery.found(backend.wrapped()), model) >= AGREED

    ids, vectors = gallery.ids, gallery.vectors
    fresh = [point_id(len(ids) + row) for row in range(len(LATER))]
    gallery.insert(fresh, LATER)
    gallery.ids, gallery.vectors = ids + fresh, np.concatenate([vectors, LATER])
    found = gallery.found(backend.wrapped())
    assert set(fresh) & {key for line in found for key in line}
    assert gallery.health() == (len(gallery.ids), len(LATER), 0)
    hubplugin.refresh(hubplugin_qdrant.open_store(client, gallery.name, vector="code"))
    assert gallery.agreement(gallery.found(backend.wrapped()), model) >= AGREED

    client.delete(gallery.name, fresh, wait=True)
    gallery.ids, gallery.vectors = ids, vectors
    hubplugin.remove(hubplugin_qdrant.open_store(client, gallery.name, vector="code"))
    assert_same(gallery.content(), before)
    assert gallery.agreement(gallery.found(backend.wrapped()), None) == 1


def test_points_that_come_where_others_were_deleted_are_found(backend, fill, storage):
    gallery = fill(using="code")
    client = backend.client()
    apply_to(client, gallery.name, BANK, vector="code", storage=storage, **APPLY)
    client.delete(gallery.name, gallery.ids[:30], wait=True)  # whose vectors a server may go on counting
    fresh = [point_id(len(gallery.ids) + row) for row in range(10)]
    gallery.insert(fresh, LATER[:10])
    hub = backend.wrapped()
    for key, vector in zip(fresh, LATER, strict=False):
        assert key in [point.id for point in hub.query_points(gallery.name, vector, "code", limit=K).points]


def test_a_collection_of_float16_is_corrected_and_stays_so(backend, fill, storage):
    gallery, client = fill(using="code", vector={"datatype": models.Datatype.FLOAT16}), backend.client()
    model = apply_to(client, gallery.name, BANK, storage=storage, **APPLY).model
    assert gallery.health()[1:] == (0, 0)
    assert gallery.agreement(gallery.found(backend.wrapped()), model) >= AGREED - 0.01


@pytest.mark.needs("server")
def test_a_collection_of_four_bits_is_corrected_in_payloads_and_stays_so(backend, fill):
    backend.require((1, 19), "vectors of 4 bits")
    gallery = fill(using="code", vector={"datatype": models.Datatype("turbo4")})
    before, store = gallery.content(), gallery.store()
    assert store.storage == "payload"
    model = hubplugin.apply(store, BANK, **APPLY).model
    assert gallery.health()[1:] == (0, 0)
    gallery.vectors = np.array([before[key][0]["code"] for key in gallery.ids], np.float32)  # as they are kept
    assert gallery.agreement(gallery.found(backend.wrapped()), model) >= AGREED - 0.02
    hubplugin.remove(gallery.store())
    assert_same(gallery.content(), before)


@pytest.mark.needs("server")
def test_a_second_vector_beside_four_bits_has_sixteen(backend, fill):
    backend.require((1, 19), "vectors of 4 bits")
    gallery, client = fill(using="code", vector={"datatype": models.Datatype("turbo4")}), backend.client()
    model = hubplugin.apply(gallery.store("vector"), BANK, **APPLY).model
    assert client.get_collection(gallery.name).config.params.vectors["hub_v1"].datatype == models.Datatype.FLOAT16
    assert gallery.health()[1:] == (0, 0)
    kept = gallery.content()
    gallery.vectors = np.array([kept[key][0]["code"] for key in gallery.ids], np.float32)
    assert gallery.agreement(gallery.found(backend.wrapped()), model) >= AGREED - 0.02


QUANTISED = {
    "scalar": models.ScalarQuantization(scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8)),
    "product": models.ProductQuantization(
        product=models.ProductQuantizationConfig(compression=models.CompressionRatio.X4)
    ),
    "binary": models.BinaryQuantization(binary=models.BinaryQuantizationConfig(always_ram=True)),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_the_offsets_of_a_quantised_collection_keep_their_weight(backend, fill, storage, kind):
    gallery = fill(using="code", graph="graph" in backend.can, quantization_config=QUANTISED[kind])
    given = {"vector": "code", "storage": storage}
    model = apply_to(backend.client(), gallery.name, BANK, **given, **APPLY).model
    exact = gallery.found(backend.wrapped(), search_params=models.SearchParams(exact=True))
    assert gallery.agreement(exact, model) >= AGREED  # codes do not count
    raw = gallery.agreement(gallery.store().search(QUERIES, K, raw=True).ids, None)
    assert gallery.agreement(gallery.found(backend.wrapped()), model) >= raw - 0.03  # by the codes and the graph


@pytest.mark.needs("graph")
def test_either_storage_reaches_the_recall_of_the_raw_graph(backend, fill, storage):
    gallery = fill(using="code", graph=True)
    given = {"vector": "code", "storage": storage}
    model = apply_to(backend.client(), gallery.name, BANK, **given, **APPLY).model
    wait_until(gallery.indexed)
    raw = gallery.agreement(gallery.store().search(QUERIES, K, raw=True).ids, None)
    assert gallery.agreement(gallery.found(backend.wrapped()), model) >= raw - 0.02


@pytest.mark.needs("server")  # local mode takes no unnamed vector beside a named one
def test_a_second_vector_beside_an_unnamed_one_disturbs_no_plain_client(backend, fill):
    backend.require((1, 18), "a second vector in place")
    gallery = fill(graph="graph" in backend.can)
    client, before = backend.client(), gallery.content()
    model = apply_to(client, gallery.name, BANK, storage="vector", **APPLY).model
    assert gallery.agreement(gallery.found(backend.wrapped()), model) >= 0.97
    assert gallery.agreement(gallery.store().search(QUERIES, K, raw=True).ids, None) >= 0.97
    fresh = point_id(len(gallery.ids))
    client.upsert(gallery.name, [models.PointStruct(id=fresh, vector=LATER[0].tolist())], wait=True)
    assert gallery.health()[1] == 1
    backend.wrapped().upsert(gallery.name, [models.PointStruct(id=fresh, vector=LATER[1].tolist())], wait=True)
    assert gallery.health()[1] == 0
    client.delete(gallery.name, [fresh], wait=True)
    hubplugin.remove(hubplugin_qdrant.open_store(client, gallery.name))
    assert_same(gallery.content(), before)
    assert set(client.get_collection(gallery.name).config.params.vectors) == {""}
