"""What an adapter offers: a `Store`, and the `Writing` that it begins. `hubplugin.registry` says how it is found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from hubplugin.errors import EmptyInput, StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, Setting, Value
from hubplugin.quarantine import Quarantine
from hubplugin.recording import Recorded, read
from hubplugin.vectors import Progress, Shard, Vectors, spool

Id: TypeAlias = int | str

Found: TypeAlias = Literal["nothing", "half-written", "active"]


@dataclass(frozen=True)
class Batch:
    """Some targets of a store: `ids`, `vectors` [b, d] float32, and the `offsets` [b] float32 stored with them
    under the active correction, NaN where there is none. `foreign` of them carry something else where offsets lie,
    which no correction of this store has written. `place` is the store's own, which it wants back with what is
    written. `groups`: the value by which each target is grouped, None where it has none; see `Store.scan`."""

    ids: Sequence[Id]
    vectors: np.ndarray
    offsets: np.ndarray
    place: Id | None = None
    foreign: int = 0
    groups: Sequence[Value] | None = None

    def some(self, rows: np.ndarray) -> Batch:
        """The targets of the row numbers `rows`."""
        ids = [self.ids[row] for row in rows.tolist()]
        groups = None if self.groups is None else [self.groups[row] for row in rows.tolist()]
        return replace(self, ids=ids, vectors=self.vectors[rows], offsets=self.offsets[rows], groups=groups)


@dataclass(frozen=True)
class Hits:
    """For every query its nearest ids, best first, and their scores on the store's own scale."""

    ids: list[list[Id]]
    scores: list[list[float]]


@dataclass(frozen=True)
class Correction:
    """What lies in a store: the model, and whether searches use it yet."""

    model: OffsetModel
    active: bool


State: TypeAlias = Literal["active", "kept", "half-written"]

KEEP = 1
"""How many versions stay beside the active one: the one to return to. Each takes as much space as the active one, and
writes keep each of them up."""


@dataclass(frozen=True)
class StoredVersion:
    """One version of the correction of a store. made: when its writing began, as 2026-03-01T12:00:00+00:00; None where
    that is not known. model: its fingerprint."""

    number: int
    state: State
    made: str | None
    method: str
    parameters: Mapping[str, Setting]
    model: str
    bank_fingerprint: str

    @classmethod
    def of(cls, model: OffsetModel, number: int, state: State, made: str | None) -> StoredVersion:
        return cls(number, state, made, model.method, model.parameters, model.fingerprint, model.bank_fingerprint)

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={_short(value)}" for name, value in self.parameters.items())
        made = self.made or "unknown date"
        return f"{self.number}  {self.state:12s}  {made}  {self.method}({settings})  query bank {self.bank_fingerprint}"


def _short(value: Setting) -> str:
    return f"{value:.3g}" if isinstance(value, (int, float)) else str(value)


