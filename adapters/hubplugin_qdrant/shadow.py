"""Shadow searches: what a client answered corrected is asked raw, too, or the other way round, and the two compared.

They run behind the answer, in a thread of the sync client or a task of the async one, one at a time. What finds too
many before it is left out and counted, and what fails is one line of the log: no search waits for them or fails.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Literal, TypeAlias

from hubplugin_qdrant.operations import Operation, PointId, run, run_async

logger = logging.getLogger("hubplugin.shadow")

WAITING = 100
"""How many shadow searches wait at most: each holds a query in memory, and a backlog of minutes helps nobody."""


@dataclass(frozen=True)
class ShadowedSearch:
    """A search that was asked both ways: the ids that each found, best first, of points or of groups.

    answered: which of the two the application got. dropped: how many searches of this client have had no shadow so
    far, because too many waited.
    """

    collection: str
    answered: Literal["raw", "corrected"]
    raw: tuple[PointId, ...]
    corrected: tuple[PointId, ...]
    dropped: int = 0

    @property
    def overlap(self) -> float:
        """The share of results that both have; 1 where neither has any."""
        longer = max(len(self.raw), len(self.corrected))
        return len({*self.raw} & {*self.corrected}) / longer if longer else 1.0

    @property
    def first_changed(self) -> bool:
        """Whether the first place is another one."""
        return self.raw[:1] != self.corrected[:1]

    def __str__(self) -> str:
        first = "another first place" if self.first_changed else "the same first place"
        return f"{self.collection}: answered {self.answered}, overlap {self.overlap:.2f}, {first}"


Hook: TypeAlias = Callable[[ShadowedSearch], object]


class Shadow(ABC):
    """The shadow searches of one client. hook: gets each; they are logged at level INFO, too."""

    def __init__(self, hook: Hook | None = None):
        self._hook = hook
        self._dropped = 0

    def begin(self, steps: Operation) -> None:
        """Runs `steps`, which compares a search, some time later; never raises."""
        if self._waiting() < WAITING:
            self._put(steps)
            return
        if self._dropped == 0:
            logger.warning("more than %d searches wait for their shadow: further ones are left out", WAITING)
        self._dropped += 1

    def report(self, found: ShadowedSearch) -> None:
        """Logs what was found, and hands it to the hook."""
        found = replace(found, dropped=self._dropped)
        logger.info("%s", found)
        if self._hook is not None:
            self._hook(found)

    @abstractmethod
    def stop(self) -> None:
        """Leaves out what waits: the client is being closed."""

    @abstractmethod
    def _waiting(self) -> int: ...

    @abstractmethod
    def _put(self, steps: Operation) -> None: ...


class ThreadShadow(Shadow):
    """Runs them in one thread, which ends with the client and does not keep the program from ending."""

    def __init__(self, hook: Hook | None = None):
        super().__init__(hook)
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        weakref.finalize(self, self._queue.put, None)

    def stop(self) -> None:
        with suppress(Empty):
            while True:
                self._queue.get_nowait()

    def _waiting(self) -> int:
        return self._queue.qsize()

    def _put(self, steps: Operation) -> None:
        self._queue.put(steps)
        if self._thread is None or not self._thread.is_alive():  # a fork has no thread
            with self._starting:
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=_work, args=(self._queue,), daemon=True, name="hubplugin")
                    self._thread.start()


def _work(queue: SimpleQueue[Operation | None]) -> None:
    while (steps := queue.get()) is not None:
        try:
            run(steps)
        except Exception as error:
            _failed(error)
        del steps  # which holds the client


class TaskShadow(Shadow):
    """Runs them in one task of the event loop that searches."""

    def __init__(self, hook: Hook | None = None):
        super().__init__(hook)
        self._queue: deque[Operation] = deque()
        self._task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        self._queue.clear()

    def _waiting(self) -> int:
        return len(self._queue)

    def _put(self, steps: Operation) -> None:
        self._queue.append(steps)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        while self._queue:
            try:
                await run_async(self._queue.popleft())
            except Exception as error:
                _failed(error)


def _failed(error: Exception) -> None:
    logger.warning("a shadow search failed: %s", " ".join(f"{type(error).__name__}: {error}".split()))
