"""A running application knows of a collection what is no longer so: that was removed, or corrected anew, or an alias
was moved."""

import asyncio
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest
from qdrant_client import models

import hubplugin
from hubplugin_qdrant import metadata
from hubplugin_qdrant.calls import run
from integration_tests.galleries import LATER, OTHER_BANK, QUERIES, point_id
from integration_tests.waiting import wait_until

pytestmark = pytest.mark.needs("server")

FRESH = [point_id(2_000 + row) for row in range(len(LATER))]


def points(rows):
    return [
        models.PointStruct(
            id=FRESH[row], vector={"code": LATER[row].tolist()}, payload={"row": row}
        )
        for row in rows
    ]


def moved(ids):
    vectors = zip(ids, LATER, strict=False)
    return [
        models.PointVectors(id=key, vector={"code": vector.tolist()})
        for key, vector in vectors
    ]


def filter_of(ids):
    return models.Filter(must=[models.HasIdCondition(has_id=ids)])


WRITES = {
    "upsert": lambda c, name, ids: c.upsert(name, points(range(8))),
    "upsert without waiting": lambda c, name, ids: c.upsert(
        name, points(range(8, 16)), wait=False
    ),
    "upsert without payload": lambda c, name, ids: c.upsert(
        name, [models.PointStruct(id=ids[0], vector={"code": LATER[0].tolist()})]
    ),
    "upload points": lambda c, name, ids: c.upload_points(
        name, points(range(16, 24)), batch_size=3
    ),
    "upload a collection": lambda c, name, ids: c.upload_collection(
        name, {"code": LATER[24:32]}, ids=FRESH[24:32], batch_size=3
    ),
    "update": lambda c, name, ids: c.update_vectors(name, moved(ids[1:6])),
    "overwrite": lambda c, name, ids: c.overwrite_payload(
        name, {"row": 1}, points=ids[6:9]
    ),
    "overwrite by a filter": lambda c, name, ids: c.overwrite_payload(
        name, {"row": 1}, points=filter_of(ids[9:12])
    ),
    "clear": lambda c, name, ids: c.clear_payload(
        name, points_selector=filter_of(ids[12:15])
    ),
    "delete vectors": lambda c, name, ids: c.delete_vectors(
        name, ["code"], points=ids[15:18]
    ),
    "several": lambda c, name, ids: c.batch_update_points(
        name,
        [
            models.UpdateVectorsOperation(
                update_vectors=models.UpdateVectors(points=moved(ids[18:20]))
            ),
            models.ClearPayloadOperation(
                clear_payload=models.PointIdsList(points=ids[18:21])
            ),
        ],
    ),
}


def stays(client, name):
    """Reads the state of now, and the models, and does not look again by itself."""
    client.query_points(name, QUERIES[0], "code")
    cached = client._corrections.manifests[name]
    cached.until = time.monotonic() + 1e6
    run(client._corrections.read_models(cached))
    return client


@pytest.mark.parametrize("change", ["remove", "another fit", "two more fits"])
def test_what_is_written_by_an_old_state_is_brought_to_the_new_one(
    backend, fill, storage, change, monkeypatch
):
    monkeypatch.setattr(
        metadata, "MANIFEST_SECONDS", 0.0
    )  # no job waits for clients, of which none looks again
    gallery = fill(using="code")
    gallery.correct(storage)
    writers = {write: stays(backend.wrapped(), gallery.name) for write in WRITES}
    if change == "remove":
        hubplugin.remove(gallery.store())
    else:
        for tau in (0.05, 0.04) if change == "two more fits" else (0.05,):
            gallery.correct(storage, OTHER_BANK, tau=tau)
    for write, writer in writers.items():
        WRITES[write](writer, gallery.name, gallery.ids)
    if change != "remove":
        report = hubplugin.inspect(gallery.store(), queries=0)
        assert (report.missing, report.stale, report.foreign) == (0, 0, 0)
        hubplugin.remove(gallery.store())
    for vectors, payload in gallery.content().values():
        assert "hub_offset" not in payload
        assert not any(name.startswith("hub_") for name in vectors)


def test_an_alias_that_is_moved_under_load_fails_no_search(backend, fill):
    corrected, raw, client = fill(using="code"), fill(using="code"), backend.client()
    corrected.correct("vector")
    alias, stop, outcomes = f"{corrected.name}-alias", threading.Event(), Counter()

    def move(to):
        create = models.CreateAlias(collection_name=to.name, alias_name=alias)
        client.update_collection_aliases(
            [models.CreateAliasOperation(create_alias=create)]
        )

    @contextmanager
    def counted():
        try:
            yield
            outcomes["answered"] += 1
        except Exception as error:
            outcomes[repr(error)[:200]] += 1

    def search(hub, row):
        while not stop.is_set():
            with counted():
                hub.query_points(alias, QUERIES[row], "code", limit=3)

    async def search_async(hub, row):
        while not stop.is_set():
            with counted():
                await hub.query_points(alias, QUERIES[row], "code", limit=3)

    async def search_together(hub):
        await asyncio.gather(*(search_async(hub, row) for row in range(8)))

    move(corrected)
    hub, also = backend.wrapped(), backend.wrapped_async()
    threads = [threading.Thread(target=search, args=(hub, row)) for row in range(8)]
    threads.append(threading.Thread(target=lambda: asyncio.run(search_together(also))))
    for thread in threads:
        thread.start()
    for turn in range(12):
        so_far = outcomes.total()
        wait_until(lambda so_far=so_far: outcomes.total() >= so_far + 100)
        move([raw, corrected][turn % 2])
    stop.set()
    for thread in threads:
        thread.join()
    assert set(outcomes) == {"answered"}
