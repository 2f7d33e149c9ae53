"""A gallery whose shards are reduced by the workers of an executor."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from hubplugin.cluster.run import Step
from hubplugin.cluster.work import Bank, Order, Reading, opened
from hubplugin.cluster.workspace import Workspace, step_name
from hubplugin.errors import EmptyInput, InputError
from hubplugin.reductions import Compute, Found, Similarities, Task
from hubplugin.vectors import Shard, Spread, fingerprint


class ShardedGallery(Spread):
    """The vectors of some `shards`, read by the workers of `executor`: checked once, then reduced as often as a fit
    asks. What each task finds lies in `workspace`. Those of the `shards` that have no vectors are left out.

    Raises InputError, naming shard and row, for what cannot be read, is no number, or has other dimensions.
    """

    def __init__(self, name: str, shards: Sequence[Shard], executor: Executor, workspace: Workspace, compute: Compute):
        self._executor, self._workspace, self._compute = executor, workspace, compute
        self._run = uuid.uuid4().hex
        self.shards, self._counts = list(shards), [1] * len(shards)  # for progress, as long as nothing is known
        shapes = [tuple(found["shape"].tolist()) for found in self.each_once([_Look()] * len(shards))]
        there = [number for number, (rows, _) in enumerate(shapes) if rows]
        if not there:
            raise EmptyInput(f"{name} is empty: none of its {len(shards)} shards has a vector; at least one is needed")
        first, dim = shards[there[0]], shapes[there[0]][1]
        for number in there:
            if shapes[number][1] != dim:
                raise InputError(
                    f"{shards[number].name} has {shapes[number][1]} dimensions, {first.name} has {dim}; "
                    "embed all with the same model"
                )
        self.shards, self._counts = [shards[number] for number in there], [shapes[number][0] for number in there]
        self._starts = [0, *np.cumsum(self._counts).tolist()]
        super().__init__(name, self._starts[-1], dim)

    def each(self, task: Task, similarities: Similarities) -> list[tuple[int, Found]]:
        compute = replace(similarities.compute, progress=None)
        bank = Bank(fingerprint(similarities.bank), similarities.metric, compute)
        orders = [Order(shard, task, bank, self._run) for shard in self.shards]
        step = Step(self._executor, self._workspace, step_name(task.what, task, bank), similarities.bank)
        return list(zip(self._starts[:-1], self._found(step, orders), strict=True))

    def each_once(self, tasks: Sequence[Reading]) -> list[Found]:
        """What a task of its own finds in each shard, without a bank."""
        orders = [Order(shard, task, None, self._run) for shard, task in zip(self.shards, tasks, strict=True)]
        return self._found(Step(self._executor, self._workspace, step_name(tasks[0].what, tasks)), orders)

    def some(self, rows: np.ndarray) -> np.ndarray:
        ends = np.searchsorted(rows, self._starts)
        places = zip(ends[:-1], ends[1:], self._starts[:-1], strict=True)
        taken = self.each_once([_Take(rows[first:last] - start) for first, last, start in places])
        return np.concatenate([found["rows"] for found in taken])

    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        for shard in self.shards:
            vectors = shard.vectors()
            if vectors is not None:
                yield from vectors.blocks(size)

    def _found(self, step: Step, orders: Sequence[Order]) -> list[Found]:
        what = f"{orders[0].task.what}, {len(orders)} shards"
        done, total, found = 0, sum(self._counts), dict[int, Found]()
        with closing(step.results(orders)) as results:
            for number, result in results:
                found[number] = result
                done += self._counts[number]
                self._compute.report(what, done, total)
        return [found[number] for number in range(len(orders))]


@dataclass(frozen=True)
class _Look(Reading):
    """Reads and checks all of a shard."""

    what: str = "reading the gallery"

    def __call__(self, order: Order) -> Found:
        vectors = opened(order)
        if vectors is None:
            return {"shape": np.zeros(2, np.int64)}
        for _ in vectors.blocks():
            pass
        return {"shape": np.array([vectors.rows, vectors.dim])}


@dataclass(frozen=True)
class _Take(Reading):
    """Some rows of a shard, which ascend."""

    rows: np.ndarray
    what: str = "taking a sample"

    def __call__(self, order: Order) -> Found:
        vectors = opened(order)
        assert vectors is not None
        return {"rows": vectors.some(self.rows) if len(self.rows) else np.empty((0, vectors.dim), np.float32)}
