"""The job on a collection: what it leaves behind, what it refuses, and what it does when it is cut off."""

from collections import Counter

import httpx
import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient, models
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

import hubplugin
import hubplugin_qdrant
from hubplugin import InputError, StoreError, apply, open_store
from hubplugin_qdrant import AsyncHubQdrantClient
from hubplugin_qdrant.manifest import QdrantManifest
from tests.qdrant.conftest import (
    DIM,
    Photos,
    apply_to,
    clustered,
    contents,
    ids,
    names,
    once,
    served,
    stopped,
)


def test_two_vectors_of_a_collection_are_corrected_and_removed_one_by_one():
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.DOT)
    photos.add_vector("text", clustered(2, 100))
    client, query = photos.plain, photos.queries[0]
    wrapped = photos.apply()
    apply_to(client, "photos", photos.bank, vector="text", method="is", force=True)
    text = hubplugin_qdrant.open_store(client, "photos", vector="text")
    assert ids(photos.search(wrapped, query)) == photos.best(query)
    best = text.search(query[None], 10).ids[0]
    scores = clustered(2, 100).astype(np.float64) @ query
    scores += text.correction().model.offsets(clustered(2, 100))
    assert best == np.argsort(-scores)[:10].tolist()
    hubplugin.remove(photos.store())
    found = photos.search(photos.wrapped(), query)
    assert ids(found) == ids(photos.search(client, query))
    assert hubplugin.inspect(text).missing == 0
    hubplugin.remove(text)
    assert all(set(point.payload) == {"n", "colour"} for point in contents(client))
    assert names(client) == ["photos"]


def test_of_the_version_before_model_and_numbers_are_left_and_no_more(photos):
    photos.apply()
    first = photos.model
    photos.apply(method="nnn")
    assert photos.store().previous().fingerprint == first.fingerprint
    photos.apply(method="csls")
    left = {key.removeprefix("hub_") for key in photos.stored(0)}
    # A number takes little room, and another vector that of the first.
    assert left == ({"v2", "v3"} if photos.storage == "payload" else {"v3"})
    assert photos.wrong() == (0, 0)
    parts = {point.id for point in photos.plain.scroll("photos--hub", limit=100)[0]} - {
        hubplugin_qdrant.metadata.MANIFEST_ID
    }
    assert len(parts) == 2, (
        "the models of the active version and of the one before, of one part each"
    )


def record_points(client, monkeypatch):
    """Return a list that gets the ids of the points whose payload is written."""
    update = client.batch_update_points
    written = []

    def noted_update(collection, operations, **named):
        for operation in operations:
            (body,) = operation.__dict__.values()
            written.extend(body.points)
        return update(collection, operations, **named)

    monkeypatch.setattr(client, "batch_update_points", noted_update)
    return written


def test_a_rollback_writes_only_what_changed_since(cosine, monkeypatch):
    cosine.apply()
    client = cosine.apply(method="nnn")
    client.upsert("photos", [cosine.point(500, cosine.queries[0])])
    moved = models.PointVectors(id=3, vector=cosine.queries[1].tolist())
    client.update_vectors("photos", [moved])
    written = record_points(cosine.plain, monkeypatch)
    hubplugin.rollback(cosine.store())
    assert sorted(written) == [3, 500]
    assert (cosine.version.number, cosine.wrong()) == (1, (0, 0))
    del written[:]
    hubplugin.rollback(cosine.store())
    assert (cosine.version.number, cosine.wrong()) == (2, (0, 0))
    assert written == []


def test_after_the_last_offset_is_written_no_point_is_touched(cosine, monkeypatch):
    """Each touch takes a point out of the graph, which is built anew by then."""
    for method in ("is", "nnn"):
        cosine.apply(method=method)
    with pytest.raises(KeyboardInterrupt):
        cosine.apply(method="csls", compute=stopped("closing"))
    written = record_points(cosine.plain, monkeypatch)
    cosine.apply(method="dbsn", compute=once("closing", written.clear))
    assert written == []
    assert set(cosine.stored(0)) == {"v2", "v4"}
    assert cosine.wrong() == (0, 0)


def test_two_runs_that_chose_the_same_number_do_not_mix_their_offsets():
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.DOT)
    first, second = (
        hubplugin.fit(photos.gallery, photos.bank, method, metric="dot")
        for method in ("is", "nnn")
    )
    earlier = photos.store().begin(first)
    batch = next(iter(earlier.scan()))
    photos.store().write_manifest(QdrantManifest())  # which the other has read
    with photos.store().begin(second) as later:
        assert later.version.number == earlier.version.number
        later.write(batch, second.offsets(batch.vectors))
        with pytest.raises(StoreError, match="another run has begun since"):
            earlier.write(batch, first.offsets(batch.vectors))
        earlier.close()
        later.activate()
    assert photos.model.fingerprint == second.fingerprint
    assert photos.wrong() == (0, 0)


