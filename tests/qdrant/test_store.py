"""The job on a collection: what it leaves behind, what it refuses, and what it does
when it is cut off."""

from collections import Counter

import httpx
import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient, models
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

import hubplugin
from hubplugin import Compute, InputError, StoreError, open_store
from hubplugin_qdrant import AsyncHubQdrantClient, metadata, transport
from hubplugin_qdrant import open_store as open_collection
from tests.galleries import assert_near
from tests.qdrant.conftest import (
    COSINE,
    DIM,
    DOT,
    IN_BOTH,
    Photos,
    apply_to,
    clustered,
    names,
    once,
    served,
    stopped,
)


def overtaken():
    return pytest.raises(StoreError, match="another run has begun since")


@IN_BOTH
def test_two_vectors_of_a_collection_are_corrected_and_removed_one_by_one(storage):
    """And points that lack one of them are left alone."""
    photos = Photos("image", DOT)
    texts = clustered(2, 100)
    photos.add_vector("text", texts)
    client, query = photos.plain, photos.queries[0]
    wrapped = photos.apply()
    given = {"vector": "text", "storage": storage, "method": "is", "force": True}
    apply_to(client, "photos", photos.bank, **given)
    text = open_collection(client, "photos", vector="text")
    assert photos.found(wrapped, query) == photos.best(query)
    scores = texts.astype(np.float64) @ query + text.correction().model.offsets(texts)
    assert text.search(query[None], 10).ids[0] == np.argsort(-scores)[:10].tolist()
    without_text = photos.contents()[100]
    assert without_text.vector.keys() == {"image"}
    assert without_text.payload["hub_offset"].keys() == {"v1"}
    hubplugin.remove(photos.store())
    assert photos.found(photos.wrapped(), query) == photos.found(client, query)
    assert hubplugin.inspect(text).missing == 0
    hubplugin.remove(text)
    assert all(point.payload.keys() == {"n", "colour"} for point in photos.contents())
    assert names(client) == ["photos"]


def test_of_the_version_before_model_and_numbers_are_left_and_no_more(photos):
    for method in ("is", "nnn", "csls"):
        photos.apply(method=method)
    left = {key.removeprefix("hub_") for key in photos.stored(0)}
    # A number takes little room, and another vector that of the first.
    assert left == ({"v2", "v3"} if photos.storage == "payload" else {"v3"})
    assert photos.wrong() == (0, 0)
    parts = photos.plain.count("photos--hub").count
    assert parts == 3, "the manifest and the models of two versions, of one part each"


@pytest.fixture
def written(cosine, monkeypatch):
    """The ids of the points whose payload is written."""
    update = cosine.plain.batch_update_points
    delete = cosine.plain.delete_payload
    written = []

    def noted_update(collection, operations, **named):
        for operation in operations:
            (body,) = operation.__dict__.values()
            written.extend(body.points)
        return update(collection, operations, **named)

    def noted_delete(collection, keys, points, **named):
        written.extend(points.points)
        return delete(collection, keys, points, **named)

    monkeypatch.setattr(cosine.plain, "batch_update_points", noted_update)
    monkeypatch.setattr(cosine.plain, "delete_payload", noted_delete)
    return written


def test_a_rollback_writes_only_what_changed_since(cosine, written):
    cosine.apply()
    client = cosine.apply(method="nnn")
    client.upsert("photos", [cosine.point(500, cosine.queries[0])])
    moved = models.PointVectors(id=3, vector=cosine.queries[1].tolist())
    client.update_vectors("photos", [moved])
    for number, changed in ((1, [3, 500]), (2, [])):
        written.clear()
        hubplugin.rollback(cosine.store())
        assert sorted(written) == changed
        assert (cosine.version.number, cosine.wrong()) == (number, (0, 0))


