"""A uniform sample of the different queries that were asked, which processes can keep without knowing of each other.

Each query has a digest: a number that its content alone decides, and as evenly spread as a random one. A sample keeps
the queries of the smallest digests. So a query that is asked a thousand times counts once. Any two different queries
are equally likely to be kept, whenever and by whichever process they were asked. The smallest digests of several
samples are the sample of all. It is the bottom-k sketch of Cohen and Kaplan (PODC 2007).

A click names its query by the digest, and is kept by the same rule. So it may come to another process than the query
did, and even before it: what belongs together is found where samples are joined.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import NamedTuple, TypeAlias
from uuid import UUID

import numpy as np

from hubplugin.errors import InputError

ALL = 2**64 - 1
"""The largest digest."""

MOST_TARGETS = 8
"""Targets of a query whose clicks are counted. Its answer is one of them, and memory is bounded."""

Target: TypeAlias = int | str
"""The id of a target in its store."""


class Asked(NamedTuple):
    """A query as it is kept: its vector as bytes of float32, when it was asked last (Unix seconds), and its text."""

    vector: bytes
    time: float
    text: str | None = None


LONGEST = 200
"""Characters of the id of a target: memory is bounded, and what is longer is a text."""


def as_target(target: object) -> Target:
    """The id of a target as it is kept: digits are a number, as in a file of clicks, but for those that begin with 0
    and would lose it. Raises InputError for what is no
    id, without repeating it: it may be what somebody wrote."""
    if isinstance(target, UUID):
        return str(target)
    if isinstance(target, (int, np.integer)) and not isinstance(target, bool) and 0 <= target <= ALL:
        return int(target)
    if isinstance(target, str) and 0 < len(target) <= LONGEST:
        digits = target.isascii() and target.isdecimal() and str(int(target)) == target
        return int(target) if digits and int(target) <= ALL else target
    raise InputError(f"expected the id of a target, 0 or more or up to {LONGEST} characters; got {_kind(target)}")


def id_of(digest: int) -> str:
    """The id of the query of this digest, which `as_digest` reads."""
    return f"{digest:016x}"


def as_digest(search: str) -> int:
    """The digest that an id of a search names; raises InputError for other texts, without repeating them."""
    if len(search) != 16 or not set(search) <= set("0123456789abcdef"):
        raise InputError(f"expected a query's vector, or its id of 16 hexadecimal digits; got {_kind(search)}")
    return int(search, 16)


def _kind(value: object) -> str:
    return f"a text of {len(value)} characters" if isinstance(value, str) else f"{type(value).__name__}"


def digest_of(vector: bytes) -> int:
    """The digest of a query, evenly spread over 0 to `ALL`."""
    return int.from_bytes(sha256(vector).digest()[:8], "little")


@dataclass
class Sample:
    """At most `size` different queries. seen: how many were asked in all, from `first` to `last` (Unix seconds).

    limit: every query that was seen and whose digest is at most this is kept, by its digest, in `kept`.
    clicks: how often each target was clicked, by the digest of the query: of those in `kept`, and of the `size`
    smallest others up to `limit`, which another process may have seen. clicked: how many clicks came since it was read.
    """

    size: int
    limit: int = ALL
    seen: int = 0
    first: float = math.inf
    last: float = -math.inf
    kept: dict[int, Asked] = field(default_factory=dict)
    clicks: dict[int, dict[Target, int]] = field(default_factory=dict)
    clicked: int = 0

    def __post_init__(self) -> None:
        self._largest = [-digest for digest in self.kept if digest <= self.limit]
        self.kept = {-each: self.kept[-each] for each in self._largest}
        heapq.heapify(self._largest)
        self._shrink()
        self._trim()

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

    def click(self, digest: int, target: Target) -> None:
        """`target` was clicked by somebody who asked the query of this digest.

        Beyond `MOST_TARGETS` of them, the least clicked target of a query gives way.
        """
        self.clicked += 1
        if digest > self.limit:
            return
        counts = self.clicks.setdefault(digest, {})
        if target not in counts and len(counts) == MOST_TARGETS:
            del counts[min(counts, key=lambda each: counts[each])]
        counts[target] = counts.get(target, 0) + 1
        if len(self.clicks) > 3 * self.size:  # so that every so many clicks pay for one look at all
            self._trim()

    def _trim(self) -> None:
        """Drops the clicks of queries that no longer belong to the sample. Anybody can make up the id of a query, and a
        small one at that, so those that were only clicked take no room from those that were asked."""
        self.clicks = {digest: dict(counts) for digest, counts in self.clicks.items() if digest <= self.limit}
        others = [digest for digest in self.clicks if digest not in self.kept]
        for digest in heapq.nlargest(len(others) - self.size, others):
            del self.clicks[digest]

    def copy(self) -> Sample:
        """A sample that does not change with this one."""
        made = copy.copy(self)  # without a new heap: searches wait meanwhile
        made.kept, made._largest = dict(self.kept), list(self._largest)
        made._trim()
        return made

    @property
    def counts(self) -> tuple[int, int]:
        """How many queries and clicks came: what changes with each of them."""
        return self.seen, self.clicked

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
    clicks: dict[int, dict[Target, int]] = {}
    kept: dict[int, Asked] = {}
    for part in parts:
        for digest, asked in part.kept.items():
            before = kept.get(digest)
            if digest <= limit and (before is None or before.time < asked.time):
                kept[digest] = asked._replace(text=asked.text or (before.text if before else None))
        for digest, counts in part.clicks.items():
            together = clicks.setdefault(digest, {})
            for target, count in counts.items():
                together[target] = together.get(target, 0) + count
    for digest, counts in clicks.items():
        most = heapq.nlargest(MOST_TARGETS, counts, key=lambda target: counts[target])
        clicks[digest] = {target: count for target, count in counts.items() if target in most}
    return Sample(
        size=max(len(kept), len(clicks), 1) if size is None else size,
        limit=limit,
        seen=sum(part.seen for part in parts),
        first=min((part.first for part in parts), default=math.inf),
        last=max((part.last for part in parts), default=-math.inf),
        kept=kept,
        clicks=clicks,
        clicked=sum(part.clicked for part in parts),
    )