def test_an_inspection_says_where_the_offsets_lie_and_how_many_are_wrong(photos):
    photos.apply()
    photos.plain.delete("photos", [0])
    photos.plain.upsert("photos", [photos.point(500, photos.gallery[0])])
    found = hubplugin.inspect(photos.store())
    said = " ".join(str(found).split())
    lies = {
        "vector": "the vector 'hub_v1'",
        "payload": "the payload key 'hub_offset.v1'; the server adds",
    }
    assert (found.missing, found.stale) == (1, 0)
    assert "1 of 120 targets lack their offset" in said
    assert "refresh" in said
    assert f"offsets in {lies[photos.storage]}" in said


@pytest.mark.parametrize("storage", ["payload", "vector"])
def test_of_two_runs_at_once_the_later_one_wins_and_the_earlier_one_stops(storage):
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.DOT, storage)
    with pytest.raises(
        StoreError, match="another run has begun since, and this one stops"
    ):
        photos.apply(
            compute=once("writing offsets", lambda: photos.apply(method="nnn"))
        )
    assert photos.model.method == "nnn"
    client, query = photos.wrapped(), photos.queries[0]
    assert [
        p.id for p in client.query_points("photos", query, "image").points
    ] == photos.best(query)
    numbers = {key.removeprefix("hub_") for key in photos.stored(0)}
    assert numbers == {"v2"}, "what the earlier run wrote is gone"


@pytest.mark.parametrize("storage", ["payload", "vector"])
def test_a_run_whose_collection_is_cleared_meanwhile_leaves_nothing(storage):
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.DOT, storage)

    def cleared():
        hubplugin.remove(photos.store())
        if storage == "payload":  # as a request that was under way
            photos.plain.set_payload("photos", {"v1": 0.5}, [7], key="hub_offset")

    with pytest.raises(StoreError, match="another run has begun since"):
        photos.apply(compute=once("closing", cleared))
    assert names(photos.plain) == ["photos"]
    assert not photos.stored(7)


def test_points_without_the_vector_are_left_alone():
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.COSINE)
    photos.plain.upsert(
        "photos", [models.PointStruct(id=900, vector={}, payload={"n": 900})]
    )
    photos.apply()
    assert not photos.stored(900)
    assert photos.wrong() == (0, 0)


@pytest.mark.parametrize("storage", ["payload", "vector"])
def test_a_zero_vector_is_counted_and_keeps_the_offset_0(storage):
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.COSINE, storage)
    photos.plain.upsert("photos", [photos.point(900, np.zeros(DIM, np.float32))])
    told = "1 with vectors that the model cannot judge, those of length 0 have the offset 0, others its smallest: 900 ("
    done = hubplugin.apply(photos.store(), photos.bank, "is", force=True)
    assert done.model.gallery.count == len(photos.gallery)
    assert told in " ".join(str(done).split())
    assert not np.any(next(iter(photos.stored(900).values())))
    assert photos.wrong() == (0, 0)
    photos.plain.upsert(
        "photos", [photos.point(901, np.zeros(DIM, np.float32))]
    )  # past hubplugin
    for job in (hubplugin.refresh, hubplugin.inspect):
        assert job(photos.store()).invalid_vectors.named == {
            900: "length 0",
            901: "length 0",
        }
    assert photos.wrong() == (0, 0)


def test_storage_changes_from_one_to_the_other_in_one_step():
    photos = Photos(QdrantClient(":memory:"), "image", models.Distance.DOT)
    photos.apply()
    client = photos.apply(storage="vector")
    found = client.query_points("photos", photos.queries[0], "image").points
    assert ids(found) == photos.best(photos.queries[0])
    assert hubplugin_qdrant.open_store(photos.plain, "photos").storage == "vector"
    hubplugin.remove(hubplugin_qdrant.open_store(photos.plain, "photos"))
    point = photos.plain.retrieve("photos", [0], with_vectors=True)[0]
    assert (set(point.payload), set(point.vector)) == ({"n", "colour"}, {"image"})


def of_version(text):
    return lambda: models.VersionInfo(title="", version=text)


