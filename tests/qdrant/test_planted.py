"""Vectors that somebody planted in a collection: robust corrections, quarantine."""

from __future__ import annotations

import numpy as np
import pytest

import hubplugin
import hubplugin_qdrant
from hubplugin import InputError, StoreError
from hubplugin.jobs.versions import quarantine
from tests.qdrant.conftest import Photos

PLANTED = 900


def robust(photos: Photos):
    return photos.apply(robust=True)


def planted(photos: Photos, **payload):
    """The point that lies nearest to the whole bank."""
    return photos.point(PLANTED, photos.bank.mean(axis=0), **payload)


def found_by(client, photos: Photos, key: int) -> int:
    """How many bank queries find the point `key`."""
    answers = [
        client.query_points("photos", query=q.tolist(), using=photos.using or None, limit=10) for q in photos.bank[::10]
    ]
    return sum(key in {point.id for point in answer.points} for answer in answers)


def test_what_a_plain_client_wrote_is_not_found_before_a_refresh_has_scored_it(photos):
    client = robust(photos)
    assert photos.version.missing < -0.1
    photos.plain.upsert("photos", [planted(photos)])
    client = photos.wrapped()
    assert found_by(client, photos, PLANTED) == 0
    report = hubplugin.inspect(hubplugin_qdrant.open_store(photos.plain, "photos", vector=photos.using))
    assert report.missing == 1
    assert report.missing_ids == [PLANTED]
    assert hubplugin.refresh(hubplugin_qdrant.open_store(photos.plain, "photos", vector=photos.using)).missing == 1
    assert found_by(photos.wrapped(), photos, PLANTED) <= 1


def test_a_forged_offset_counts_as_none_and_is_named_by_the_next_inspection(cosine):
    client = robust(cosine)
    cosine.plain.upsert("photos", [planted(cosine, hub_offset={f"v{cosine.version.number}": 5.0})])
    assert found_by(client, cosine, PLANTED) == 0
    assert hubplugin.inspect(hubplugin_qdrant.open_store(cosine.plain, "photos")).stale_ids == [PLANTED]
    hubplugin.refresh(hubplugin_qdrant.open_store(cosine.plain, "photos"))
    assert hubplugin.inspect(hubplugin_qdrant.open_store(cosine.plain, "photos"), queries=0).stale == 0


def test_a_wrapped_client_gives_a_newcomer_the_bounded_offset(photos):
    client = robust(photos)
    client.upsert("photos", [planted(photos)])
    assert found_by(client, photos, PLANTED) <= 1
    assert (
        hubplugin.inspect(hubplugin_qdrant.open_store(photos.plain, "photos", vector=photos.using), queries=0).stale
        == 0
    )


@pytest.mark.slow
def test_members_are_not_stale_beside_newcomers(photos):
    robust(photos)
    assert (
        hubplugin.inspect(hubplugin_qdrant.open_store(photos.plain, "photos", vector=photos.using), queries=0).stale
        == 0
    )


@pytest.mark.slow
def test_what_is_in_quarantine_is_not_found_until_it_is_let_out(photos):
    client = photos.apply(robust=True)
    store = hubplugin_qdrant.open_store(photos.plain, "photos", vector=photos.using)
    best = client.query_points("photos", query=photos.bank[0].tolist(), using=photos.using or None).points[0].id
    assert found_by(client, photos, best) > 0
    quarantine(store, "add", [best], "looks planted", who="anna")
    assert found_by(photos.wrapped(), photos, best) == 0
    assert (
        hubplugin.inspect(hubplugin_qdrant.open_store(photos.plain, "photos", vector=photos.using), queries=0).stale
        == 0
    )
    hubplugin.refresh(hubplugin_qdrant.open_store(photos.plain, "photos", vector=photos.using))
    photos.apply(robust=True, tau=0.07)
    assert found_by(photos.wrapped(), photos, best) == 0
    quarantine(store, "remove", [best], "it is a photo")
    listed = store.quarantined()
    assert not listed.last
    assert [(event.what, event.id, event.why) for event in listed.events] == [
        ("add", best, "looks planted"),
        ("remove", best, "it is a photo"),
    ]
    assert listed.events[0].who == "anna"
    assert photos.stored(best)


def test_what_cannot_be_put_into_quarantine_is_refused_in_one_line(cosine):
    store = hubplugin_qdrant.open_store(cosine.plain, "photos")
    with pytest.raises(StoreError, match="no active correction"):
        quarantine(store, "add", [1], "why")
    cosine.apply()
    with pytest.raises(InputError, match="no target with the id 12345"):
        quarantine(store, "add", [12345], "why")
    with pytest.raises(InputError, match="nothing in quarantine with the id 1"):
        quarantine(store, "remove", [1], "why")
    with pytest.raises(InputError, match="needs a reason"):
        quarantine(store, "add", [1], " ")
    assert not store.quarantined().events


def test_a_plain_correction_takes_a_list_too(cosine):
    client = cosine.apply()
    store = hubplugin_qdrant.open_store(cosine.plain, "photos")
    quarantine(store, "add", [3], "test\x1b[2J")
    assert found_by(client, cosine, 3) == 0
    assert store.quarantined().last[3].why == "test [2J"
    assert np.isfinite(store.count())