def test_after_the_last_offset_is_written_no_point_is_touched(cosine, written):
    """Each touch takes a point out of the graph, which is built anew by then."""
    for method in ("is", "nnn"):
        cosine.apply(method=method)
    with pytest.raises(KeyboardInterrupt):
        cosine.apply(method="csls", compute=stopped("closing"))
    cosine.apply(method="dbsn", compute=once("closing", written.clear))
    assert written == []
    assert cosine.stored(0).keys() == {"v2", "v4"}
    assert cosine.wrong() == (0, 0)


def test_two_runs_that_begin_at_once_choose_one_number_and_delete_no_model_but_theirs(
    cosine, monkeypatch
):
    mine, theirs = (
        hubplugin.fit(cosine.gallery, cosine.bank, method) for method in ("csls", "nnn")
    )
    first, second = cosine.store(), cosine.store()
    read, write_model = second.read_manifest, first.write_model
    looked = [read()]  # the second has looked when the first begins
    monkeypatch.setattr(
        second, "read_manifest", lambda: looked.pop() if looked else read()
    )

    def meanwhile(version, model):
        write_model(version, model)
        second.begin(theirs)

    monkeypatch.setattr(first, "write_model", meanwhile)
    with overtaken():
        first.begin(mine)
    assert cosine.model.fingerprint == theirs.fingerprint


@IN_BOTH
def test_a_run_whose_collection_is_cleared_meanwhile_leaves_nothing(storage):
    photos = Photos("image", DOT, storage)

    def cleared():
        hubplugin.remove(photos.store())
        if storage == "payload":  # as a request that was under way
            photos.plain.set_payload("photos", {"v1": 0.5}, [7], key="hub_offset")

    with overtaken():
        photos.apply(compute=once("closing", cleared))
    assert names(photos.plain) == ["photos"]
    assert not photos.stored(7)


def test_storage_changes_from_one_to_the_other_in_one_step():
    photos = Photos("image", DOT)
    for storage, place in (("payload", "'hub_offset.v1'"), ("vector", "'hub_v2'")):
        client, query = photos.apply(storage=storage), photos.queries[0]
        assert photos.found(client, query) == photos.best(query)
        assert place in str(hubplugin.inspect(photos.store(), queries=0))
    assert open_collection(photos.plain, "photos").storage == "vector"
    hubplugin.remove(open_collection(photos.plain, "photos"))
    point = photos.contents()[0]
    assert (point.payload.keys(), point.vector.keys()) == ({"n", "colour"}, {"image"})


@pytest.mark.parametrize(
    ("using", "server", "storage", "why"),
    [
        (None, "1.18.0", "vector", "local mode takes no unnamed .*storage='payload'$"),
        ("image", "1.17.1", "vector", r"is 1\.17\).* 1\.18 on; use storage='payload'$"),
        ("image", "1.13.4", "payload", r"has no formulas; upgrade it to 1\.14"),
    ],
)
def test_a_storage_that_the_server_cannot_have_is_refused_before_anything_is_written(
    using, server, storage, why, monkeypatch
):
    photos = Photos(using)
    info = models.VersionInfo(title="", version=server)
    monkeypatch.setattr(photos.plain, "info", lambda: info)
    for dry_run in (True, False):
        with pytest.raises(StoreError, match=why):
            photos.apply(storage=storage, dry_run=dry_run)
    assert names(photos.plain) == ["photos"]


def test_a_second_vector_beside_an_unnamed_one_leaves_the_trace_that_was_stated(cosine):
    """As with a server: local mode takes no unnamed vectors then, but those that the
    wrapped client names ""."""
    served(cosine.plain)
    before = [(point.id, point.payload) for point in cosine.contents()]
    auto = cosine.store(storage="auto")
    tried = hubplugin.apply(auto, cosine.bank, force=True, dry_run=True)
    why = "storage='payload': a second vector beside an unnamed one leaves a trace"
    assert why in " ".join(str(tried).split())
    cosine.storage = "vector"
    tried = hubplugin.apply(cosine.store(), cosine.bank, force=True, dry_run=True)
    stated = 'after a removal get_collection would show {"": VectorParams(...)}'
    assert stated in " ".join(str(tried).split())
    client, query = cosine.apply(), cosine.queries[0]
    assert cosine.found(client, query) == cosine.best(query)
    client.upsert("photos", [cosine.point(500, query)])
    (found,) = client.retrieve("photos", [500], with_vectors=True)
    expected = query / np.linalg.norm(query)
    assert_near(found.vector, expected)
    client.delete("photos", [500])
    hubplugin.remove(cosine.store())
    assert list(cosine.plain.get_collection("photos").config.params.vectors) == [""]
    assert [(point.id, point.payload) for point in cosine.contents()] == before