@pytest.mark.parametrize("using", ["", "image"], ids=["unnamed", "named"])
def test_a_second_vector_where_none_can_be_added_is_refused(using, monkeypatch):
    photos = Photos(QdrantClient(":memory:"), using, models.Distance.COSINE)
    if using:
        monkeypatch.setattr(photos.plain, "info", of_version("1.17.1"))
    why = (
        r"this one is 1\.17\).* from 1\.18 on"
        if using
        else "local mode takes no unnamed vectors"
    )
    for dry_run in (True, False):
        with pytest.raises(
            StoreError,
            match=f"adds a second vector, and .*{why}.*; use storage='payload'$",
        ):
            photos.apply(storage="vector", dry_run=dry_run)
    assert names(photos.plain) == ["photos"]


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect")
def test_a_second_vector_beside_an_unnamed_one_leaves_the_trace_that_was_stated(cosine):
    """As with a server: local mode takes no unnamed vectors then, but those that the wrapped client names ""."""
    served(cosine.plain)
    before = contents(cosine.plain)
    given = {"storage": "vector", "method": "is", "force": True}
    tried = apply_to(cosine.plain, "photos", cosine.bank, dry_run=True, **given)
    assert 'after a removal get_collection would show {"": VectorParams(...)}' in str(
        tried
    )
    client, query = cosine.apply(storage="vector"), cosine.queries[0]
    assert ids(client.query_points("photos", query)) == cosine.best(query)
    client.upsert("photos", [cosine.point(500, query)])
    (found,) = client.retrieve("photos", [500], with_vectors=True)
    expected = query / np.linalg.norm(query)
    np.testing.assert_allclose(found.vector, expected, rtol=0, atol=1e-5)
    client.delete("photos", [500])
    hubplugin.remove(cosine.store())
    assert list(cosine.plain.get_collection("photos").config.params.vectors) == [""]
    assert [(p.id, p.payload) for p in contents(cosine.plain)] == [
        (p.id, p.payload) for p in before
    ]


def test_a_server_without_formulas_is_refused_in_one_line(cosine, monkeypatch):
    monkeypatch.setattr(cosine.plain, "info", of_version("1.13.4"))
    with pytest.raises(
        StoreError,
        match=r"Qdrant 1\.13, which has no formulas; upgrade it to 1\.14 or newer$",
    ):
        cosine.apply()


COSINE, MANY = (
    models.VectorParams(size=DIM, distance="Cosine"),
    models.MultiVectorComparator.MAX_SIM,
)


@pytest.mark.parametrize(
    ("vectors", "using", "reason"),
    [
        (COSINE.model_copy(update={"multivector_config": models.MultiVectorConfig(comparator=MANY)}), None,
         "multi-vector.*use a dense vector"),
        (COSINE.model_copy(update={"datatype": models.Datatype.UINT8}), None, "uint8.*float16"),
        (COSINE.model_copy(update={"distance": models.Distance.MANHATTAN}), None, "Manhattan.*Cosine, Dot, Euclid"),
        ({}, None, "sparse vectors have no offsets"),
        ({"image": COSINE, "text": COSINE}, "sound", "no vector 'sound'; dense vectors there: 'image', 'text'"),
        ({"image": COSINE, "text": COSINE}, "", "name one of .* vector=; dense vectors there: 'image', 'text'"),
        (COSINE, None, "empty"),
    ],
)  # fmt: skip
def test_a_collection_that_cannot_be_corrected_is_refused_with_the_reason(
    vectors, using, reason
):
    client = QdrantClient(":memory:")
    client.create_collection(
        "photos", vectors, sparse_vectors_config={"words": models.SparseVectorParams()}
    )
    with pytest.raises((StoreError, InputError), match=reason):
        apply_to(client, "photos", clustered(1, 5), vector=using)
    assert len(client.get_collections().collections) == 1


def test_an_unreachable_server_is_one_line_and_tells_no_secret(monkeypatch):
    monkeypatch.setenv("QDRANT_API_KEY", "s3cr3t")
    monkeypatch.setattr("hubplugin_qdrant.transport.RETRY_SECONDS", 0)
    with pytest.raises(
        StoreError, match=r"^qdrant://127\.0\.0\.1:1/photos: .*is the server running"
    ) as caught:
        open_store("qdrant://127.0.0.1:1/photos")
    assert "\n" not in str(caught.value)
    assert "s3cr3t" not in repr(caught.value)


def refused(status, reason):
    return UnexpectedResponse(
        status, reason, b'{"status": {"error": "s3cr3t is no admin"}}', httpx.Headers()
    )


def test_a_key_that_may_only_read_is_told_before_the_gallery_is_read(
    cosine, monkeypatch
):
    served(cosine.plain)  # local mode has no keys
    store = cosine.store()
    monkeypatch.setattr(cosine.plain, "delete", _raise(refused(403, "Forbidden")))
    assert not apply(store, cosine.bank, "is", force=True, dry_run=True).written
    monkeypatch.setattr(
        store, "scan", lambda *given: pytest.fail("the gallery was read")
    )
    with pytest.raises(
        StoreError,
        match="asking whether it may be written to: the api key may not do this",
    ):
        apply(store, cosine.bank, "is", force=True)


