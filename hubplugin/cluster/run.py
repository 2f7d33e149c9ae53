"""One step of a reduction: an order a shard, each done once, and again where its worker was lost."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field, replace

import numpy as np

from hubplugin.cluster.work import Order, work
from hubplugin.cluster.workspace import Workspace
from hubplugin.errors import ClusterError, HubpluginError, Parameter
from hubplugin.reductions import Found
from hubplugin.vectors import one_line

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""How often a task is tried whose worker is lost, or that fails for no fault of the vectors."""

SILENT_SECONDS = 30.0
"""After so long without any result an executor that can tell is asked whether it has workers at all."""


@dataclass
class Step:
    """The orders of one step, of which those whose results lie in `workspace` under `name` are not sent again.

    bank: [m, d], sent to workers that do not know it.
    """

    executor: Executor
    workspace: Workspace
    name: str
    bank: np.ndarray | None = None
    _pending: dict[Future[Found | None], tuple[int, Order]] = field(default_factory=dict)

    def results(self, orders: Sequence[Order]) -> Generator[tuple[int, Found], None, None]:
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

    def _ended(self) -> set[Future[Found | None]]:
        """Those that have ended, at least one. Waits for it, and tells once where there is nobody to wait for."""
        ended = wait(self._pending, SILENT_SECONDS, FIRST_COMPLETED).done
        has_workers = getattr(self.executor, "has_workers", None)
        while not ended:
            if has_workers is not None and not has_workers():
                logger.warning(
                    "nothing has come for %g s, for the cluster has no worker; start some, and this run goes on, or "
                    "stop it: with workspace= what is done is not lost",
                    SILENT_SECONDS,
                )
                has_workers = None
            ended = wait(self._pending, SILENT_SECONDS, FIRST_COMPLETED).done
        return ended

    def _result(self, future: Future[Found | None], number: int, order: Order) -> Found | None:
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

    def _keep(self, number: int, order: Order, found: Found | None) -> None:
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
