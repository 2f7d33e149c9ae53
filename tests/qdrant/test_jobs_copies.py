"""storage="vector" on a server that adds no vector to a collection: in a copy, whose alias is switched in one step."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import InputError, StoreError
from hubplugin_qdrant import HubQdrantClient, QdrantStore, copies
from tests.qdrant.conftest import DIM, ROWS, Photos, clustered


class Aliased(Photos):
    """The collection "photos" behind the alias "shop", on a server of 1.17."""

    @classmethod
    def on(cls, client, using="image", distance=models.Distance.COSINE):
        photos = cls(client, using, distance, "vector")
        photos.plain.upsert("photos", [models.PointStruct(id=900, vector={}, payload={"n": 900})])
        photos.alias("shop")
        return photos

    def alias(self, name):
        create = models.CreateAlias(collection_name="photos", alias_name=name)
        self.plain.update_collection_aliases([models.CreateAliasOperation(create_alias=create)])

    def apply_to(self, name="shop", **given):
        hubplugin_qdrant.apply(self.plain, name, self.bank, using=self.using, **(self.settings() | given))
        return HubQdrantClient.wrap(self.plain)

    def best_of(self, model, query, count=10):
        q, t = query.astype(np.float64), self.gallery.astype(np.float64)
        if self.distance is models.Distance.COSINE:
            q, t = q / np.linalg.norm(q), t / np.linalg.norm(t, axis=1, keepdims=True)
        s = -((q - t) ** 2).sum(axis=1) / 2 if self.distance is models.Distance.EUCLID else t @ q
        return np.argsort(-(s + model.offsets(self.gallery)))[:count].tolist()

    def content(self, name="shop"):
        """What a user sees of each point."""
        records, _ = HubQdrantClient.wrap(self.plain).scroll(name, limit=1000, with_vectors=True)
        vectors = [record.vector if isinstance(record.vector, dict) else {"": record.vector} for record in records]
        return [
            (record.id, record.payload, {name: np.round(vector, 5).tolist() for name, vector in each.items()})
            for record, each in zip(records, vectors, strict=True)
        ]

    def names(self):
        return sorted(found.name for found in self.plain.get_collections().collections)

    def stands_for(self):
        return {found.alias_name: found.collection_name for found in self.plain.get_aliases().aliases}


@pytest.fixture
def client(monkeypatch):
    client = QdrantClient(":memory:")
    monkeypatch.setattr(client, "info", lambda: models.VersionInfo(title="", version="1.17.3"))
    return client


@pytest.fixture
def shop(client):
    return Aliased.on(client)


@pytest.mark.parametrize(
    ("using", "distance"),
    [("image", models.Distance.COSINE), ("image", models.Distance.EUCLID), ("", models.Distance.DOT)],
)
def test_a_copy_takes_the_place_of_the_collection_and_ranks_exactly(client, using, distance):
    shop = Aliased.on(client, using, distance)
    shop.alias("window")
    shop.plain.query_points("photos", query=[1.0] * DIM, using=using or None)  # local mode normalises in its course
    before = shop.content("photos")
    wrapped = shop.apply_to()
    assert shop.stands_for() == {"shop": "photos--v1", "window": "photos--v1"}
    assert shop.names() == ["photos", "photos--v1", "photos--v1--hub"]
    model = QdrantStore(client, "shop", using).correction().model
    for query in shop.queries[:3]:
        found = wrapped.query_points("shop", query, using or None).points
        assert [point.id for point in found] == shop.best_of(model, query)
    assert shop.content() == before == shop.content("photos")
    report = hubplugin_qdrant.inspect(client, "shop", using=using)
    assert (report.missing, report.stale) == (0, 0)
    assert "a copy of 'photos', which stays as it was" in str(report)


@pytest.mark.parametrize("using", ["", "image"])
def test_a_server_without_formulas_ranks_by_the_second_vector_alone(monkeypatch, using):
    client, sent = QdrantClient(":memory:"), []
    monkeypatch.setattr(client, "info", lambda: models.VersionInfo(title="", version="1.10.1"))
    shop = Aliased.on(client, using, models.Distance.DOT)
    wrapped = shop.apply_to()
    query, model = shop.queries[0], QdrantStore(client, "shop", using).correction().model
    best = shop.best_of(model, query)
    search = client._client.query_points
    monkeypatch.setattr(client._client, "query_points", lambda **given: sent.append(given) or search(**given))
    found = wrapped.query_points("shop", query, using or None).points
    assert [point.id for point in found] == best
    assert [given["prefetch"] for given in sent] == [None]
    below = models.Prefetch(query=query.tolist(), using=using or None, limit=10)
    fused = wrapped.query_points("shop", prefetch=below, query=models.FusionQuery(fusion=models.Fusion.RRF)).points
    assert [point.id for point in fused] == best


def test_second_vectors_under_euclidean_distance_need_formulas(client, monkeypatch):
    monkeypatch.setattr(client, "info", lambda: models.VersionInfo(title="", version="1.13.6"))
    shop = Aliased.on(client, "image", models.Distance.EUCLID)
    with pytest.raises(StoreError, match=r"needs server 1\.14; use storage='payload'"):
        shop.apply_to()
    assert shop.names() == ["photos"]


def test_what_comes_changes_and_goes_while_the_copy_fills_is_in_it(shop):
    fresh = clustered(7, 3)
    events = {
        "reading the gallery": lambda: shop.plain.delete("shop", [1]),
        "writing offsets": lambda: (
            shop.plain.delete("shop", [2]),
            shop.plain.upsert("shop", [shop.point(3, fresh[0]), shop.point(500, fresh[1])]),
            shop.plain.set_payload("shop", {"colour": "grey"}, points=[4]),
            shop.plain.update_vectors("shop", [models.PointVectors(id=5, vector={"image": fresh[2].tolist()})]),
        ),
    }
    shop.apply_to(progress=lambda what, done, total: events.pop(what, lambda: None)())
    assert not events
    assert shop.content() == shop.content("photos")
    report = hubplugin_qdrant.inspect(shop.plain, "shop")
    assert (report.missing, report.stale) == (0, 0)


def test_what_is_written_between_the_last_scan_and_the_switch_is_in_the_copy_unless_it_was_changed_there(
    client, monkeypatch
):
    shop, switch = Aliased.on(client, "image", models.Distance.DOT), copies._switch
    fresh = clustered(7, 3)

    def late(client, aliases, collection):
        client.upsert("shop", [shop.point(0, fresh[0]), shop.point(500, fresh[1])])
        client.delete("shop", [1, 2])
        client.set_payload("shop", {"n": "late"}, points=[3, 4])
        client.clear_payload("shop", points_selector=[6])
        switch(client, aliases, collection)
        client.set_payload("shop", {"n": "new"}, points=[4])
        client.delete("shop", [5])

    monkeypatch.setattr(copies, "_switch", late)
    wrapped = shop.apply_to()
    found = {point.id: point for point in wrapped.scroll("shop", limit=1000, with_vectors=True)[0]}
    assert found.keys() == {*range(ROWS), 500, 900} - {1, 2, 5}
    np.testing.assert_allclose([found[0].vector["image"], found[500].vector["image"]], fresh[:2], atol=1e-6)
    assert [found[key].payload["n"] for key in (3, 4)] == ["late", "new"]
    assert found[6].payload == {}
    report = hubplugin_qdrant.inspect(client, "shop")
    assert (report.missing, report.stale) == (0, 0)


def test_what_is_written_between_the_last_scan_and_the_switch_back_is_in_the_collection_unless_it_was_changed_there(
    client, monkeypatch
):
    shop, switch = Aliased.on(client, "image", models.Distance.DOT), copies._switch
    wrapped, fresh = shop.apply_to(), clustered(7, 2)

    def late(client, aliases, collection):
        wrapped.upsert("shop", [shop.point(0, fresh[0]), shop.point(500, fresh[1])])
        wrapped.delete("shop", [1, 2])
        wrapped.set_payload("shop", {"n": "late"}, points=[3, 4])
        switch(client, aliases, collection)
        client.set_payload("shop", {"n": "new"}, points=[4])
        client.delete("shop", [5])

    monkeypatch.setattr(copies, "_switch", late)
    hubplugin_qdrant.remove(client, "shop")
    assert (shop.names(), shop.stands_for()) == (["photos"], {"shop": "photos"})
    found = {point.id: point for point in client.scroll("shop", limit=1000, with_vectors=True)[0]}
    assert found.keys() == {*range(ROWS), 500, 900} - {1, 2, 5}
    np.testing.assert_allclose([found[0].vector["image"], found[500].vector["image"]], fresh, atol=1e-6)
    assert [found[key].payload["n"] for key in (3, 4)] == ["late", "new"]
    assert not any("hub_offset" in point.payload for point in found.values())


def test_a_vector_without_direction_is_copied_too(shop):
    shop.plain.upsert("photos", [shop.point(500, np.zeros(DIM, np.float32))])
    shop.apply_to()
    assert shop.content() == shop.content("photos")
    hubplugin_qdrant.remove(shop.plain, "shop")
    assert shop.plain.count("shop").count == ROWS + 2


NESTED = {"size": 20 / 7, "deep": [{"er": [20 / 7, True, None, "x"]}, 1]}


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        ({"size": math.nextafter(20 / 7, 9), "deep": [{"er": [math.nextafter(20 / 7, 0), True, None, "x"]}, 1]}, True),
        ({"size": 20 / 7 + 1e-9, "deep": NESTED["deep"]}, False),
        ({"size": 20 / 7, "deep": [{"er": [20 / 7, 1, None, "x"]}, 1]}, False),
        ({"size": 20 / 7, "deep": [{"er": [20 / 7, True, None, "x"]}, 1.0]}, False),
        ({"size": 20 / 7, "deep": [{"er": [20 / 7, True, None]}, 1]}, False),
        ({"size": 20 / 7}, False),
    ],
)
def test_payloads_are_the_same_if_their_numbers_differ_by_what_a_server_reads_them_off(other, alike):
    one, two = (copies.Content(1, {"image": [0.5]}, payload, {}) for payload in (NESTED, other))
    assert (one.like(two), two.like(one), one.digest == two.digest) == (alike, alike, alike)


def test_a_point_that_changes_all_the_time_has_its_last_change(client, monkeypatch):
    shop = Aliased.on(client, "image", models.Distance.DOT)
    switch, fill = copies._switch, copies.CopiedStore._fill
    changes = iter(range(1000, 2000))

    def change(*given):
        client.set_payload("photos", {"n": next(changes)}, points=[4])

    def changed_before(step):
        return lambda *given: (change(), step(*given))

    monkeypatch.setattr(copies, "_switch", changed_before(switch))
    monkeypatch.setattr(copies.CopiedStore, "_fill", changed_before(fill))
    shop.apply_to(progress=change)
    assert client.retrieve("shop", [4])[0].payload["n"] == next(changes) - 1


def test_a_removal_goes_back_to_the_collection_with_all_that_was_written_meanwhile(shop):
    wrapped = shop.apply_to()
    wrapped.upsert("shop", [shop.point(0, clustered(7, 1)[0]), shop.point(500, clustered(8, 1)[0])])
    wrapped.delete("shop", [1])
    after = shop.content()
    hubplugin_qdrant.remove(shop.plain, "shop")
    assert shop.stands_for() == {"shop": "photos"}
    assert shop.names() == ["photos"]
    assert shop.content() == after
    assert len(after) == ROWS + 1


def test_a_removal_makes_the_collection_anew_where_it_was_deleted(client):
    shop = Aliased.on(client, "", models.Distance.DOT)
    shop.apply_to()
    before = shop.content()
    client.delete_collection("photos")
    hubplugin_qdrant.remove(client, "shop")
    assert shop.names() == ["photos"]
    assert shop.content() == before
    assert isinstance(client.get_collection("photos").config.params.vectors, models.VectorParams)


def test_a_run_that_was_cut_off_goes_on_and_a_removal_takes_its_copy_out(shop, monkeypatch):
    monkeypatch.setattr("hubplugin_qdrant.store.BATCH", 10)

    def stop(what, done, total):
        if what == "writing offsets" and done >= ROWS // 2:
            raise KeyboardInterrupt

    before = shop.content("photos")
    with pytest.raises(KeyboardInterrupt):
        shop.apply_to(progress=stop)
    assert shop.stands_for() == {"shop": "photos"}
    applied = hubplugin_qdrant.apply(shop.plain, "shop", shop.bank, **shop.settings())
    assert applied.missing == ROWS // 2
    hubplugin_qdrant.remove(shop.plain, "shop")
    with pytest.raises(KeyboardInterrupt):
        shop.apply_to(progress=stop)
    hubplugin_qdrant.remove(shop.plain, "shop")
    assert (shop.names(), shop.content()) == (["photos"], before)


def test_a_second_fit_gets_a_copy_of_its_own_and_the_first_one_goes(shop):
    shop.apply_to()
    wrapped = shop.apply_to(method="nnn")
    assert shop.names() == ["photos", "photos--v2", "photos--v2--hub"]
    model = QdrantStore(shop.plain, "shop").correction().model
    assert [p.id for p in wrapped.query_points("shop", shop.queries[0], "image").points] == shop.best_of(
        model, shop.queries[0]
    )
    hubplugin_qdrant.refresh(shop.plain, "shop")
    hubplugin_qdrant.remove(shop.plain, "shop")
    assert shop.names() == ["photos"]


def test_a_copy_takes_the_place_of_offsets_in_the_payload(shop):
    shop.apply_to("shop", storage="payload")
    wrapped = shop.apply_to("shop")
    model = QdrantStore(shop.plain, "shop").correction().model
    found = wrapped.query_points("shop", shop.queries[0], "image").points
    assert [point.id for point in found] == shop.best_of(model, shop.queries[0])
    hubplugin_qdrant.remove(shop.plain, "shop")
    assert shop.names() == ["photos"]
    assert all("hub_offset" not in record.payload for record in shop.plain.scroll("photos", limit=1000)[0])


def test_a_copy_has_the_settings_of_the_collection(client):
    client.create_collection(
        "photos",
        {"image": models.VectorParams(size=DIM, distance=models.Distance.DOT, on_disk=True)},
        sparse_vectors_config={"words": models.SparseVectorParams(modifier=models.Modifier.IDF)},
    )
    words = models.SparseVector(indices=[3, 7], values=[0.5, 0.25])
    client.upload_points(
        "photos",
        [
            models.PointStruct(id=row, vector={"image": vector.tolist(), "words": words})
            for row, vector in enumerate(clustered(1, 50))
        ],
    )
    given = {"using": "image", "storage": "vector", "method": "is", "force": True}
    hubplugin_qdrant.apply(client, "photos", clustered(2, 30), alias="shop", **given)
    before, after = (client.get_collection(name).config.params for name in ("photos", "shop"))
    assert after.sparse_vectors == before.sparse_vectors
    assert after.vectors["image"] == before.vectors["image"]
    assert set(after.vectors) == {"image", "hub_v1"}
    assert client.retrieve("shop", [3], with_vectors=True)[0].vector["words"] == words


def test_a_collection_without_an_alias_is_refused_with_what_to_do(client):
    plain = Photos(client, "image", models.Distance.DOT, "vector")
    with pytest.raises(StoreError, match=r"this one is 1\.17.*give it one with alias=.*or use storage='payload'"):
        plain.apply()
    with pytest.raises(InputError, match="alias='photos' is taken"):
        plain.apply(alias="photos")
    assert [found.name for found in client.get_collections().collections] == ["photos"]


def test_two_copies_at_once_are_refused(shop):
    refused = []

    def meanwhile(what, done, total):
        if what == "writing offsets" and not refused:
            with pytest.raises(StoreError, match="another run is writing") as caught:
                shop.apply_to(method="nnn")
            refused.append(caught)

    shop.apply_to(progress=meanwhile)
    assert refused
    assert QdrantStore(shop.plain, "shop").correction().model.method == "is"


def test_a_copy_that_is_in_use_is_not_filled_again(shop):
    wrapped = shop.apply_to()
    wrapped.upsert("shop", [shop.point(500, clustered(7, 1)[0])])
    before = shop.content()
    for method in ("is", "nnn"):
        with pytest.raises(StoreError, match="'photos--v1' is in use as 'shop': apply to that"):
            shop.apply_to("photos", alias="window", method=method)
    assert shop.content() == before
    assert shop.stands_for() == {"shop": "photos--v1"}


def test_a_collection_of_the_user_that_is_called_like_a_copy_is_left_alone(shop):
    shop.plain.create_collection("photos--v1", models.VectorParams(size=DIM, distance=models.Distance.DOT))
    with pytest.raises(StoreError, match="'photos--v1', as the copy would be called, is not ours"):
        shop.apply_to()
    assert shop.names() == ["photos", "photos--v1"]


def test_a_removal_leaves_the_copy_alone_that_another_run_is_filling(shop):
    names = []

    def meanwhile(what, done, total):
        if what == "writing offsets" and not names:
            hubplugin_qdrant.remove(shop.plain, "shop")
            names.extend(shop.names())

    shop.apply_to(progress=meanwhile)
    assert names == ["photos", "photos--v1", "photos--v1--hub"]
    assert shop.stands_for() == {"shop": "photos--v1"}


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("payload", "each point of 'photos' would get a number 'v1' under the payload key 'hub_offset'"),
        (
            "vector",
            r"'photos' would be copied to 'photos--v1', with a vector 'hub_v1' of 9 .*\n'shop' would then stand",
        ),
    ],
)
def test_a_dry_run_says_what_would_be_done_and_does_nothing(shop, storage, said):
    before = shop.plain.scroll("photos", limit=1000, with_vectors=True)[0]
    settings = shop.settings() | {"storage": storage}
    applied = hubplugin_qdrant.apply(shop.plain, "shop", shop.bank, dry_run=True, **settings)
    assert re.search(said, str(applied))
    assert (applied.scanned, applied.missing, applied.written) == (ROWS, ROWS, False)
    assert shop.names() == ["photos"]
    assert shop.plain.scroll("photos", limit=1000, with_vectors=True)[0] == before


class Killed(BaseException):
    """Nothing catches it, as nothing does a kill."""


class Mortal:
    """A client that is killed after so many requests."""

    def __init__(self, client, requests):
        self.client, self.left = client, requests

    def __getattr__(self, name):
        found = getattr(self.client, name)
        if name.startswith("_") or not callable(found):
            return found

        def call(*given, **named):
            answer = found(*given, **named)
            self.left -= 1
            if self.left == 0:
                raise Killed
            return answer

        return call


@pytest.mark.parametrize("again", [False, True], ids=["first", "second"])
def test_a_copy_that_is_killed_at_any_moment_is_finished_or_removed_by_the_next_run(monkeypatch, again):
    monkeypatch.setattr("hubplugin_qdrant.store._alive", lambda lease, host: False)
    monkeypatch.setattr("hubplugin_qdrant.store.BATCH", 60)
    monkeypatch.setattr(Photos, "gallery", Photos.gallery[:50])
    monkeypatch.setattr(QdrantStore, "release", lambda store: None)  # which a killed run does not come to
    jobs = {
        "apply": lambda client, shop: hubplugin_qdrant.apply(
            client, "shop", shop.bank, using="image", **(shop.settings() | ({"method": "csls"} if again else {}))
        ),
        "remove": lambda client, shop: hubplugin_qdrant.remove(client, "shop", using="image"),
    }
    for job, moments in (("apply", range(1, 60, 3)), ("remove", range(1, 60, 3))):
        for moment in moments:
            client = QdrantClient(":memory:")
            monkeypatch.setattr(client, "info", lambda: models.VersionInfo(title="", version="1.17.3"))
            shop = Aliased.on(client)
            shop.plain.query_points("photos", query=[1.0] * DIM, using="image")
            before = shop.content("photos")
            if again:
                shop.apply_to()
            if job == "remove":
                jobs["apply"](client, shop)
            try:
                jobs[job](Mortal(client, moment), shop)
                break
            except Killed:
                pass
            assert shop.content() == before
            jobs[job](client, shop)
            assert shop.content() == before
            if job == "apply":
                copy = shop.stands_for()["shop"]
                assert shop.names() == ["photos", copy, f"{copy}--hub"]
                jobs["remove"](client, shop)
            assert (shop.names(), shop.stands_for(), shop.content()) == (["photos"], {"shop": "photos"}, before)
        else:
            pytest.fail("there are more moments than were tried")
