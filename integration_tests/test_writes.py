"""What an application writes to a corrected collection keeps it corrected."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from qdrant_client import models
from qdrant_client.http.exceptions import ResponseHandlingException

import hubplugin
from integration_tests.galleries import (
    LATER,
    OTHER_BANK,
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


THREADS, TASKS = 16, 64


def test_threads_and_tasks_lose_nothing_through_a_refit_and_rollbacks(
    backend, corrected
):
    """Each writes a point of its own over and over, changes its payload and searches."""
    rows, ended = len(corrected.ids), threading.Event()
    name, rounds = corrected.name, [0] * (THREADS + TASKS)
    hub, also = backend.wrapped(), backend.wrapped_async()

    def point(worker):
        vector = LATER[(worker + rounds[worker]) % len(LATER)]
        return corrected.point(point_id(rows + worker), vector, {"n": 0})

    def check(points):
        scores = [point.score for point in points]
        assert (len(scores), scores) == (K, sorted(scores, reverse=True))

    def work(worker):
        query = QUERIES[worker % len(QUERIES)]
        while not ended.is_set():
            rounds[worker] += 1
            written = point(worker)
            hub.upsert(name, [written])
            hub.set_payload(name, {"n": rounds[worker]}, points=[written.id])
            check(hub.query_points(name, query=query, limit=K).points)

    async def work_async(worker):
        query = QUERIES[worker % len(QUERIES)]
        while not ended.is_set():
            rounds[worker] += 1
            written = point(worker)
            payload = {"n": rounds[worker]}
            await answered(also.upsert, [written])
            await answered(also.set_payload, payload, points=[written.id])
            check((await answered(also.query_points, query, limit=K)).points)

    async def answered(request, *given, **named):
        while True:
            # So many tasks may meet a connection that the server closes just then.
            with suppress(ResponseHandlingException):
                return await request(name, *given, **named)

    async def work_together():
        workers = range(THREADS, THREADS + TASKS)
        await asyncio.gather(*map(work_async, workers))
        await also.close()

    with ThreadPoolExecutor(THREADS + 1) as pool:
        working = [pool.submit(work, worker) for worker in range(THREADS)]
        working.append(pool.submit(asyncio.run, work_together()))
        try:
            corrected.correct(bank=OTHER_BANK)
            for _ in range(2):
                hubplugin.rollback(corrected.store())
        finally:
            ended.set()
        for each in working:
            each.result()
    assert corrected.health() == (rows + THREADS + TASKS, 0, 0)
    content = corrected.content()
    for worker, last in enumerate(rounds):
        vector, stored = content[point_id(rows + worker)]
        assert stored["n"] == last > 0
        np.testing.assert_allclose(vector, point(worker).vector, atol=1e-6)
