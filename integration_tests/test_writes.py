"""What an application writes to a corrected collection keeps it corrected."""

import asyncio

import numpy as np
import pytest
from qdrant_client import models

from integration_tests.galleries import (
    LATER,
    QUERIES,
    K,
    point_id,
)

pytestmark = pytest.mark.needs("server")


@pytest.fixture
def corrected(gallery):
    gallery.model = gallery.correct()
    return gallery


FRESH = [point_id(1_000 + row) for row in range(4)]


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
