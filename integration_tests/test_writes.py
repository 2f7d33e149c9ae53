"""What an application writes to a corrected collection keeps it corrected."""

import asyncio

import numpy as np
import pytest
from qdrant_client import models

import hubplugin
from integration_tests.galleries import (
    AGREED,
    LATER,
    QUERIES,
    TARGETS,
    K,
    assert_same,
    point_id,
)


@pytest.fixture
def corrected(gallery):
    gallery.model = gallery.correct()
    return gallery


def test_points_written_through_the_wrapper_need_no_refresh(backend, corrected):
    hub, rows = backend.wrapped(), len(corrected.ids)
    fresh = [point_id(rows + row) for row in range(len(LATER))]
    points = [
        corrected.point(key, vector, {"row": rows})
        for key, vector in zip(fresh, LATER, strict=True)
    ]
    hub.upsert(corrected.name, points)
    changed = [
        models.PointVectors(id=corrected.ids[row], vector=TARGETS[row + 1].tolist())
        for row in range(20)
    ]
    hub.update_vectors(corrected.name, changed)
    hub.overwrite_payload(
        corrected.name, {"row": "overwritten"}, points=corrected.ids[20:40]
    )
    hub.delete(corrected.name, corrected.ids[-10:])
    corrected.vectors = np.concatenate(
        [TARGETS[1:21], corrected.vectors[20:-10], LATER]
    )
    corrected.ids = corrected.ids[:-10] + fresh
    assert corrected.health() == (len(corrected.ids), 0, 0)
    assert corrected.agreement(hub, corrected.model) >= AGREED
    shown = hub.retrieve(corrected.name, corrected.ids[20:40], with_payload=True)
    assert [record.payload for record in shown] == [{"row": "overwritten"}] * 20


FRESH = [point_id(1_000 + row) for row in range(4)]
REFUSED = {
    "another dimension": lambda client, name: client.upsert(
        name,
        [
            models.PointStruct(id=key, vector=[1.0] * size)
            for key, size in zip(FRESH, (384, 5), strict=False)
        ],
    ),
    "a stream": lambda client, name: client.upsert(
        name, iter([models.PointStruct(id=1, vector=LATER[0].tolist())])
    ),
    "no point": lambda client, name: client.upload_points(
        name, [{"id": 1, "vector": LATER[0].tolist()}], wait=True
    ),
    "an unknown vector": lambda client, name: client.update_vectors(
        name, [models.PointVectors(id=FRESH[0], vector={"other": [1.0]})]
    ),
    "a selector that is none": lambda client, name: client.clear_payload(name, 7),
}


@pytest.mark.parametrize("write", REFUSED.values(), ids=REFUSED)
def test_what_the_plain_client_is_refused_is_refused_alike_and_nothing_is_written(
    backend, corrected, write
):
    before, refusals = corrected.content(), []
    for client in (backend.client(), backend.wrapped()):
        with pytest.raises(Exception) as refusal:  # noqa: PT011 - whatever it is, both are the same
            write(client, corrected.name)
        refusals.append(refusal.type)
    assert refusals[0] is refusals[1]
    assert_same(corrected.content(), before)


def test_what_misses_a_point_leaves_the_others_their_offsets(backend, corrected):
    hub, ids = backend.wrapped(), corrected.ids
    vectors = [
        models.PointVectors(id=key, vector=LATER[0].tolist())
        for key in (ids[0], FRESH[0])
    ]
    for write in (
        lambda: hub.update_vectors(corrected.name, vectors),
        lambda: hub.overwrite_payload(
            corrected.name, {"row": "overwritten"}, points=[ids[1], FRESH[0]]
        ),
        lambda: hub.clear_payload(corrected.name, points_selector=[ids[2], FRESH[0]]),
    ):
        with pytest.raises(
            Exception, match=f"{FRESH[0]}|No point with id"
        ):  # the client cuts off what a cluster says
            write()
    assert corrected.health() == (len(ids), 0, 0)
    content = corrected.content()
    assert content[ids[1]][1]["row"] == "overwritten"
    np.testing.assert_allclose(content[ids[0]][0], LATER[0], atol=1e-6)


def test_what_others_wrote_in_the_place_of_offsets_is_told_and_left(backend, corrected):
    client, theirs = backend.client(), set(corrected.ids[:3])
    client.set_payload(
        corrected.name,
        {"hub_offset": {"v77": "1.5"}},
        points=corrected.ids[:3],
        wait=True,
    )
    assert hubplugin.inspect(corrected.store(), queries=0).foreign == 3
    hubplugin.remove(corrected.store())
    left = {
        key: payload.get("hub_offset")
        for key, (_, payload) in corrected.content().items()
    }
    assert left == {
        key: {"v77": "1.5"} if key in theirs else None for key in corrected.ids
    }


THEIRS = [
    5,
    "",
    True,
    None,
    {},
    {"city": 3},
    {"v1": "one"},
    {"v1": 0.5, "city": 3},
    [1, 2],
    [None],
]


def test_a_payload_key_that_the_user_has_is_refused_and_another_one_taken(
    backend, fill
):
    gallery, client = fill(rows=60), backend.client()
    key, (vector, before) = next(iter(gallery.content().items()))
    for theirs in THEIRS:
        point = models.PointStruct(
            id=key, vector=vector, payload=before | {"hub_offset": theirs}
        )
        client.upsert(gallery.name, [point], wait=True)
        for dry_run in (True, False):
            with pytest.raises(
                hubplugin.StoreError,
                match=f"holds something of yours, in point {key!r}",
            ):
                gallery.correct("payload", dry_run=dry_run)
    content = gallery.content()
    model = gallery.correct("payload", offset_key="nudge")
    assert gallery.agreement(backend.wrapped(), model) >= AGREED
    assert gallery.health()[1] == 0
    hubplugin.remove(gallery.store())
    assert_same(gallery.content(), content)


def test_ten_writers_and_ten_readers_at_once_lose_nothing(backend, corrected):
    rounds, rows = 5, len(corrected.ids)

    async def write(hub, writer):
        for row in range(writer * rounds, (writer + 1) * rounds):
            key = point_id(rows + row)
            await hub.upsert(
                corrected.name, [corrected.point(key, LATER[row], {"n": 0})]
            )
            await hub.set_payload(corrected.name, {"n": row}, points=[key])

    async def read(hub, reader):
        for query in QUERIES[reader : reader + rounds]:
            points = (
                await hub.query_points(corrected.name, query=query, limit=K)
            ).points
            scores = [point.score for point in points]
            assert (len(scores), scores) == (K, sorted(scores, reverse=True))

    async def run_all():
        hub = backend.wrapped_async()
        try:
            await asyncio.gather(
                *(work(hub, n) for n in range(10) for work in (write, read))
            )
        finally:
            await hub.close()

    asyncio.run(run_all())
    assert corrected.health() == (rows + 10 * rounds, 0, 0)
    written = {
        key: payload["n"]
        for key, (_, payload) in corrected.content().items()
        if "n" in payload
    }
    assert written == {point_id(rows + row): row for row in range(10 * rounds)}
