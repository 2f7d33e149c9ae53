"""A uniform sample of the different queries that were asked, which processes can keep without knowing of each other.

Each query has a digest: a number that its content alone decides, and as evenly spread as a random one. A sample keeps
the queries of the smallest digests. So a query that is asked a thousand times counts once. Any two different queries
are equally likely to be kept, whenever and by whichever process they were asked. The smallest digests of several
samples are the sample of all. It is the bottom-k sketch of Cohen and Kaplan (PODC 2007).
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import NamedTuple

import numpy as np

ALL = 2**64 - 1
"""The largest digest."""


class Asked(NamedTuple):
    """A query as it is kept: its vector as bytes of float32, when it was asked last (Unix seconds), and its text."""

    vector: bytes
    time: float
    text: str | None = None


def digest_of(vector: bytes) -> int:
    """The digest of a query, evenly spread over 0 to `ALL`."""
    return int.from_bytes(sha256(vector).digest()[:8], "little")


@dataclass
class Sample:
    """At most `size` different queries. seen: how many were asked in all, from `first` to `last` (Unix seconds).

    limit: every query that was seen and whose digest is at most this is kept, by its digest, in `kept`.
    """

    size: int
    limit: int = ALL
    seen: int = 0
    first: float = math.inf
    last: float = -math.inf
    kept: dict[int, Asked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._largest = [-digest for digest in self.kept if digest <= self.limit]
        self.kept = {-each: self.kept[-each] for each in self._largest}
        heapq.heapify(self._largest)
        self._shrink()

    def add(self, vector: bytes, time: float, text: str | None = None) -> None:
        """A query was asked. One without a direction, or with a number that is not finite, is no example of any."""
        self.seen += 1
        self.first, self.last = min(self.first, time), max(self.last, time)
        digest = digest_of(vector)
        if digest > self.limit:
            return
        before = self.kept.get(digest)
        if before is not None:
            self.kept[digest] = Asked(vector, time, before.text if text is None else text)
            return
        values = np.frombuffer(vector, np.float32)
        if np.isfinite(values).all() and values.any():
            self.kept[digest] = Asked(vector, time, text)
            heapq.heappush(self._largest, -digest)
            self._shrink()

    def _shrink(self) -> None:
        while len(self.kept) > self.size:
            largest = -heapq.heappop(self._largest)
            del self.kept[largest]
            self.limit = largest - 1

    def copy(self) -> Sample:
        """A sample that does not change with this one."""
        made = copy.copy(self)  # without a new heap: searches wait meanwhile
        made.kept, made._largest = dict(self.kept), list(self._largest)
        return made

    def thinned(self, size: int) -> Sample:
        """The sample that would have been kept with a smaller `size`."""
        return replace(self, size=size, kept=dict(self.kept))

    @property
    def width(self) -> int | None:
        """Bytes of a vector; None while none is kept."""
        return next((len(asked.vector) for asked in self.kept.values()), None)

    @property
    def different(self) -> int:
        """How many different queries were asked: exactly while all are kept, then estimated."""
        return len(self.kept) if self.limit == ALL else round(len(self.kept) * (ALL + 1) / (self.limit + 1))


def joined(samples: Iterable[Sample], size: int | None = None) -> Sample:
    """The sample of all that these have seen: up to the smallest `limit` among them, for beyond it some have dropped
    what others have kept. size: how many are kept; all by default."""
    parts = list(samples)
    limit = min((part.limit for part in parts), default=ALL)
    kept: dict[int, Asked] = {}
    for part in parts:
        for digest, asked in part.kept.items():
            before = kept.get(digest)
            if digest <= limit and (before is None or before.time < asked.time):
                kept[digest] = asked._replace(text=asked.text or (before.text if before else None))
    return Sample(
        size=max(len(kept), 1) if size is None else size,
        limit=limit,
        seen=sum(part.seen for part in parts),
        first=min((part.first for part in parts), default=math.inf),
        last=max((part.last for part in parts), default=-math.inf),
        kept=kept,
    )
