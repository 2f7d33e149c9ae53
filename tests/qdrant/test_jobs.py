"""The job on a collection that others read and write: how often it reads, and what is right when it ends."""

from __future__ import annotations

import threading
import time
import uuid

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import UnexpectedResponse
from tenacity import wait_fixed, wait_none

import hubplugin_qdrant
from hubplugin import StoreError
from hubplugin_qdrant import HubQdrantClient, QdrantStore
from hubplugin_qdrant.streams import Pace, Writers, in_order
from tests.qdrant.conftest import ROWS, Photos, clustered

NAMED = ("image", models.Distance.DOT)


@pytest.mark.parametrize("storage", ["payload", "vector"])
def test_points_that_come_change_and_go_during_a_run_are_right_afterwards(storage):
    photos = Photos(QdrantClient(":memory:"), *NAMED, storage)
    fresh = clustered(7, 3)
    events = {
        "reading the gallery": lambda: (
            photos.plain.delete("photos", [1]),
            photos.plain.upsert("photos", [photos.point(2, fresh[0])]),
        ),
        "writing offsets": lambda: (
            photos.plain.delete("photos", [3]),
            photos.plain.upsert("photos", [photos.point(500, fresh[1])]),
            photos.plain.update_vectors("photos", [models.PointVectors(id=4, vector={"image": fresh[2].tolist()})]),
        ),
    }
    photos.apply(progress=lambda what, done, total: events.pop(what, lambda: None)())
    assert not events
    report = hubplugin_qdrant.inspect(photos.plain, "photos")
    assert (report.count, report.missing, report.stale) == (ROWS - 1, 0, 0)


def test_a_quiet_collection_is_read_twice_once_for_the_fit_and_once_for_what_came_meanwhile(cosine, monkeypatch):
    read, scroll = [0], cosine.plain.scroll

    def counted(collection, **named):
        records, following = scroll(collection, **named)
        read[0] += len(records)
        return records, following

    monkeypatch.setattr(cosine.plain, "scroll", counted)
    cosine.apply()
    assert read[0] == 2 * ROWS


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect")
@pytest.mark.parametrize("storage", ["payload", "vector"])
def test_ranges_of_ids_that_are_read_side_by_side_leave_nothing_out(storage, monkeypatch):
    """As with a server: in local mode there is one range, and no thread."""
    photos = Photos(QdrantClient(":memory:"), *NAMED, storage)
    uuids = [photos.point(1000 + row, vector) for row, vector in enumerate(clustered(8, 40))]
    photos.plain.upsert("photos", [point.model_copy(update={"id": str(uuid.uuid4())}) for point in uuids])
    monkeypatch.setattr("hubplugin_qdrant.store.QdrantLocal", type("NoClient", (), {}))
    monkeypatch.setattr("hubplugin_qdrant.store.SCHEMA_SECONDS", 0)  # local mode makes no index
    monkeypatch.setattr("hubplugin_qdrant.store.BATCH", 7)
    monkeypatch.setattr("hubplugin_qdrant.store.PAGES_AHEAD", 2)
    store = QdrantStore(photos.plain, "photos")
    assert len(store._starts("photos")) > 2
    found = [point for batch in store.scan() for point in batch.ids]
    assert found == [record.id for record in photos.plain.scroll("photos", limit=1000)[0]]
    photos.apply()
    report = hubplugin_qdrant.inspect(photos.plain, "photos")
    assert (report.count, report.missing, report.stale) == (ROWS + 40, 0, 0)


@given(
    st.sets(st.integers(0, 200)),
    st.sets(st.integers(0, 200)),
    st.integers(1, 7),
    st.integers(1, 3),
    st.sampled_from([0, 3]),
)
def test_ranges_come_whole_and_in_order(ids, starts, page, ahead, threads):
    def read(start, stop):
        inside = sorted(one for one in ids if (start is None or one >= start) and (stop is None or one < stop))
        pages = [inside[first : first + page] for first in range(0, len(inside), page)]
        rest = pages[ahead:]
        return pages[:ahead], rest[0][0] if rest else None

    pages = list(in_order(read, [None, *sorted(starts)], threads))
    assert [one for found in pages for one in found] == sorted(ids)


