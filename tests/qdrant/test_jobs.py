"""The job on a collection that others read and write: how often it reads, and what is
right when it ends."""

import threading
import types

import httpx
import numpy as np
import pytest
from qdrant_client import models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import UnexpectedResponse

import hubplugin
from hubplugin import Compute, StoreError
from hubplugin_qdrant import transport
from tests.qdrant.conftest import DIM, ROWS, once, served


def refused(status, reason, content=b""):
    return UnexpectedResponse(status, reason, content, httpx.Headers())


TOO_LARGE = (
    b'{"status": {"error": "JSON payload (33554433 bytes) is larger than allowed"}}'
)


def test_a_server_that_limits_the_rate_is_asked_again_when_it_said(cosine, monkeypatch):
    count, refusals, waits = cosine.plain.count, iter(range(5)), []

    def limited(*given, **named):
        for _ in refusals:
            raise ResourceExhaustedResponse("too many requests", 7)
        return count(*given, **named)

    monkeypatch.setattr(cosine.plain, "count", limited)
    wait = threading.Event.wait

    def waited(event, seconds=None):
        if seconds is None:  # as a thread that starts is waited for
            return wait(event)
        return waits.append(seconds)

    monkeypatch.setattr(threading.Event, "wait", waited)
    monkeypatch.setattr(transport, "RETRY_SECONDS", 0)
    cosine.apply()
    assert next(refusals, None) is None
    assert min(waits[:5]) >= 7


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


def test_points_that_go_while_offsets_are_removed_do_not_stop_it(cosine):
    cosine.apply()
    said = []

    def disturbed(request):
        def meanwhile(*given, **named):
            cosine.plain.delete("photos", [3, 5])
            return request(*given, **named)

        return meanwhile

    for name in ("delete_payload", "batch_update_points"):
        setattr(cosine.plain, name, disturbed(getattr(cosine.plain, name)))
    compute = Compute(progress=lambda *told: said.append(told))
    hubplugin.remove(cosine.store(), compute=compute)
    assert said[-1] == ("removing offsets", ROWS, ROWS)
    left = cosine.contents()
    assert len(left) == ROWS - 2
    assert not any("hub_offset" in point.payload for point in left)


def test_whatever_others_write_during_a_run_has_its_offset_afterwards(
    photos, monkeypatch
):
    client = photos.corrected()
    served(photos.plain)  # as a server, which makes no index
    monkeypatch.setattr(transport, "SERVER_SECONDS", 0)
    monkeypatch.setattr(transport, "BATCH", 50)
    plain, done = photos.plain, []
    vectors = np.random.default_rng(5).normal(size=(5, DIM)).astype(np.float32)

    def others(what, count, total):
        # Twice, so that the second pass finds the same point again.
        if what == "closing" and 0 < len(done) < 3:
            photos.move({3: vectors[len(done)]})
            done.append(what)
        if what == "writing offsets" and not done:
            done.append(what)
            photos.move({60: vectors[0]})
            new = [photos.point(key, vectors[3]) for key in (61, 900)]
            plain.upsert("photos", new)
            client.upsert("photos", [photos.point(901, vectors[4])])
            plain.delete("photos", [62])

    photos.apply(method="nnn", compute=Compute(progress=others))
    assert plain.count("photos").count == ROWS + 1
    assert (photos.model.method, photos.wrong()) == ("nnn", (0, 0))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (refused(400, "Bad Request", TOO_LARGE), "refused: 400 JSON payload"),
        (refused(413, "Payload Too Large"), "refused: 413"),
        (refused(408, "Request Timeout"), "no answer"),
    ],
    ids=["400", "413", "408"],
)
def test_a_request_that_is_too_large_says_how_to_send_smaller_ones(
    cosine, monkeypatch, error, says
):
    update = cosine.plain.batch_update_points

    def small_only(collection, operations, **named):
        if len(operations) > 10:
            raise error
        return update(collection, operations, **named)

    monkeypatch.setattr(cosine.plain, "batch_update_points", small_only)
    monkeypatch.setattr(transport, "RETRY_SECONDS", 0)
    with pytest.raises(StoreError, match=f"{says}.*transport.BATCH"):
        cosine.apply()
    monkeypatch.setattr(transport, "BATCH", 10)
    cosine.apply()
    assert cosine.wrong() == (0, 0)