DENSE = models.VectorParams(size=DIM, distance=COSINE)
BOTH = {"image": DENSE, "text": DENSE}
MANY = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
THERE = "dense vectors there: 'image', 'text'"


def dense(**fields):
    return DENSE.model_copy(update=fields)


@pytest.mark.parametrize(
    ("vectors", "using", "reason"),
    [
        (dense(multivector_config=MANY), None, "multi-vector.*use a dense vector"),
        (dense(datatype=models.Datatype.UINT8), None, "uint8.*float16"),
        (dense(distance=models.Distance.MANHATTAN), None, "Manhattan.*Cosine, Dot, Eu"),
        ({}, None, "other kinds cannot have offsets; .*dense vectors there: none"),
        (BOTH, "words", f"no dense vector 'words', and other kinds.*; {THERE}"),
        (BOTH, "sound", f"no dense vector 'sound', .*; {THERE}"),
        (BOTH, "", f"name one with vector=; {THERE}"),
        (DENSE, None, "empty"),
    ],
)
def test_a_collection_that_cannot_be_corrected_is_refused_with_the_reason(
    vectors, using, reason
):
    client = QdrantClient(":memory:")
    client.create_collection(
        "photos", vectors, sparse_vectors_config={"words": models.SparseVectorParams()}
    )
    with pytest.raises((StoreError, InputError), match=reason):
        apply_to(client, "photos", clustered(1, 5), vector=using)
    assert names(client) == ["photos"]


def test_an_unreachable_server_is_one_line_and_tells_no_secret(monkeypatch):
    monkeypatch.setenv("QDRANT_API_KEY", "s3cr3t")
    monkeypatch.setattr(transport, "RETRY_SECONDS", 0)
    with pytest.raises(StoreError, match=r"^qdrant://127\.0\.0\.1:1/photos: ") as said:
        open_store("qdrant://127.0.0.1:1/photos")
    assert "\n" not in str(said.value)
    assert "s3cr3t" not in repr(said.value)


def refused(status, reason):
    content = b'{"status": {"error": "s3cr3t is no admin"}}'
    return UnexpectedResponse(status, reason, content, httpx.Headers())


def test_a_key_that_may_only_read_is_told_before_the_gallery_is_read(
    cosine, monkeypatch
):
    served(cosine.plain)  # local mode has no keys
    store = cosine.store()

    def forbid(*given, **named):
        raise refused(403, "Forbidden")

    monkeypatch.setattr(cosine.plain, "delete", forbid)
    given = {"method": "is", "force": True}
    assert not hubplugin.apply(store, cosine.bank, **given, dry_run=True).written
    monkeypatch.setattr(store, "scan", lambda *_: pytest.fail("the gallery was read"))
    with pytest.raises(StoreError, match="the api key may not do this"):
        hubplugin.apply(store, cosine.bank, **given)