def test_an_error_in_a_range_that_is_read_ahead_ends_the_reading():
    def read(start, stop):
        if start == 2:
            raise OSError("gone")
        return [start], None

    pages = in_order(read, [None, 1, 2, 3], 2)
    assert [next(pages), next(pages)] == [None, 1]
    with pytest.raises(OSError, match="gone"):
        next(pages)


def test_the_pace_grows_while_answers_are_quick_and_falls_when_they_are_not():
    pace = Pace(1000)
    for _ in range(3):
        pace.answered(pace.size, 0.1)
    assert pace.size == 1000
    pace.answered(1000, 1.0)
    assert pace.size == 1000
    pace.answered(1000, 10.0)
    pace.halve(1000)  # another of that size, under way at the time
    assert pace.size == 500


def test_what_a_writer_raises_comes_out_and_what_waits_is_finished_first():
    done, writers = [], Writers(2)

    def work():
        time.sleep(0.01)
        done.append(1)

    for _ in range(20):
        writers.submit(work)
    writers.settle()
    assert len(done) == 20
    writers.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writers.settle()


TOO_LARGE = b'{"status": {"error": "JSON payload (33554433 bytes) is larger than allowed (limit: 33554432 bytes)"}}'


@pytest.mark.parametrize(
    "error",
    [
        UnexpectedResponse(400, "Bad Request", TOO_LARGE, httpx.Headers()),
        UnexpectedResponse(413, "Payload Too Large", b"", httpx.Headers()),
        UnexpectedResponse(408, "Request Timeout", b"", httpx.Headers()),
    ],
    ids=lambda error: str(error.status_code),
)
def test_a_server_that_takes_only_small_requests_gets_small_ones(cosine, monkeypatch, error):
    update = cosine.plain.batch_update_points

    def small_only(collection, operations, **named):
        if len(operations) > 10:
            raise error
        return update(collection, operations, **named)

    monkeypatch.setattr(cosine.plain, "batch_update_points", small_only)
    monkeypatch.setattr("hubplugin_qdrant.store.RETRY_WAIT", wait_none())
    cosine.apply()
    assert hubplugin_qdrant.inspect(cosine.plain, "photos").missing == 0


def test_a_request_that_a_server_takes_in_no_size_ends_the_run_at_once(cosine, monkeypatch):
    def refused(*given, **named):
        raise UnexpectedResponse(413, "Payload Too Large", b"", httpx.Headers())

    monkeypatch.setattr(cosine.plain, "batch_update_points", refused)
    monkeypatch.setattr("hubplugin_qdrant.store.RETRY_WAIT", wait_none())
    with pytest.raises(StoreError, match="no request as large as one point"):
        cosine.apply()


def test_a_server_that_limits_the_rate_is_asked_again_when_it_said(cosine, monkeypatch):
    count, waits = cosine.plain.count, []

    def limited(*given, **named):
        if not waits:
            raise ResourceExhaustedResponse("too many requests", 7)
        return count(*given, **named)

    monkeypatch.setattr(cosine.plain, "count", limited)
    monkeypatch.setattr(QdrantStore, "_sleep", lambda store, seconds: waits.append(seconds))
    cosine.apply()
    assert waits[0] >= 7


def test_a_rate_of_reading_is_limited_by_requests_so_that_pages_stay_large(cosine, monkeypatch):
    scroll, asked = cosine.plain.scroll, []

    def limited(*given, **named):
        asked.append(named["limit"])
        if len(asked) < 5:
            raise ResourceExhaustedResponse("too many requests", 0)
        return scroll(*given, **named)

    monkeypatch.setattr(cosine.plain, "scroll", limited)
    monkeypatch.setattr("hubplugin_qdrant.store.RETRY_WAIT", wait_none())
    cosine.apply()
    assert min(asked) == asked[0] >= ROWS


