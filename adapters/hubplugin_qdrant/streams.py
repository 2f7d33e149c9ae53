"""How a collection is read and written without waiting for each answer, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Page = TypeVar("Page")


def read_ahead(pages: Iterator[Page], left: threading.Event | None = None) -> Iterator[Page]:
    """`pages`, of which the next one is made in a thread while its predecessor is worked on. left: is set when nobody
    waits for a page any more, as after an error or an interrupt, so that the thread may end."""
    pool = ThreadPoolExecutor(1)
    try:
        ahead = pool.submit(next, pages, None)
        while (page := ahead.result()) is not None:
            ahead = pool.submit(next, pages, None)
            yield page
    finally:
        if left is not None:
            left.set()
        pool.shutdown(wait=False, cancel_futures=True)


class Writers:
    """Work done in order of arrival by `threads`, of which a bounded number waits; 0 does it here and now."""

    def __init__(self, threads: int):
        self._pool = ThreadPoolExecutor(threads) if threads else None
        self._waiting: deque[Future[None]] = deque()
        self._most = 2 * threads

    def submit(self, work: Callable[[], None]) -> None:
        """Raises what earlier work has raised."""
        if self._pool is None:
            work()
            return
        while len(self._waiting) >= self._most:
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(work))

    def settle(self) -> None:
        """Returns when all is done; raises what any of it has raised."""
        while self._waiting:
            self._waiting.popleft().result()

    def abandon(self) -> None:
        """Returns when nothing is being done any more; what has not begun is not done."""
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.cancel():
                future.exception()
