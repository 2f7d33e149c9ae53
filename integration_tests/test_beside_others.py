"""What applications that search and write notice while a correction is made, and what
workers lose that die."""

import asyncio
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context

import numpy as np
import pytest
from qdrant_client import models
from qdrant_client.http.exceptions import ResponseHandlingException

import hubplugin
import hubplugin_qdrant.transport
from hubplugin import Compute
from hubplugin.errors import ClusterError
from hubplugin_qdrant import metadata
from integration_tests.galleries import (
    APPLY,
    BANK,
    LATER,
    OTHER_BANK,
    QUERIES,
    K,
    point_id,
)
from integration_tests.servers import wait_until


def test_an_alias_that_is_moved_under_load_fails_no_search(backend, fill):
    corrected, raw = fill(using="code"), fill(using="code")
    corrected.correct("vector")
    alias, stop, outcomes = f"{corrected.name}-alias", threading.Event(), Counter()

    def move(to):
        create = models.CreateAlias(collection_name=to.name, alias_name=alias)
        operation = models.CreateAliasOperation(create_alias=create)
        raw.client.update_collection_aliases([operation])

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


def test_answers_are_entirely_old_or_entirely_new_while_the_bank_changes(
    gallery, monkeypatch
):
    # So long a search may take that read the old manifest.
    monkeypatch.setattr(metadata, "MANIFEST_SECONDS", 2.0)
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 25)
    gallery.correct()
    answers = []
    done = threading.Event()

    def search(task="writing offsets", *_):
        if task in ("writing offsets", "closing"):
            answers.append(gallery.store().search(QUERIES[:10], K).ids)

    def search_all_the_while():
        while not done.is_set():
            search()

    search()
    beside = threading.Thread(target=search_all_the_while)
    beside.start()
    try:
        gallery.correct(bank=OTHER_BANK, compute=Compute(progress=search))
    finally:
        done.set()
        beside.join()
    search()
    old, new = answers[0], answers[-1]
    assert sum(a != b for a, b in zip(old, new, strict=True)) >= 5
    assert len(answers) >= 5
    for answer in answers:
        assert all(ids in (a, b) for ids, a, b in zip(answer, old, new, strict=True))


THREADS, TASKS = 16, 64


@pytest.mark.parametrize("using", ["", "code"], ids=["unnamed", "named"])
def test_threads_and_tasks_lose_nothing_through_a_refit_and_rollbacks(
    backend, fill, using
):
    """Each writes a point of its own again and again, and searches."""
    corrected = fill(using=using)
    corrected.correct()
    rows, ended = len(corrected.ids), threading.Event()
    name, rounds = corrected.name, [0] * (THREADS + TASKS)
    hub, also = backend.wrapped(), backend.wrapped_async()

    def point(worker):
        vector = LATER[(worker + rounds[worker]) % len(LATER)]
        return corrected.point(point_id(rows + worker), vector, {"n": 0})

    def begin_round(worker):
        """Return the arguments of a write, every other one not waited for, of a change
        and of a search."""
        rounds[worker] += 1
        written = {"points": [point(worker)], "wait": rounds[worker] % 2 == 0}
        change = {"payload": {"n": rounds[worker]}, "points": [point_id(rows + worker)]}
        query = QUERIES[worker % len(QUERIES)]
        return written, change, {"query": query, "using": using or None, "limit": K}

    def check(found):
        scores = [point.score for point in found.points]
        assert (len(scores), scores) == (K, sorted(scores, reverse=True))

    def work(worker):
        while not ended.is_set():
            written, change, search = begin_round(worker)
            answered(hub.upsert, written)
            answered(hub.set_payload, change)
            check(answered(hub.query_points, search))

    def answered(request, given):
        while True:
            # Among so many requests, a plain client, too, meets a closed connection.
            with suppress(ResponseHandlingException):
                return request(name, **given)

    async def work_async(worker):
        while not ended.is_set():
            written, change, search = begin_round(worker)
            await answered_async(also.upsert, written)
            await answered_async(also.set_payload, change)
            check(await answered_async(also.query_points, search))

    async def answered_async(request, given):
        while True:
            with suppress(ResponseHandlingException):
                return await request(name, **given)

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
        held = vector["code"] if using else vector
        wanted = LATER[(worker + last) % len(LATER)]
        np.testing.assert_allclose(held, wanted, atol=1e-6)


def test_a_worker_that_dies_while_it_writes_costs_its_shard(fill):
    alone, shared = fill(), fill()
    hubplugin.apply(hubplugin.open_store(alone.url), BANK, **APPLY)

    def apply_shared(**given):
        context = get_context("spawn")
        with ProcessPoolExecutor(2, mp_context=context) as executor:
            pools.append(executor)
            store = hubplugin.open_store(shared.url)
            hubplugin.apply(store, BANK, executor=executor, shards=6, **APPLY, **given)

    def kill(task, done, total):
        if task.startswith("writing offsets"):  # of the first shard
            # It is dead by now, if another shard is reported meanwhile.
            with suppress(ProcessLookupError):
                os.kill(next(iter(pools[0]._processes)), signal.SIGKILL)

    pools = []
    with pytest.raises(ClusterError, match="the executor has lost its workers"):
        apply_shared(compute=Compute(progress=kill))
    assert not shared.store().correction().active
    apply_shared()
    one, other = (offsets(gallery.store()) for gallery in (alone, shared))
    assert other == pytest.approx(one, abs=1e-5, rel=0)


def offsets(store):
    return {
        key: value
        for batch in store.scan()
        for key, value in zip(batch.ids, batch.offsets.tolist(), strict=True)
    }
