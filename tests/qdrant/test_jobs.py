"""The job on a collection that others read and write: how often it reads, and what is right when it ends."""

import os
import signal
import threading
import time

import httpx
import numpy as np
import pytest
from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import UnexpectedResponse

import hubplugin
import hubplugin_qdrant
from hubplugin import Compute, StoreError
from hubplugin_qdrant import HubQdrantClient
from hubplugin_qdrant.transport import QdrantTransport, read_ahead
from tests.qdrant.conftest import DIM, ROWS, Photos, apply_to, clustered, served


def test_a_quiet_collection_is_read_twice(cosine, monkeypatch):
    read, scroll = [0], cosine.plain.scroll

    def counted(*given, **named):
        records, following = scroll(*given, **named)
        read[0] += len(records) if named["with_vectors"] else 0
        return records, following

    monkeypatch.setattr(cosine.plain, "scroll", counted)
    cosine.apply()
    assert read[0] == 2 * ROWS


def test_pages_that_are_read_ahead_come_whole_and_in_order_and_then_the_error_that_ends_them():
    made, found = [], []

    def pages():
        for number in range(5):
            made.append(number)
            yield [number]
        raise OSError("gone")

    ahead = read_ahead(pages(), is_over=threading.Event())
    for _ in range(5):
        found += next(ahead)
        assert len(made) <= len(found) + 1, "no more than one page is read ahead"
    with pytest.raises(OSError, match="gone"):
        next(ahead)
    assert found == list(range(5))