def test_a_request_waits_its_turn_where_others_use_up_the_rate(cosine, monkeypatch):
    count, refusals = cosine.plain.count, iter(range(5))

    def limited(*given, **named):
        for _ in refusals:
            raise ResourceExhaustedResponse("too many requests", 0)
        return count(*given, **named)

    monkeypatch.setattr(cosine.plain, "count", limited)
    monkeypatch.setattr("hubplugin_qdrant.store.RETRY_WAIT", wait_none())
    monkeypatch.setattr("hubplugin_qdrant.store.RETRY_SECONDS", 0)
    cosine.apply()
    assert next(refusals, None) is None


def test_a_calibration_that_a_rate_is_limited_for_goes_on_with_the_request_that_was_refused(cosine, monkeypatch):
    twin = Photos(QdrantClient(":memory:"), "", models.Distance.COSINE)
    twin.apply()
    search, asked = cosine.plain._client.query_batch_points, []

    def limited(*given, **named):
        asked.append(given)
        if len(asked) % 2:
            raise ResourceExhaustedResponse("too many requests", 0)
        return search(*given, **named)

    monkeypatch.setattr(cosine.plain._client, "query_batch_points", limited)
    monkeypatch.setattr("hubplugin_qdrant.store.RETRY_WAIT", wait_none())
    cosine.apply()
    assert asked
    assert (cosine.version.oversampling, cosine.version.certain) == (twin.version.oversampling, twin.version.certain)


def test_an_interrupted_run_does_not_wait_for_a_server_that_is_away(cosine, monkeypatch):
    monkeypatch.setattr("hubplugin_qdrant.store.QdrantLocal", type("NoClient", (), {}))  # so that threads write
    tried = threading.Event()

    def away(*given, **named):
        tried.set()
        raise UnexpectedResponse(503, "Unavailable", b"", httpx.Headers())

    def interrupt(what, done, total):
        if what == "writing offsets":
            tried.wait()
            raise KeyboardInterrupt

    monkeypatch.setattr(cosine.plain, "batch_update_points", away)
    monkeypatch.setattr("hubplugin_qdrant.store.RETRY_WAIT", wait_fixed(600))
    with pytest.raises(KeyboardInterrupt):
        cosine.apply(progress=interrupt)


def test_a_run_that_another_has_taken_the_place_of_stops(cosine, monkeypatch):
    monkeypatch.setattr("hubplugin_qdrant.store.LEASE_SECONDS", 0.0)
    monkeypatch.setattr("hubplugin_qdrant.store.BATCH", 10)

    def taken(what, done, total):
        if what == "writing offsets":
            manifest = cosine.plain.retrieve("photos--hub", [0])[0].payload
            manifest["lease"]["owner"] = "another"
            cosine.plain.upsert("photos--hub", [models.PointStruct(id=0, vector={}, payload=manifest)])

    with pytest.raises(StoreError, match="another run has begun to write"):
        cosine.apply(progress=taken)
    raw = cosine.plain.query_points("photos", cosine.queries[0]).points
    shown = HubQdrantClient.wrap(cosine.plain).query_points("photos", cosine.queries[0]).points
    assert [(point.id, point.score) for point in shown] == [(point.id, point.score) for point in raw]


@pytest.mark.parametrize("taken", [False, True], ids=["kept", "taken"])
def test_a_run_that_is_held_up_keeps_its_lease_or_stops(cosine, monkeypatch, taken):
    monkeypatch.setattr("hubplugin_qdrant.store.LEASE_SECONDS", 0.8)
    update, left = cosine.plain.batch_update_points, []

    def held_up(*given, **named):
        manifest = cosine.plain.retrieve("photos--hub", [0])[0].payload
        if not left:
            left.append(time.time())
            if taken:
                manifest["lease"]["owner"] = "another"
                cosine.plain.upsert("photos--hub", [models.PointStruct(id=0, vector={}, payload=manifest)])
            raise ResourceExhaustedResponse("too many requests", 1)
        left.append(manifest["lease"]["until"] - time.time())
        return update(*given, **named)

    monkeypatch.setattr(cosine.plain, "batch_update_points", held_up)
    if taken:
        with pytest.raises(StoreError, match="another run has begun to write"):
            cosine.apply()
    else:
        cosine.apply()
        assert left[1] > 0


