"""Workers in processes of their own read, fit and write a collection by ranges of its ids."""

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context

import numpy as np
import pytest

import hubplugin
from hubplugin.errors import ClusterError
from integration_tests.galleries import APPLY, BANK

pytestmark = pytest.mark.needs("server")


def pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, mp_context=get_context("spawn"))


def offsets(store) -> dict[int | str, float]:
    return {
        key: value
        for batch in store.scan()
        for key, value in zip(batch.ids, batch.offsets.tolist(), strict=True)
    }


def test_a_worker_that_dies_while_it_writes_costs_its_shard(fill):
    alone, shared = (hubplugin.open_store(fill().url) for _ in range(2))
    hubplugin.apply(alone, BANK, **APPLY)

    def kill(task: str, done: int, total: int) -> None:
        if task.startswith("writing offsets"):  # of the first shard
            with suppress(
                ProcessLookupError
            ):  # dead by now, if another shard is reported meanwhile
                os.kill(next(iter(executor._processes)), signal.SIGKILL)

    with (
        pool() as executor,
        pytest.raises(ClusterError, match="the executor has lost its workers"),
    ):
        hubplugin.apply(
            shared,
            BANK,
            executor=executor,
            shards=6,
            compute=hubplugin.Compute(progress=kill),
            **APPLY,
        )
    assert not hubplugin.open_store(shared.url).correction().active
    with pool() as executor:
        hubplugin.apply(shared, BANK, executor=executor, shards=6, **APPLY)
    np.testing.assert_allclose(
        list(offsets(shared).values()), list(offsets(alone).values()), rtol=0, atol=1e-5
    )
