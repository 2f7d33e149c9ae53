"""A correction that is switched off: every client searches raw, and nothing that is stored goes."""

from __future__ import annotations

import numpy as np
import pytest

import hubplugin
import hubplugin_qdrant
from hubplugin import StoreError

PATIENCE = 20.0


def ids(response):
    return [point.id for point in response.points]


def raw_ids(photos, query):
    return ids(photos.plain.query_points("photos", query, photos.using or None))


def test_a_switch_turns_every_client_raw_and_back_and_hides_what_is_ours(photos):
    running, query = photos.apply(), photos.queries[0]
    using = photos.using or None
    assert ids(running.query_points("photos", query, using)) == photos.best(query)
    hubplugin_qdrant.open_store(photos.plain, "photos", vector=photos.using).switch(False)
    running._corrections.forget()  # what 10 seconds do
    for client in (running, photos.wrapped()):
        found = client.query_points("photos", query, using, with_payload=True, with_vectors=True)
        assert ids(found) == raw_ids(photos, query)
        assert all(set(point.payload) == {"n", "colour"} for point in found.points)
        assert not any(isinstance(point.vector, dict) and "hub_v1" in point.vector for point in found.points)
    store = hubplugin_qdrant.open_store(photos.plain, "photos", vector=photos.using)
    assert store.notes()[0].startswith("switched off")
    np.testing.assert_equal(store.search([query], 1).ids, [photos.best(query, 1)])  # so that it can be looked at
    hubplugin_qdrant.open_store(photos.plain, "photos", vector=photos.using).switch(True)
    running._corrections.forget()
    assert ids(running.query_points("photos", query, using)) == photos.best(query)
    assert "switched off" not in "".join(store.notes())


def test_what_is_written_while_the_switch_is_off_has_its_offset_afterwards(photos):
    client = photos.apply()
    hubplugin_qdrant.open_store(photos.plain, "photos", vector=photos.using).switch(False)
    client._corrections.forget()
    before = photos.stored(7)
    client.upsert("photos", [photos.point(7, photos.gallery[7])])
    for name, value in before.items():
        assert photos.stored(7)[name] == pytest.approx(value, abs=1e-6)


def test_the_switch_stays_off_through_another_fit_and_goes_with_the_correction(cosine):
    cosine.apply()
    hubplugin_qdrant.open_store(cosine.plain, "photos").switch(False)
    client = cosine.apply(method="nnn", k=4)
    assert ids(client.query_points("photos", cosine.queries[0])) == raw_ids(cosine, cosine.queries[0])
    hubplugin.remove(hubplugin_qdrant.open_store(cosine.plain, "photos"))
    client = cosine.apply()
    assert ids(client.query_points("photos", cosine.queries[0])) == cosine.best(cosine.queries[0])


def test_a_collection_without_a_correction_has_no_switch(cosine):
    with pytest.raises(StoreError, match="no correction to switch"):
        hubplugin_qdrant.open_store(cosine.plain, "photos").switch(False)