def _raise(error):
    def call(*given, **named):
        raise error

    return call


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

    def at_first_away(*given, **named):
        for failure in failures:
            raise failure
        return request(*given, **named)

    monkeypatch.setattr(cosine.plain, name, at_first_away)
    monkeypatch.setattr("hubplugin_qdrant.transport.LONGEST_WAIT", 0)
    cosine.apply()
    assert next(failures, None) is None
    warned = [each for each in caplog.records if each.levelname == "WARNING"]
    assert len(warned) == 1
    assert "asked again" in warned[0].getMessage()


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(StoreError, match="no such folder"):
        open_store(f"qdrant-local:{tmp_path}/nowhere/photos")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect")
def test_the_offsets_of_the_version_before_stay_until_no_client_searches_by_them(
    cosine, monkeypatch
):
    """A client reads the manifest anew every few seconds. A kill while they are waited for costs nothing."""
    served(cosine.plain)
    monkeypatch.setattr(
        "hubplugin_qdrant.transport.SERVER_SECONDS", 0
    )  # local mode makes no index
    running, query = cosine.apply(), cosine.queries[0]
    writer = cosine.wrapped()
    for client in (running, writer):
        old = client.query_points("photos", query).points

    def killed(what, done, total):
        if what.startswith("waiting for clients"):
            writer.upsert("photos", [cosine.point(3, cosine.gallery[3])])
            assert ids(running.query_points("photos", query)) == ids(old)
            assert set(cosine.stored(0)) == set(cosine.stored(3)) == {"v1", "v2"}
            raise KeyboardInterrupt

    monkeypatch.setattr("hubplugin_qdrant.transport.SERVER_SECONDS", 1)
    monkeypatch.setattr("hubplugin_qdrant.metadata.MANIFEST_SECONDS", 60.0)
    with pytest.raises(KeyboardInterrupt):
        cosine.apply(method="nnn", compute=hubplugin.Compute(progress=killed))
    monkeypatch.setattr("hubplugin_qdrant.metadata.MANIFEST_SECONDS", 0.0)
    assert cosine.model.method == "nnn"
    hubplugin.refresh(cosine.store())
    assert cosine.store().read_manifest().retired == ()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("qdrant://localhost:6333", "expected qdrant"),
        ("qdrant://key@localhost:6333/photos", "expected qdrant"),
        ("qdrant://h/photos?api_key=s3cr3t", "expected qdrant"),
        ("qdrant-local:x", "expected qdrant"),
        ("qdrant-local:x/photos?grpc=6334", "grpc=6334: expected the server's port"),
        ("qdrant://h/photos?grpc=yes", "^grpc=yes: expected the server's port"),
    ],
)
def test_a_url_that_cannot_be_meant_says_what_was_expected(url, says):
    with pytest.raises((InputError, StoreError), match=says) as caught:
        open_store(url)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda sync, other: hubplugin_qdrant.open_store(other, "photos"),
            "plain or wrapped, not Async",
        ),
        (
            lambda sync, other: AsyncHubQdrantClient.wrap(sync),
            "AsyncQdrantClient, plain or wrapped, not QdrantClient",
        ),
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
            if callable(found):
                asked[name] += 1
            return found

    cosine.plain._client = Counting()
    apply(store, cosine.bank, "is", force=True)
    assert asked["retrieve"] <= 6, "the manifest"
    assert asked["count"] <= 2
    assert asked["get_collection"] <= 2
    assert asked["scroll"] <= 4, "twice with vectors"
    assert sum(asked.values()) <= 20


def test_two_runs_that_begin_at_once_choose_one_number_and_delete_no_model_but_theirs(
    cosine, monkeypatch
):
    models_of = {
        name: hubplugin.fit(cosine.gallery, cosine.bank, name)
        for name in ("csls", "nnn")
    }
    first, second = cosine.store(), cosine.store()
    read = second.read_manifest
    before = read()  # the second has looked when the first begins
    looked = [before]
    monkeypatch.setattr(
        second, "read_manifest", lambda: looked.pop() if looked else read()
    )
    write_model = first.write_model
    writings = []

    def meanwhile(version, model):
        write_model(version, model)
        writings.append(second.begin(models_of["nnn"]))

    monkeypatch.setattr(first, "write_model", meanwhile)
    with pytest.raises(StoreError, match="another run has begun since"):
        first.begin(models_of["csls"])
    found = cosine.store().correction()
    assert found.model.fingerprint == models_of["nnn"].fingerprint


def test_a_url_with_a_port_for_grpc_connects_by_it(monkeypatch):
    given = {}

    def connect(**named):
        given.update(named)
        raise StoreError("seen")

    monkeypatch.setattr("hubplugin_qdrant.places.QdrantClient", connect)
    with pytest.raises(StoreError, match="seen"):
        open_store("qdrant://h:7333/photos?using=image&grpc=7334")
    assert (given["port"], given["grpc_port"], given["prefer_grpc"]) == (
        7333,
        7334,
        True,
    )