@pytest.mark.parametrize(
    "error",
    [
        refused(503, "Unavailable"),
        refused(429, "Too Many Requests"),
        ResponseHandlingException(httpx.ReadTimeout("")),
    ],
)
@pytest.mark.parametrize("name", ["get_aliases", "get_collection", "scroll"])
def test_a_server_that_is_away_for_a_moment_stops_no_run_and_no_opening(
    cosine, monkeypatch, caplog, name, error
):
    request, failures = getattr(cosine.plain, name), iter([error, error])

    def away_at_first(*given, **named):
        for failure in failures:
            raise failure
        return request(*given, **named)

    monkeypatch.setattr(cosine.plain, name, away_at_first)
    monkeypatch.setattr(transport, "LONGEST_WAIT", 0)
    cosine.apply()
    assert next(failures, None) is None
    (warned,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert "is repeated" in warned.getMessage()


def test_the_offsets_of_the_version_before_stay_until_no_client_searches_by_them(
    cosine, monkeypatch
):
    """A client reads the manifest anew every few seconds.

    A kill while they are waited for costs nothing.
    """
    served(cosine.plain)
    monkeypatch.setattr(transport, "SERVER_SECONDS", 0)  # local mode makes no index
    running, writer, query = cosine.apply(), cosine.wrapped(), cosine.queries[0]
    old = [cosine.found(client, query) for client in (running, writer)]

    def killed(what, done, total):
        if what.startswith("waiting for clients"):
            writer.upsert("photos", [cosine.point(3, cosine.gallery[3])])
            assert cosine.found(running, query) == old[0]
            assert cosine.stored(0).keys() == cosine.stored(3).keys() == {"v1", "v2"}
            raise KeyboardInterrupt

    monkeypatch.setattr(transport, "SERVER_SECONDS", 1)
    monkeypatch.setattr(metadata, "MANIFEST_SECONDS", 60.0)
    with pytest.raises(KeyboardInterrupt):
        cosine.apply(method="nnn", compute=Compute(progress=killed))
    monkeypatch.setattr(metadata, "MANIFEST_SECONDS", 0.0)
    assert cosine.model.method == "nnn"
    hubplugin.refresh(cosine.store())
    assert cosine.store().read_manifest().retired == ()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("qdrant://localhost:6333", "expected qdrant"),
        ("qdrant-local:x", "expected qdrant"),
        ("qdrant-local:x/photos?grpc=6334", "grpc=6334: expected the server's port"),
        ("qdrant://h/photos?grpc=yes", "^grpc=yes: expected the server's port"),
        ("qdrant-local:nowhere/photos", "no such folder"),
    ],
)
def test_a_url_that_cannot_be_meant_says_what_was_expected(
    url, says, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((InputError, StoreError), match=says):
        open_store(url)
    assert not [*tmp_path.iterdir()]


def test_a_url_with_a_port_for_grpc_connects_by_it(monkeypatch):
    given = {}

    def connect(self, **named):
        given.update(named)
        raise StoreError("seen")

    monkeypatch.setattr(QdrantClient, "__init__", connect)
    with pytest.raises(StoreError, match="seen"):
        open_store("qdrant://h:7333/photos?using=image&grpc=7334")
    expected = {"port": 7333, "grpc_port": 7334, "prefer_grpc": True}
    assert expected.items() <= given.items()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda sync, other: open_collection(other, "photos"), "QdrantClient, .*Async"),
        (lambda sync, other: AsyncHubQdrantClient.wrap(sync), "AsyncQdrantClient, "),
    ],
)
def test_a_client_of_another_kind_is_refused_at_once(call, says):
    with pytest.raises(InputError, match=says):
        call(QdrantClient(":memory:"), AsyncQdrantClient(":memory:"))


def test_one_apply_asks_nothing_twice(cosine):
    """Each request is a round trip on a server."""
    asked, store = Counter(), cosine.store()
    local = cosine.plain._client

    class Counting:
        def __getattr__(self, name):
            found = getattr(local, name)
            asked[name] += callable(found)
            return found

    cosine.plain._client = Counting()
    hubplugin.apply(store, cosine.bank, "is", force=True)
    assert asked["retrieve"] <= 6, "the manifest"
    assert asked["count"] <= 2
    assert asked["get_collection"] <= 2
    assert asked["scroll"] <= 4, "twice with vectors"
    assert asked.total() <= 20
