"""A gallery whose shards are reduced by the workers of an executor."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np

from hubplugin.cluster.work import Bank, Order, Reading, opened, work
from hubplugin.cluster.workspace import Workspace, step_name
from hubplugin.compute import Compute, ShardResult, Similarities, Task
from hubplugin.errors import ClusterError, EmptyInput, HubpluginError, InputError, Parameter
from hubplugin.metric import Metric
from hubplugin.vectors import Directed, DirectedShard, Shard, Spread, fingerprint, one_line

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""How often a task is tried whose worker is lost, or that fails for no fault of the vectors."""

SILENT_SECONDS = 30.0
"""After so long without any result an executor that can tell is asked whether it has workers at all."""

LONG_SECONDS = 600.0
"""After so long without any result it is told what the run waits for."""


@dataclass
class Step:
    """The orders of one step, of which those whose results lie in `workspace` under `name` are not sent again.

    bank: [m, d], sent to workers that do not know it.
    """

    executor: Executor
    workspace: Workspace
    name: str
    bank: np.ndarray | None = None
    _pending: dict[Future[ShardResult | None], tuple[int, Order]] = field(default_factory=dict)

    def results(self, orders: Sequence[Order]) -> Generator[tuple[int, ShardResult], None, None]:
        """The number of each order and what was found, as they come. Where the caller stops, as by Ctrl-C, what still
        runs is cancelled, and what has come by then is kept."""
        try:
            for number, order in enumerate(orders):
                before = self.workspace.read(self.name, _file_name(number, order))
                if before is None:
                    self._submit(number, order)
                else:
                    yield number, before
            logger.info("%s: %d of %d shards to do", self.name, len(self._pending), len(orders))
            while self._pending:
                for future in self._ended():
                    number, order = self._pending.pop(future)
                    found = self._result(future, number, order)
                    if found is not None:
                        self._keep(number, order, found)
                        yield number, found
        finally:
            for future, (number, order) in self._pending.items():
                if not future.cancel() and future.done() and future.exception() is None:
                    self._keep(number, order, future.result())
            self._pending.clear()

    def _ended(self) -> set[Future[ShardResult | None]]:
        """Those that have ended, at least one. Waits for it, and tells once where there is nobody to wait for, and what
        it waits for where that takes long."""
        ended = wait(self._pending, SILENT_SECONDS, FIRST_COMPLETED).done
        has_workers, silent = getattr(self.executor, "has_workers", None), SILENT_SECONDS
        while not ended:
            if has_workers is not None and not has_workers():
                logger.warning(
                    "nothing has come for %g s, for the cluster has no worker; start some, and this run goes on, or "
                    "stop it: with workspace= what is done is not lost",
                    SILENT_SECONDS,
                )
                has_workers = None
            elif silent < LONG_SECONDS <= silent + SILENT_SECONDS:
                _, order = next(iter(self._pending.values()))
                logger.warning(
                    "nothing has come for %g s; this run goes on waiting for %d shards, such as %s: %s. If the workers "
                    "hang, stop it: with workspace= what is done is not lost",
                    LONG_SECONDS,
                    len(self._pending),
                    order.shard.name,
                    order.task.what,
                )
            silent += SILENT_SECONDS
            ended = wait(self._pending, SILENT_SECONDS, FIRST_COMPLETED).done
        return ended

    def _result(self, future: Future[ShardResult | None], number: int, order: Order) -> ShardResult | None:
        """What an order found; None if it had to be sent again."""
        try:
            found = future.result()
        except BrokenExecutor as error:
            raise _broken(error) from None
        except Exception as error:
            told = getattr(error, "cause", error)  # Ray wraps an error in pages of its own
            if isinstance(told, HubpluginError):
                raise told from None
            if order.attempt == ATTEMPTS:
                raise ClusterError(
                    f"{order.shard.name}: {order.task.what} failed {ATTEMPTS} times, the last time with "
                    f"{type(error).__name__}: {one_line(error)}"
                ) from None
            logger.warning("%s: %s failed with %s, done again", order.shard.name, order.task.what, type(error).__name__)
            self._submit(number, replace(order, attempt=order.attempt + 1))
            return None
        if found is None:
            assert order.bank is not None
            self._submit(number, replace(order, bank=replace(order.bank, rows=self.bank)))
        return found

    def _keep(self, number: int, order: Order, found: ShardResult | None) -> None:
        if found is not None:
            self.workspace.write(self.name, _file_name(number, order), found)

    def _submit(self, number: int, order: Order) -> None:
        try:
            self._pending[self.executor.submit(work, order)] = (number, order)
        except RuntimeError as error:  # shut down, or broken
            raise _broken(error) from None


