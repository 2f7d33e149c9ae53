"""A running application knows of a collection what is no longer so: that was removed, or corrected anew, or an alias
was moved."""

import asyncio
import threading
from collections import Counter
from contextlib import contextmanager

import pytest
from qdrant_client import models

from integration_tests.galleries import QUERIES
from integration_tests.waiting import wait_until

pytestmark = pytest.mark.needs("server")


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
