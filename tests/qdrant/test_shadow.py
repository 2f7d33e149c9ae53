"""A share of the searches corrected, shadow searches, and the switch: what applications and their logs see."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from qdrant_client import AsyncQdrantClient, models

import hubplugin_qdrant
from hubplugin.errors import InputError, StoreError
from hubplugin_qdrant import AsyncHubQdrantClient, HubQdrantClient, QdrantStore, ShadowedSearch
from hubplugin_qdrant.requests.share import falls_within
from hubplugin_qdrant.shadow import WAITING
from tests.qdrant.conftest import ROWS

PATIENCE = 20.0


def ids(response):
    return [point.id for point in response.points]


def raw_ids(photos, query):
    return ids(photos.plain.query_points("photos", query, photos.using or None))


class Seen(list):
    """A hook that keeps what it gets, and waits for as many as were expected."""

    def __init__(self):
        self.more = threading.Condition()

    def __call__(self, found):
        with self.more:
            self.append(found)
            self.more.notify_all()

    def wait(self, count):
        with self.more:
            assert self.more.wait_for(lambda: len(self) >= count, PATIENCE), f"{len(self)} of {count} came"


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_shadow_finds_what_the_other_way_would_have_answered(by_sync_client, share):
    photos, seen = by_sync_client, Seen()
    photos.apply()
    client = photos.wrapped(share=share, shadow=seen)
    answered = [ids(client.query_points("photos", query, photos.using or None)) for query in photos.queries]
    seen.wait(len(photos.queries))
    for query, answer, found in zip(photos.queries, answered, seen, strict=True):
        assert [*found.raw] == raw_ids(photos, query)
        assert [*found.corrected] == photos.best(query)
        assert answer == [*(found.corrected if share else found.raw)]
        assert (found.collection, found.answered) == ("photos", "corrected" if share else "raw")


@pytest.mark.parametrize(
    ("raw", "corrected", "overlap", "first_changed"),
    [((1, 2, 3), (2, 1, 3), 1.0, True), ((1, 2), (1, 4), 0.5, False), ((), (), 1.0, False), ((), (1, 2), 0.0, True)],
)
def test_overlap_and_first_place_of_a_shadowed_search(raw, corrected, overlap, first_changed):
    found = ShadowedSearch("photos", "raw", raw, corrected)
    assert (found.overlap, found.first_changed) == (overlap, first_changed)


def test_a_batch_and_groups_have_their_shadows_and_uncorrectable_searches_none(cosine):
    seen = Seen()
    cosine.apply()
    client = cosine.wrapped(share=0.0, shadow=seen)
    nearest = models.QueryRequest(query=cosine.queries[0].tolist(), limit=5)
    ordered = models.QueryRequest(query=models.SampleQuery(sample=models.Sample.RANDOM))
    client.query_points("photos")
    client.query_batch_points("photos", [nearest, ordered, nearest])
    client.query_points_groups("photos", "colour", query=cosine.queries[1], limit=3)
    seen.wait(3)
    time.sleep(0.1)
    assert len(seen) == 3
    assert [*seen[0].corrected] == [*seen[1].corrected] == cosine.best(cosine.queries[0], 5)
    assert {*seen[2].raw} == {*seen[2].corrected} == {"red", "green", "blue"}


def test_a_shadow_is_logged_and_one_that_fails_is_one_line_and_no_error(cosine, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "hubplugin")
    cosine.apply()
    failed = threading.Event()

    def fails(found):
        failed.set()
        raise ValueError("the hook\nis broken")

    client = cosine.wrapped(shadow=fails)
    assert ids(client.query_points("photos", cosine.queries[0])) == cosine.best(cosine.queries[0])
    assert failed.wait(PATIENCE)
    client.query_points("photos", cosine.queries[1])

    def of_shadows():
        return [record.getMessage() for record in caplog.records if record.name == "hubplugin.shadow"]

    assert _eventually(lambda: len(of_shadows()) == 4)
    first, failure = of_shadows()[:2]
    assert first.startswith("photos: answered corrected, overlap ")
    assert failure == "a shadow search failed: ValueError: the hook is broken"


def test_no_search_waits_for_a_shadow_and_what_is_too_much_is_counted(cosine, caplog):
    cosine.apply()
    go, seen = threading.Event(), Seen()

    def slow(found):
        go.wait(PATIENCE)
        seen(found)

    client = cosine.wrapped(shadow=slow)
    requests = WAITING + 20
    for number in range(requests):
        client.query_points("photos", cosine.queries[number % 20], limit=1)
    go.set()
    seen.wait(WAITING)
    assert _eventually(lambda: len(seen) + seen[-1].dropped == requests)
    assert len(seen) <= WAITING + 1  # one was in work
    assert sum("wait for their shadow" in record.getMessage() for record in caplog.records) == 1


def test_a_closed_client_asks_no_more_and_complains_of_nothing(cosine, caplog):
    cosine.apply()
    begun, go, seen = threading.Event(), threading.Event(), Seen()

    def slow(found):
        begun.set()
        go.wait(PATIENCE)
        seen(found)

    client = HubQdrantClient.wrap(cosine.plain, shadow=slow)
    for query in cosine.queries:
        client.query_points("photos", query)
    assert begun.wait(PATIENCE)
    client.close()
    go.set()
    seen.wait(1)
    time.sleep(0.1)
    assert (len(seen), caplog.messages) == (1, [])


def test_a_client_that_goes_takes_its_thread_along(cosine):
    cosine.apply()
    seen = Seen()
    client = cosine.wrapped(shadow=seen)
    before = threading.active_count()
    client.query_points("photos", cosine.queries[0])
    seen.wait(1)
    assert threading.active_count() == before + 1
    del client
    assert _eventually(lambda: threading.active_count() == before)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_async_client_compares_in_a_task_of_its_loop(cosine, share):
    cosine.apply()
    seen = Seen()

    async def searched():
        plain = AsyncQdrantClient(":memory:")
        plain._client.collections = cosine.plain._client.collections
        client = AsyncHubQdrantClient.wrap(plain, oversampling=ROWS / 10, share=share, shadow=seen)
        answers = await asyncio.gather(*(client.query_points("photos", query) for query in cosine.queries))
        while len(seen) < len(answers):
            await asyncio.sleep(0.01)
        return [ids(answer) for answer in answers]

    answers = asyncio.run(asyncio.wait_for(searched(), PATIENCE))
    for query, answer, found in zip(cosine.queries, answers, seen, strict=True):
        assert [*found.raw] == raw_ids(cosine, query)
        assert [*found.corrected] == cosine.best(query)
        assert answer == [*(found.corrected if share else found.raw)]


def _eventually(holds):
    deadline = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


# -- a share of the traffic ------------------------------------------------------------------------------------------


def test_a_share_of_the_queries_is_answered_corrected_in_a_batch_as_alone(photos):
    photos.apply()
    client = photos.wrapped(share=0.5)
    requests = [models.QueryRequest(query=query.tolist(), using=photos.using or None) for query in photos.queries]
    picked = [falls_within(request, 0.5) for request in requests]
    assert 3 < sum(picked) < 17
    answers = [ids(found) for found in client.query_batch_points("photos", requests)]
    for query, answer, corrected in zip(photos.queries, answers, picked, strict=True):
        assert answer == (photos.best(query) if corrected else raw_ids(photos, query))
        assert ids(client.query_points("photos", query, photos.using or None)) == answer


vectors = st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=8)


@given(vectors, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_keeps_what_a_smaller_one_picked(vector, one, other):
    request = models.QueryRequest(query=vector)
    smaller, larger = sorted((one, other))
    assert falls_within(request, larger) or not falls_within(request, smaller)
    elsewhere = models.QueryRequest(query=np.float32(vector).tolist(), limit=3, offset=20, using="image")
    assert falls_within(request, one) == falls_within(elsewhere, one)


def test_a_share_picks_about_as_many_queries_as_it_says(rng):
    requests = [models.QueryRequest(query=row.tolist()) for row in rng.normal(size=(4000, 8))]
    for share in (0.0, 0.1, 0.6, 1.0):
        picked = sum(falls_within(request, share) for request in requests)
        assert abs(picked - 4000 * share) < 4 * np.sqrt(4000 * share * (1 - share)) + 1


def test_the_prefetches_of_a_fusion_decide_for_the_whole_request(rng):
    def fused(vector):
        return models.QueryRequest(
            prefetch=[models.Prefetch(query=vector.tolist())], query=models.FusionQuery(fusion=models.Fusion.RRF)
        )

    assert 20 < sum(falls_within(fused(row), 0.5) for row in rng.normal(size=(80, 8))) < 60


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(InputError, match="share of searches to correct, from 0 to 1"):
        HubQdrantClient(":memory:", share=share)


# -- the switch ------------------------------------------------------------------------------------------------------


def test_a_switch_turns_every_client_raw_and_back_and_hides_what_is_ours(photos):
    running, query = photos.apply(), photos.queries[0]
    using = photos.using or None
    assert ids(running.query_points("photos", query, using)) == photos.best(query)
    hubplugin_qdrant.switch(photos.plain, "photos", on=False, using=photos.using)
    running._corrections.forget()  # what 10 seconds do
    for client in (running, photos.wrapped(shadow=pytest.fail)):
        found = client.query_points("photos", query, using, with_payload=True, with_vectors=True)
        assert ids(found) == raw_ids(photos, query)
        assert all(set(point.payload) == {"n", "colour"} for point in found.points)
        assert not any(isinstance(point.vector, dict) and "hub_v1" in point.vector for point in found.points)
    store = QdrantStore(photos.plain, "photos", photos.using)
    assert store.notes()[0].startswith("switched off")
    np.testing.assert_equal(store.search([query], 1).ids, [photos.best(query, 1)])  # so that it can be looked at
    hubplugin_qdrant.switch(photos.plain, "photos", on=True, using=photos.using)
    running._corrections.forget()
    assert ids(running.query_points("photos", query, using)) == photos.best(query)
    assert "switched off" not in "".join(store.notes())


def test_what_is_written_while_the_switch_is_off_has_its_offset_afterwards(photos):
    client = photos.apply()
    hubplugin_qdrant.switch(photos.plain, "photos", on=False, using=photos.using)
    client._corrections.forget()
    before = photos.stored(7)
    client.upsert("photos", [photos.point(7, photos.gallery[7])])
    for name, value in before.items():
        assert photos.stored(7)[name] == pytest.approx(value, abs=1e-6)


def test_the_switch_stays_off_through_another_fit_and_goes_with_the_correction(cosine):
    cosine.apply()
    hubplugin_qdrant.switch(cosine.plain, "photos", on=False)
    client = cosine.apply(method="nnn", k=4)
    assert ids(client.query_points("photos", cosine.queries[0])) == raw_ids(cosine, cosine.queries[0])
    hubplugin_qdrant.remove(cosine.plain, "photos")
    client = cosine.apply()
    assert ids(client.query_points("photos", cosine.queries[0])) == cosine.best(cosine.queries[0])


def test_a_collection_without_a_correction_has_no_switch(cosine):
    with pytest.raises(StoreError, match="no correction to switch"):
        hubplugin_qdrant.switch(cosine.plain, "photos", on=False)