def now() -> str:
    """The date of a version that begins now."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Explanation:
    """How another client asks what `Store.search` asks: `text` for people, and the `request` as plain JSON."""

    text: str
    request: Mapping[str, object] = field(default_factory=dict)


class StoreShard(Shard):
    """A part of a store, such as a range of ids, as other machines read it. No two parts share a target, and all parts
    together have every target, also one that comes later."""

    @abstractmethod
    def scan(self) -> Iterator[Batch]:
        """Its targets, as `Store.scan` has them."""

    def vectors(self) -> Vectors | None:
        try:
            return spool((batch.vectors for batch in self.scan()), self.name)
        except EmptyInput:
            return None


class Share(ABC):
    """A `Writing` that its coordinator has begun, for other machines to take part in: a small value that travels.

    key: the same whenever the same model is written to the same store.
    """

    key: str

    @abstractmethod
    def joined(self, shard: StoreShard) -> tuple[Store, Writing, OffsetModel]:
        """The store, the writing of `shard` alone, which is not to be activated, and its model."""


class Writing(ABC):
    """The offsets of one model on their way into a store. `Store.begin` returns it, and a `with` ends it:

        with store.begin(model) as writing:
            for batch in writing.scan():
                writing.write(batch, offsets)
            writing.activate()               # one step

    A search is entirely old or entirely new at any moment, and a kill between any two calls loses nothing.
    """

    found: Found = "nothing"
    """What of this very model (`model.fingerprint`) lay in the store before. An active one is amended in place."""

    @abstractmethod
    def scan(self) -> Iterator[Batch]:
        """The targets that may lack an offset of this version: all, or those behind which a run was cut off.

        Their offsets are those of this version, NaN where there is none yet. They have `groups` where the model has.
        """

    def changed(self, read: Iterable[Batch]) -> Iterator[Batch]:
        """After everything in `read` was written: the targets whose vector may be another one than was read, and those
        that have no offset of this version. All of them, as here, where a store cannot tell."""
        return self.scan()

    @abstractmethod
    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Stores `offsets` [b] with the targets of `batch`, under this version."""

    @abstractmethod
    def activate(self) -> None:
        """Makes this version the one that searches use, in one step. The one before is kept; see `Store.return_to`."""

    def settle(self) -> None:  # noqa: B027
        """Waits until all that was written is there."""

    def share(self) -> Share:
        """What lets other machines write. Raises StoreError where they cannot."""
        raise StoreError("this store is written by one process")

    def close(self) -> None:  # noqa: B027
        """Releases what was held. What is half-written stays for the next run to go on with."""

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Store(ABC):
    """One gallery of vectors in somebody's store, and the offsets that lie with it.

    `url` is what errors call it, `metric` and `dim` are those of its vectors. Methods raise StoreError, one line. Only
    `remove`, `return_to`, `prune`, `switch`, `write_quarantine` and a `Writing` change anything.
    """

    url: str
    metric: Metric
    dim: int

    shared: bool = False
    """Whether others may add, change and delete targets while a correction is written."""

    precision: float = 1e-5
    """Offsets that differ by less are the same to this store: float32 rounding of a sum in another order, and where
    it quantises offsets, what that loses."""

    unit: bool = False
    """Whether a correction by cosine holds only for vectors of unit length, because the store does not normalise."""

    record: Path | None = None
    """The folder in which a `hubplugin.Recorder` keeps queries to this store; None where nobody has said which."""

    def recorded(self, since: float | None = None) -> Recorded | None:
        """The queries recorded of this store, a bank of its dimensions; None if there are none.

        since: only those that were asked after that moment, in Unix seconds.
        """
        return None if self.record is None else read(self.record, self.dim, since)

    def how_to_record(self) -> str:
        """What to do so that `recorded` finds queries."""
        folder = "FOLDER" if self.record is None else str(self.record)
        return f"hubplugin.Recorder({folder!r}).add(queries) beside each search"

    @abstractmethod
    def count(self) -> int:
        """How many vectors `scan` yields."""

    @abstractmethod
    def scan(self, group_by: str | None = None) -> Iterator[Batch]:
        """Every vector once, in batches: the originals [b, d], with the offsets of the active correction.

        group_by: the key whose values are the `groups` of a batch; without it they are those of the active correction,
        where that is by groups. A store whose targets have nothing but a vector calls `require_ungrouped`.
        """

    def sample(self, count: int) -> Iterator[Batch]:
        """About `count` of the targets, drawn anew at random at each call, with the offsets of the active correction.

        A store that can draw them itself does so; here all are read.
        """
        share, rng = count / max(self.count(), 1), np.random.default_rng()
        for batch in self.scan():
            yield batch.some(np.flatnonzero(rng.random(len(batch.ids)) < share))

    def shards(self, count: int | None) -> Sequence[StoreShard]:
        """About `count` parts that other machines can read; by default as many as have 250,000 targets each. Raises
        StoreError where they cannot."""
        raise StoreError(f"{self.url}: other machines cannot read it in parts")

    def require_ungrouped(self, group_by: str | None) -> None:
        """Raises StoreError if targets that have nothing but a vector are to be grouped."""
        if group_by is not None:
            raise StoreError(f"{self.url}: its targets have nothing to be grouped by")

    @abstractmethod
    def correction(self) -> Correction | None:
        """The correction that lies in the store, active or half-written; None if there is none."""

    @abstractmethod
    def begin(self, model: OffsetModel, progress: Progress | None = None) -> Writing:
        """Prepares to write the offsets of `model`; searches stay as they are until `Writing.activate`.

        If this very model is half-written, goes on with that; if it is active, amends it in place. Otherwise starts a
        new version. progress: told of what takes long before, such as removing what an earlier run has left.
        """

    @abstractmethod
    def versions(self) -> Sequence[StoredVersion]:
        """The versions that lie in the store, in the order of their numbers."""

    @abstractmethod
    def return_to(self, number: int) -> None:
        """Makes the kept version `number` the active one, in one step, and keeps the one that was.

        Its offsets are those that were written for it. Those of targets that came or changed since may be missing or
        stale, which `refresh` mends.
        """

    @abstractmethod
    def prune(self, keep: int, progress: Progress | None = None) -> None:
        """Deletes the kept versions but for the `keep` that were active last."""

    def notes(self) -> Sequence[str]:
        """What the store has to add to an inspection, a line each: where and how the correction lies in it."""
        return ()

    def plan(self) -> Sequence[str]:
        """What writing a correction anew would do to the store, a line each."""
        return ()

    @abstractmethod
    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        """The k nearest of each query [m, d] by the store's own search, corrected if a correction is active."""

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        """How a client that knows nothing of hubplugin asks for the k nearest of `asked`, a vector [d] or the id of a
        target. Raises StoreError where no correction is active, or the adapter has nothing to say."""
        raise StoreError(f"{self.url}: its adapter does not say how other clients ask for the corrected ranking")

    def quarantined(self) -> Quarantine:
        """The targets that must not be found, and who decided so; none where a store keeps no such list."""
        return Quarantine()

    def write_quarantine(self, quarantine: Quarantine) -> None:
        """Puts `quarantine` in the place of the list before, in one step; offsets are the next refresh's to write.
        Raises StoreError where a store keeps no such list."""
        raise StoreError(f"{self.url} keeps no quarantine list; remove the vectors instead")

    def switch(self, on: bool, *, dry_run: bool = False) -> None:
        """Switches the correction off, so that every client searches raw, or on again; what is stored stays. `search`
        goes on corrected. dry_run: changes nothing. Raises StoreError where those who search read no switch, or there
        is no correction."""
        raise StoreError(
            f"{self.url}: whoever searches it reads no switch; keep the store as it was beside the corrected one, or "
            "take the correction out: hubplugin remove"
        )

    def filtered(self, condition: str) -> Store:
        """This store, whose searches return only targets that meet `condition`, in its own language.

        Raises StoreError for a store that searches without filters, InputError for a condition that it cannot read.
        """
        raise StoreError(f"{self.url}: its searches take no filter")

    def named(self, ids: Sequence[Id], key: str) -> list[str | None]:
        """What lies under `key` with each of the targets `ids`, as text; None where there is nothing.

        Raises StoreError for a store whose targets have nothing but a vector.
        """
        raise StoreError(f"{self.url}: its targets have nothing but a vector; name them by a file")

    @abstractmethod
    def remove(self, progress: Progress | None = None) -> None:
        """Takes the correction out; the store is as if it had never been there. Nothing happens without one."""
