"""What an application writes to a corrected collection keeps it corrected."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from qdrant_client import models

import hubplugin_qdrant
from integration_tests.galleries import AGREED, APPLY, BANK, LATER, QUERIES, TARGETS, K, point_id

pytestmark = pytest.mark.needs("client")


@pytest.fixture
def corrected(backend, gallery):
    gallery.model = hubplugin_qdrant.apply(backend.client(), gallery.name, query_bank=BANK, **APPLY).model
    return gallery


def search(hub, gallery):
    return [[p.id for p in hub.query_points(gallery.name, query=query, limit=K).points] for query in QUERIES]


def health(backend, gallery):
    report = hubplugin_qdrant.inspect(backend.client(), gallery.name, probes=0)
    return report.count, report.missing, report.stale


def test_points_written_through_the_wrapper_need_no_refresh(backend, corrected):
    hub, rows = backend.wrapped(), len(corrected.ids)
    fresh = [point_id(rows + row) for row in range(len(LATER))]
    hub.upsert(
        corrected.name,
        [
            models.PointStruct(id=key, vector=vector.tolist(), payload={"row": rows})
            for key, vector in zip(fresh, LATER, strict=True)
        ],
    )
    changed = [models.PointVectors(id=corrected.ids[row], vector=TARGETS[row + 1].tolist()) for row in range(20)]
    hub.update_vectors(corrected.name, changed)
    hub.overwrite_payload(corrected.name, {"row": "overwritten"}, points=corrected.ids[20:40])
    hub.delete(corrected.name, corrected.ids[-10:])
    corrected.vectors = np.concatenate([TARGETS[1:21], corrected.vectors[20:-10], LATER])
    corrected.ids = corrected.ids[:-10] + fresh
    assert health(backend, corrected) == (len(corrected.ids), 0, 0)
    assert corrected.agreement(search(hub, corrected), corrected.model) >= AGREED
    shown = hub.retrieve(corrected.name, corrected.ids[20:40], with_payload=True)
    assert [record.payload for record in shown] == [{"row": "overwritten"}] * 20


def test_a_conditional_upsert_brings_offsets_for_what_it_writes(backend, corrected):
    backend.require((1, 17), "conditional upserts")
    hub, rows = backend.wrapped(), len(corrected.ids)
    keys = [corrected.ids[0], corrected.ids[1], point_id(rows)]
    points = [models.PointStruct(id=key, vector=LATER[0].tolist(), payload={"row": 0}) for key in keys]
    first = models.Filter(must=[models.FieldCondition(key="row", match=models.MatchValue(value=0))])
    hub.upsert(corrected.name, points, update_filter=first, update_mode=models.UpdateMode.UPDATE_ONLY)
    corrected.vectors = np.concatenate([LATER[:1], corrected.vectors[1:]])
    assert health(backend, corrected) == (rows, 0, 0)
    assert corrected.agreement(search(hub, corrected), corrected.model) >= AGREED


def test_what_others_left_in_the_place_of_offsets_is_told_and_taken_out(backend, corrected):
    client = backend.client()
    client.set_payload(corrected.name, {"hub_offset": {"v77": 1.5}}, points=corrected.ids[:3], wait=True)
    assert hubplugin_qdrant.inspect(client, corrected.name, probes=0).foreign == 3
    hubplugin_qdrant.remove(client, corrected.name)
    assert not any("hub_offset" in beside for _, beside in corrected.content().values())


def test_points_written_by_a_plain_client_are_found_and_then_refreshed(backend, corrected):
    fresh = [point_id(len(corrected.ids) + row) for row in range(len(LATER))]
    corrected.insert(fresh, LATER)
    hub = backend.wrapped()
    nearest = [hub.query_points(corrected.name, query=vector, limit=K).points for vector in LATER]
    assert all(key in [point.id for point in found] for key, found in zip(fresh, nearest, strict=True))
    corrected.ids, corrected.vectors = corrected.ids + fresh, np.concatenate([corrected.vectors, LATER])
    assert health(backend, corrected) == (len(corrected.ids), len(LATER), 0)
    hubplugin_qdrant.refresh(backend.client(), corrected.name)
    assert health(backend, corrected) == (len(corrected.ids), 0, 0)
    assert corrected.agreement(search(backend.wrapped(), corrected), corrected.model) >= AGREED


def test_ten_writers_and_ten_readers_at_once_lose_nothing(backend, corrected):
    rounds, rows = 5, len(corrected.ids)

    async def write(hub, writer):
        for turn in range(rounds):
            row = writer * rounds + turn
            key = point_id(rows + row)
            await hub.upsert(corrected.name, [models.PointStruct(id=key, vector=LATER[row].tolist(), payload={"n": 0})])
            await hub.set_payload(corrected.name, {"n": row}, points=[key])

    async def read(hub, reader):
        for turn in range(rounds):
            found = await hub.query_points(corrected.name, query=QUERIES[reader + turn], limit=K)
            assert len(found.points) == K
            assert [p.score for p in found.points] == sorted((p.score for p in found.points), reverse=True)

    async def everyone():
        hub = backend.wrapped_async()
        try:
            await asyncio.gather(*(work(hub, n) for n in range(10) for work in (write, read)))
        finally:
            await hub.close()

    asyncio.run(everyone())
    assert health(backend, corrected) == (rows + 10 * rounds, 0, 0)
    written = {key: beside["n"] for key, (_, beside) in corrected.content().items() if "n" in beside}
    assert written == {point_id(rows + row): row for row in range(10 * rounds)}