@pytest.fixture
def described(cosine, monkeypatch):
    """The collection as a server describes it, and what comes of writes.

    change: Is called with each description. on_write: With the number of points.
    """
    described = types.SimpleNamespace(
        change=lambda info: None, on_write=lambda points: None
    )
    describe = cosine.plain.get_collection
    update = cosine.plain.batch_update_points

    def get_collection(*given):
        info = describe(*given)
        described.change(info)
        return info

    def batch_update_points(collection, operations, **named):
        described.on_write(len(operations))
        return update(collection, operations, **named)

    monkeypatch.setattr(cosine.plain, "get_collection", get_collection)
    monkeypatch.setattr(cosine.plain, "batch_update_points", batch_update_points)
    return described


def test_no_more_points_are_sent_than_strict_mode_allows(cosine, described):
    strict = models.StrictModeConfig(enabled=True, upsert_max_batchsize=7)
    sent = []

    def change(info):
        info.config.strict_mode_config = strict

    described.change = change
    described.on_write = sent.append
    store = cosine.store()
    hubplugin.apply(store, cosine.bank, "is", force=True)
    assert (sum(sent), max(sent)) == (ROWS, 7)
    strict.max_query_limit = 30
    hubplugin.refresh(store)  # which looks again
    assert cosine.version.max_candidates == 30


def test_a_long_wait_is_logged_once_with_what_is_waited_for(
    cosine, monkeypatch, caplog
):
    monkeypatch.setattr(transport, "SILENT_SECONDS", 0)
    monkeypatch.setattr(transport, "POLL_SECONDS", 0.01)
    answers = iter([False, False, False, True])
    cosine.store().transport.wait_until(
        lambda: next(answers), "waiting for the graph", "", points=ROWS
    )
    (said,) = caplog.messages
    assert "photos': waiting for the graph, for up to 600.6 s; you can inter" in said


@pytest.fixture
def graph(cosine, described, monkeypatch):
    """The collection as a server with a graph, that is always yellow, describes it."""
    monkeypatch.setattr(transport, "SERVER_SECONDS", 0)
    described.indexed = ROWS

    def change(info):
        info.status = models.CollectionStatus.YELLOW
        info.indexed_vectors_count = described.indexed
        info.config.optimizer_config.indexing_threshold = 1

    described.change = change
    served(cosine.plain)
    return described


WAITS = "waiting for the graph, in seconds"


@pytest.mark.parametrize("left", [ROWS // 2, ROWS - 5])
def test_a_graph_is_waited_for_and_no_status(cosine, graph, left):
    def write(points):
        graph.indexed = left

    graph.on_write = write
    cosine.apply(compute=once(WAITS, lambda: setattr(graph, "indexed", ROWS - 1)))
    assert graph.indexed == (ROWS - 1 if left < 0.9 * ROWS else left)


@pytest.mark.parametrize(("pace", "parts"), [(None, 10), (30, 4), ("all", 1)], ids=str)
def test_a_part_is_written_and_then_the_graph_is_waited_for(
    cosine, graph, monkeypatch, pace, parts
):
    monkeypatch.setattr(transport, "BATCH", 2)
    unindexed = []

    def write(points):
        graph.indexed -= points
        unindexed.append(ROWS - graph.indexed)

    def index(task, done, total):
        if task == WAITS:
            graph.indexed = ROWS

    graph.on_write = write
    compute = Compute(progress=index)
    store = cosine.store(pace=pace)
    hubplugin.apply(store, cosine.bank, "is", force=True, compute=compute)
    assert len(unindexed) == ROWS / 2
    at_most = 0.1 * ROWS + ROWS / parts
    assert max(unindexed) <= min(at_most, ROWS)


def test_what_writing_costs_is_said_before_it_begins(cosine, graph, caplog):
    cost = f"writing {ROWS} points takes about"
    said = []
    graph.on_write = lambda points: said.append(caplog.text)
    tried = hubplugin.apply(cosine.store(), cosine.bank, "is", force=True, dry_run=True)
    assert cost in str(tried)
    cosine.apply()
    (text,) = said
    assert cost in text
