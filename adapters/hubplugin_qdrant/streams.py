"""How a collection is read and written at the speed of its server: side by side, in bounded memory, at its pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from hubplugin.store import Id

Page = TypeVar("Page")

QUICK, SLOW = 0.5, 5.0
"""Seconds: a request answered in less may be twice as large next time, one that took more becomes half as large."""


class Pace:
    """How many points go into a request: `size`, which starts moderate, grows to `most` while answers are quick, and
    is halved when one is slow, does not come in time, or is refused for its size. limited: also when a rate is
    limited, as it is by points and not by requests."""

    def __init__(self, most: int, start: int = 250, limited: bool = False):
        self.most, self.size, self.limited = most, min(start, most), limited

    def answered(self, size: int, seconds: float) -> None:
        if seconds < QUICK and size == self.size:
            self.size = min(2 * size, self.most)
        elif seconds > SLOW:
            self.halve(size)

    def halve(self, size: int) -> None:
        """After a request of `size`, of which there may have been several at a time."""
        self.size = max(1, min(self.size, size // 2))


def in_order(
    read: Callable[[Id | None, Id | None], tuple[list[Page], Id | None]], starts: Sequence[Id | None], threads: int
) -> Iterator[Page]:
    """The pages of the ranges that begin at `starts`, in order, while the next ranges are being read.

    `read(start, stop)` returns some pages of a range, a bounded number, and where to go on in it, None at its end.
    threads: how many ranges are read side by side; 0 reads here, one page after another.
    """
    ranges = zip(starts, (*starts[1:], None), strict=True)
    if not threads:
        for start, stop in ranges:
            more = True
            while more:
                pages, start = read(start, stop)
                yield from pages
                more = start is not None
        return
    pool = ThreadPoolExecutor(threads)
    try:
        ahead: deque[tuple[Future[tuple[list[Page], Id | None]], Id | None]] = deque()
        for start, stop in islice(ranges, threads):
            ahead.append((pool.submit(read, start, stop), stop))
        while ahead:
            future, stop = ahead.popleft()
            pages, following = future.result()
            if following is not None:
                ahead.appendleft((pool.submit(read, following, stop), stop))
            else:
                ahead.extend((pool.submit(read, *one), one[1]) for one in islice(ranges, 1))
            yield from pages
    finally:
        pool.shutdown(cancel_futures=True)


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