def test_a_run_that_was_cut_off_writes_only_what_lacks_its_offset(cosine, monkeypatch):
    monkeypatch.setattr("hubplugin_qdrant.store.BATCH", 10)

    def stop(what, done, total):
        if what == "writing offsets" and done >= ROWS // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cosine.apply(progress=stop)
    applied = hubplugin_qdrant.apply(cosine.plain, "photos", cosine.bank, **cosine.settings())
    assert (applied.scanned, applied.missing) == (ROWS, ROWS // 2)
    found = [record.payload["hub_offset"]["v1"] for record in cosine.plain.scroll("photos", limit=1000)[0]]
    np.testing.assert_allclose(found, cosine.model.offsets(cosine.gallery), rtol=0, atol=1e-6)


@pytest.mark.parametrize("payload", [None, {}])
def test_a_point_written_without_payload_keeps_what_a_server_keeps_of_it(cosine, monkeypatch, payload):
    """Up to 1.14 the payload that was there (by gRPC also if an empty one is given): so the offset goes in an
    operation of its own, and the point as it is given."""
    client, operations = cosine.apply(), []
    update = cosine.plain.batch_update_points
    monkeypatch.setattr(
        client.raw, "batch_update_points",
        lambda update_operations, **named: operations.extend(update_operations)
        or update(update_operations=update_operations, **named),
    )  # fmt: skip
    fresh = clustered(9, 2)
    points = [models.PointStruct(id=key, vector=fresh[key].tolist(), payload=payload) for key in range(2)]
    client.upsert("photos", points)
    upsert, *offsets = operations
    assert [point.payload for point in upsert.upsert.points] == [payload, payload]
    assert len(offsets) == 2
    found = [cosine.mark(key)["v1"] for key in range(2)]
    np.testing.assert_allclose(found, cosine.model.offsets(fresh), rtol=0, atol=1e-5)


def test_a_companion_that_is_away_for_a_moment_does_not_stop_a_search(cosine, monkeypatch):
    client = cosine.apply()
    before = client.query_points("photos", cosine.queries[0]).points

    def away(*given, **named):
        raise UnexpectedResponse(500, "Internal", b"", httpx.Headers())

    monkeypatch.setattr(client.raw, "retrieve", away)
    client._hub.known["photos"].until = 0.0
    assert client.query_points("photos", cosine.queries[0]).points == before
    with pytest.warns(UserWarning, match="cannot be read just now"):
        raw = HubQdrantClient.wrap(client).query_points("photos", cosine.queries[0], with_payload=False).points
    assert raw == cosine.plain.query_points("photos", cosine.queries[0], with_payload=False).points


def test_what_the_collection_allows_now_is_asked_again_by_a_refresh(cosine, monkeypatch):
    cosine.apply()
    monkeypatch.setattr(QdrantStore, "_abilities", lambda store: {"max_candidates": 30, "server_formula": True})
    hubplugin_qdrant.refresh(cosine.plain, "photos")
    assert cosine.version.max_candidates == 30


def test_a_removal_shows_how_far_it_is(cosine):
    cosine.apply()
    said = []
    hubplugin_qdrant.remove(cosine.plain, "photos", progress=lambda *told: said.append(told))
    assert said[-1] == ("removing offsets", ROWS, ROWS)


def test_points_that_go_while_offsets_are_removed_do_not_stop_it(cosine):
    cosine.apply()
    delete_payload, gone = cosine.plain.delete_payload, [3, 5]

    def meanwhile(*given, **named):
        cosine.plain.delete("photos", gone)
        return delete_payload(*given, **named)

    cosine.plain.delete_payload = meanwhile
    hubplugin_qdrant.remove(cosine.plain, "photos")
    left = cosine.plain.scroll("photos", limit=1000)[0]
    assert len(left) == ROWS - 2
    assert not any("hub_offset" in point.payload for point in left)