def _file_name(number: int, order: Order) -> str:
    return f"{number:05d}-{hashlib.sha256(order.shard.identity.encode()).hexdigest()[:16]}"


def _broken(error: RuntimeError) -> ClusterError:
    return ClusterError(
        f"the executor has lost its workers ({type(error).__name__}: {one_line(error)}); start a new one and run "
        "it again: with the same ",
        Parameter("workspace"),
        ", what is done is not done again",
    )


class ShardedGallery(Spread):
    """The vectors of some `shards`, read by the workers of `executor`: checked once, then reduced as often as a fit
    asks. What each task finds lies in `workspace`. Those of the `shards` that have no vectors are left out, and under
    cosine zero vectors: `left_out` tells how many.

    Raises InputError, naming shard and row, for what cannot be read, is no number, or has other dimensions.
    """

    def __init__(
        self,
        name: str,
        shards: Sequence[Shard],
        metric: Metric,
        executor: Executor,
        workspace: Workspace,
        compute: Compute,
    ):
        self._executor, self._workspace, self._compute = executor, workspace, compute
        self._run = uuid.uuid4().hex
        self._rows_of: dict[str, int] = {}
        shards = [DirectedShard(shard, metric) for shard in shards]
        looked = self.each_once([_Look()] * len(shards), shards)
        shapes = [tuple(found["shape"].tolist()) for found in looked]
        self.left_out = sum(int(found["left_out"]) for found in looked)
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
        self.shards, counts = [shards[number] for number in there], [shapes[number][0] for number in there]
        self._rows_of = {shard.identity: count for shard, count in zip(self.shards, counts, strict=True)}
        self._starts = [0, *np.cumsum(counts).tolist()]
        super().__init__(name, self._starts[-1], dim)

    def each(self, task: Task, similarities: Similarities) -> list[tuple[int, ShardResult]]:
        compute = similarities.compute.quiet
        bank = Bank(fingerprint(similarities.bank), similarities.metric, compute)
        orders = [Order(shard, task, bank, self._run) for shard in self.shards]
        step = Step(self._executor, self._workspace, step_name(task.what, task, bank), similarities.bank)
        return list(zip(self._starts[:-1], self._found(step, orders), strict=True))

    def each_once(self, tasks: Sequence[Reading], shards: Sequence[Shard]) -> list[ShardResult]:
        """What a task of its own finds in each of `shards`, without a bank."""
        orders = [Order(shard, task, None, self._run) for shard, task in zip(shards, tasks, strict=True)]
        return self._found(Step(self._executor, self._workspace, step_name(tasks[0].what, tasks)), orders)

    def some(self, rows: np.ndarray) -> np.ndarray:
        ends = np.searchsorted(rows, self._starts)
        places = zip(ends[:-1], ends[1:], self._starts[:-1], strict=True)
        taken = self.each_once([_Take(rows[first:last] - start) for first, last, start in places], self.shards)
        return np.concatenate([found["rows"] for found in taken])

    def raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        for shard in self.shards:
            vectors = shard.vectors()
            if vectors is not None:
                yield from vectors.blocks(size)

    def _found(self, step: Step, orders: Sequence[Order]) -> list[ShardResult]:
        what = f"{orders[0].task.what}, {len(orders)} shards"
        counts = [self._rows_of.get(order.shard.identity, 1) for order in orders]  # 1 as long as nothing is known
        done, total, found = 0, sum(counts), dict[int, ShardResult]()
        with closing(step.results(orders)) as results:
            for number, result in results:
                found[number] = result
                done += counts[number]
                self._compute.report(what, done, total)
        return [found[number] for number in range(len(orders))]


@dataclass(frozen=True)
class _Look(Reading):
    """Reads and checks all of a shard."""

    what: str = "reading the gallery"

    def __call__(self, order: Order) -> ShardResult:
        vectors = opened(order)
        if vectors is None:
            whole = order.shard.whole.vectors() if isinstance(order.shard, DirectedShard) else None
            return {"shape": np.zeros(2, np.int64), "left_out": np.array(0 if whole is None else whole.rows)}
        for _ in vectors.blocks():
            pass
        left_out = vectors.left_out if isinstance(vectors, Directed) else 0
        return {"shape": np.array([vectors.rows, vectors.dim]), "left_out": np.array(left_out)}


@dataclass(frozen=True)
class _Take(Reading):
    """Some rows of a shard, which ascend."""

    rows: np.ndarray
    what: str = "taking a sample"

    def __call__(self, order: Order) -> ShardResult:
        vectors = opened(order)
        assert vectors is not None
        return {"rows": vectors.some(self.rows) if len(self.rows) else np.empty((0, vectors.dim), np.float32)}
