"""Both ways in which an offset lies in a collection: as payload, and as one more dimension of a second vector."""

import numpy as np
import pytest
from qdrant_client import models

import hubplugin
from integration_tests.galleries import AGREED, LATER, QUERIES, K, assert_same, point_id

pytestmark = pytest.mark.needs("server")


def test_points_that_come_where_others_were_deleted_are_found(backend, fill, storage):
    gallery = fill(using="code")
    gallery.correct(storage)
    backend.client().delete(
        gallery.name, gallery.ids[:30], wait=True
    )  # whose vectors a server may go on counting
    fresh = [point_id(len(gallery.ids) + row) for row in range(10)]
    gallery.insert(fresh, LATER[:10])
    for key, points in zip(
        fresh, gallery.search(backend.wrapped(), queries=LATER[:10]), strict=True
    ):
        assert key in [point.id for point in points]


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
        vectors = backend.client().get_collection(gallery.name).config.params.vectors
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
    exact = models.SearchParams(exact=True)
    assert (
        gallery.agreement(hub, model, search_params=exact) >= AGREED
    )  # codes do not count
    raw = gallery.agreement(gallery.store().search(QUERIES, K, raw=True).ids, None)
    assert gallery.agreement(hub, model) >= raw - 0.03  # by the codes and the graph


def test_a_second_vector_beside_an_unnamed_one_disturbs_no_plain_client(backend, fill):
    backend.require((1, 18), "a second vector in place")
    gallery = fill(graph=True)
    client, before = backend.client(), gallery.content()
    model = gallery.correct("vector")
    assert gallery.agreement(backend.wrapped(), model) >= 0.97
    assert (
        gallery.agreement(gallery.store().search(QUERIES, K, raw=True).ids, None)
        >= 0.97
    )
    fresh = point_id(len(gallery.ids))
    client.upsert(gallery.name, [gallery.point(fresh, LATER[0])], wait=True)
    assert gallery.health()[1] == 1
    backend.wrapped().upsert(gallery.name, [gallery.point(fresh, LATER[1])], wait=True)
    assert gallery.health()[1] == 0
    client.delete(gallery.name, [fresh], wait=True)
    hubplugin.remove(gallery.store())
    assert_same(gallery.content(), before)
    assert set(client.get_collection(gallery.name).config.params.vectors) == {""}