def test_what_a_writer_raises_comes_out_and_what_waits_is_finished_first(cosine):
    served(cosine.plain)  # so that threads write
    done, sending = [], cosine.store().transport

    def work(items):
        time.sleep(0.01)
        done.extend(items)

    for number in range(20):
        sending.send([(number, None)], work)
    sending.wait()
    assert len(done) == 20
    sending.send([(0, None)], lambda items: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sending.wait()


def refused(status, reason, content=b""):
    return UnexpectedResponse(status, reason, content, httpx.Headers())


TOO_LARGE = b'{"status": {"error": "JSON payload (33554433 bytes) is larger than allowed (limit: 33554432 bytes)"}}'


@pytest.mark.parametrize(
    "error",
    [
        refused(400, "Bad Request", TOO_LARGE),
        refused(413, "Payload Too Large"),
        refused(408, "Request Timeout"),
    ],
    ids=lambda error: str(error.status_code),
)
def test_a_server_that_takes_only_small_requests_gets_small_ones(
    cosine, monkeypatch, error
):
    update = cosine.plain.batch_update_points

    def small_only(collection, operations, **named):
        if len(operations) > 10:
            raise error
        return update(collection, operations, **named)

    monkeypatch.setattr(cosine.plain, "batch_update_points", small_only)
    monkeypatch.setattr("hubplugin_qdrant.transport.LONGEST_WAIT", 0)
    cosine.apply()
    assert cosine.wrong() == (0, 0)


def test_a_request_that_a_server_takes_in_no_size_ends_the_run_at_once(
    cosine, monkeypatch
):
    def too_large(*given, **named):
        raise refused(413, "Payload Too Large")

    monkeypatch.setattr(cosine.plain, "batch_update_points", too_large)
    monkeypatch.setattr("hubplugin_qdrant.transport.LONGEST_WAIT", 0)
    with pytest.raises(StoreError, match="no request as large as one point"):
        cosine.apply()


def test_a_server_that_limits_the_rate_is_asked_again_when_it_said(cosine, monkeypatch):
    count, waits = cosine.plain.count, []

    def limited(*given, **named):
        if not waits:
            raise ResourceExhaustedResponse("too many requests", 7)
        return count(*given, **named)

    monkeypatch.setattr(cosine.plain, "count", limited)
    monkeypatch.setattr(
        threading.Event, "wait", lambda event, seconds=None: waits.append(seconds)
    )
    cosine.apply()
    assert waits[0] >= 7


def test_a_request_waits_its_turn_where_others_use_up_the_rate(cosine, monkeypatch):
    count, refusals = cosine.plain.count, iter(range(5))

    def limited(*given, **named):
        for _ in refusals:
            raise ResourceExhaustedResponse("too many requests", 0)
        return count(*given, **named)

    monkeypatch.setattr(cosine.plain, "count", limited)
    monkeypatch.setattr("hubplugin_qdrant.transport.LONGEST_WAIT", 0)
    monkeypatch.setattr("hubplugin_qdrant.transport.RETRY_SECONDS", 0)
    cosine.apply()
    assert next(refusals, None) is None


def test_a_calibration_goes_on_with_the_request_that_a_limited_rate_refused(
    cosine, monkeypatch
):
    twin = Photos(QdrantClient(":memory:"), "", models.Distance.COSINE)
    twin.apply()
    search, asked = cosine.plain._client.query_batch_points, []

    def limited(*given, **named):
        asked.append(given)
        if len(asked) % 2:
            raise ResourceExhaustedResponse("too many requests", 0)
        return search(*given, **named)

    monkeypatch.setattr(cosine.plain._client, "query_batch_points", limited)
    monkeypatch.setattr("hubplugin_qdrant.transport.LONGEST_WAIT", 0)
    cosine.apply()
    assert asked
    assert (cosine.version.oversampling, cosine.version.recall) == (
        twin.version.oversampling,
        twin.version.recall,
    )


def test_an_interrupted_run_does_not_wait_for_a_server_that_is_away(
    cosine, monkeypatch
):
    served(cosine.plain)  # so that threads write
    tried = threading.Event()

    def away(*given, **named):
        tried.set()
        raise refused(503, "Unavailable")

    def interrupt(what, done, total):
        if what == "writing offsets":
            tried.wait()
            raise KeyboardInterrupt

    monkeypatch.setattr(cosine.plain, "batch_update_points", away)
    monkeypatch.setattr("hubplugin_qdrant.transport.random.uniform", lambda *_: 600)
    with pytest.raises(KeyboardInterrupt):
        cosine.apply(compute=Compute(progress=interrupt))


@pytest.fixture
def interruptible():
    """What a process that was started in the background may have been told to ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_reading_does_not_wait_for_a_server_that_is_away(
    cosine, monkeypatch
):
    served(cosine.plain)  # so that a thread reads
    tried: list[int] = []

    def away(*given, **named):
        tried.append(1)
        if len(tried) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        raise refused(503, "Unavailable")

    store, before = (
        hubplugin_qdrant.open_store(cosine.plain, "photos"),
        set(threading.enumerate()),
    )
    monkeypatch.setattr(cosine.plain, "scroll", away)
    monkeypatch.setattr("hubplugin_qdrant.transport.random.uniform", lambda *_: 600)
    with pytest.raises(KeyboardInterrupt):
        list(store.scan())
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive(), "Python waits for it when it ends"


@pytest.mark.usefixtures("interruptible")
def test_a_wait_for_the_server_says_what_for_and_ends_when_it_is_interrupted(
    cosine, monkeypatch, caplog
):
    monkeypatch.setattr("hubplugin_qdrant.transport.SILENT_SECONDS", 0)
    monkeypatch.setattr("hubplugin_qdrant.transport.POLL_SECONDS", 0.01)
    asked = []

    def never(*given):
        asked.append(given)
        if len(asked) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return False

    monkeypatch.setattr("hubplugin_qdrant.schema.Schema._is_optimised", never)
    with pytest.raises(KeyboardInterrupt):
        cosine.apply()
    (said,) = [
        record.getMessage()
        for record in caplog.records
        if "interrupted" in record.getMessage()
    ]
    assert (
        "photos': waiting for the graph, for up to 600.6 s; it may be interrupted, and goes on when"
        in said
    )
    monkeypatch.undo()
    applied = apply_to(cosine.plain, "photos", cosine.bank, **cosine.settings())
    assert (applied.scanned, applied.missing) == (ROWS, 0)


def test_a_run_that_was_cut_off_writes_only_what_lacks_its_offset(cosine, monkeypatch):
    monkeypatch.setattr("hubplugin_qdrant.transport.BATCH", 10)

    def stop(what, done, total):
        if what == "writing offsets" and done >= ROWS // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cosine.apply(compute=Compute(progress=stop))
    applied = apply_to(cosine.plain, "photos", cosine.bank, **cosine.settings())
    assert (applied.scanned, applied.missing) == (ROWS, ROWS // 2)
    found = [
        record.payload["hub_offset"]["v1"]
        for record in cosine.plain.scroll("photos", limit=1000)[0]
    ]
    np.testing.assert_allclose(
        found, cosine.model.offsets(cosine.gallery), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("payload", [None, {}])
def test_a_point_written_without_payload_keeps_what_a_server_keeps_of_it(
    cosine, monkeypatch, payload
):
    """A server 1.14 keeps the payload that was there (by gRPC also if an empty one is given): so the point is written
    as it is given, and its offset afterwards."""
    client, written = cosine.apply(), []
    client._corrections.is_old = True
    upsert = cosine.plain.upsert
    monkeypatch.setattr(
        client.raw,
        "upsert",
        lambda collection_name, points: (
            written.extend(points) or upsert(collection_name, points)
        ),
    )
    fresh = clustered(9, 2)
    points = [
        models.PointStruct(id=key, vector=fresh[key].tolist(), payload=payload)
        for key in range(2)
    ]
    client.upsert("photos", points)
    assert [point.payload for point in written] == [payload, payload]
    found = [cosine.stored(key)["v1"] for key in range(2)]
    np.testing.assert_allclose(found, cosine.model.offsets(fresh), rtol=0, atol=1e-5)


def test_a_metadata_collection_that_is_away_for_a_moment_does_not_stop_a_search(
    cosine, monkeypatch
):
    client = cosine.apply()
    before = client.query_points("photos", cosine.queries[0]).points

    def away(*given, **named):
        raise refused(500, "Internal")

    monkeypatch.setattr(client.raw, "retrieve", away)
    client._corrections.manifests["photos"].until = 0.0
    assert client.query_points("photos", cosine.queries[0]).points == before
    with pytest.warns(UserWarning, match="cannot be read just now"):
        raw = (
            HubQdrantClient.wrap(client)
            .query_points("photos", cosine.queries[0], with_payload=False)
            .points
        )
    assert (
        raw
        == cosine.plain.query_points(
            "photos", cosine.queries[0], with_payload=False
        ).points
    )


def test_what_the_collection_allows_now_is_asked_again_by_a_refresh(
    cosine, monkeypatch
):
    cosine.apply()
    opened = QdrantTransport.__init__

    def limited(transport, *given):
        opened(transport, *given)
        transport.strict = models.StrictModeConfig(enabled=True, max_query_limit=30)

    monkeypatch.setattr(QdrantTransport, "__init__", limited)
    hubplugin.refresh(hubplugin_qdrant.open_store(cosine.plain, "photos"))
    assert cosine.version.max_candidates == 30


def test_a_removal_shows_how_far_it_is(cosine):
    cosine.apply()
    said = []
    hubplugin.remove(
        cosine.store(), compute=Compute(progress=lambda *told: said.append(told))
    )
    assert said[-1] == ("removing offsets", ROWS, ROWS)


def test_points_that_go_while_offsets_are_removed_do_not_stop_it(cosine):
    cosine.apply()
    delete_payload, gone = cosine.plain.delete_payload, [3, 5]

    def meanwhile(*given, **named):
        cosine.plain.delete("photos", gone)
        return delete_payload(*given, **named)

    cosine.plain.delete_payload = meanwhile
    hubplugin.remove(hubplugin_qdrant.open_store(cosine.plain, "photos"))
    left = cosine.plain.scroll("photos", limit=1000)[0]
    assert len(left) == ROWS - 2
    assert not any("hub_offset" in point.payload for point in left)


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect")
def test_whatever_others_write_during_a_run_has_its_offset_afterwards(
    photos, monkeypatch
):
    client = photos.corrected()
    served(photos.plain)  # as a server, which makes no index
    monkeypatch.setattr("hubplugin_qdrant.transport.SERVER_SECONDS", 0)
    monkeypatch.setattr("hubplugin_qdrant.transport.BATCH", 50)
    plain, done = photos.plain, []
    vectors = np.random.default_rng(5).normal(size=(5, DIM)).astype(np.float32)

    def others(what, count, total):
        if (
            what == "closing" and 0 < len(done) < 3
        ):  # twice, so that the second pass finds the same point again
            plain.update_vectors(
                "photos",
                [models.PointVectors(id=3, vector=photos.struct(vectors[len(done)]))],
            )
            done.append(what)
        if what == "writing offsets" and not done:
            done.append(what)
            plain.update_vectors(
                "photos", [models.PointVectors(id=60, vector=photos.struct(vectors[0]))]
            )
            plain.upsert(
                "photos", [photos.point(61, vectors[3]), photos.point(900, vectors[3])]
            )
            client.upsert("photos", [photos.point(901, vectors[4])])
            plain.delete("photos", [62])

    photos.apply(method="nnn", compute=Compute(progress=others))
    assert (plain.count("photos").count, photos.model.method, photos.wrong()) == (
        ROWS + 1,
        "nnn",
        (0, 0),
    )
