"""What an adapter offers: one subclass of `Store`. `hubplugin.registry` says how it is found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from hubplugin.errors import StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, Value
from hubplugin.vectors import Progress

Id: TypeAlias = int | str


@dataclass(frozen=True)
class Batch:
    """Some targets of a store: `ids`, `vectors` [b, d] float32, and the `offsets` [b] float32 stored with them
    under the active correction, NaN where there is none. `foreign` of them carry something else where offsets lie,
    which no correction of this store has written. `resume` is what `Store.scan(after=...)` takes to go on behind this
    batch; `place` is the store's own, which it wants back with what is written. `groups`: see `Store.group_by`."""

    ids: Sequence[Id]
    vectors: np.ndarray
    offsets: np.ndarray
    resume: Id | None = None
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


class Store(ABC):
    """One gallery of vectors in somebody's store, and the offsets that lie with it.

    `url` is what errors call it, `metric` and `dim` are those of its vectors. Methods raise StoreError, one line.
    A correction is written in three steps, so that a search is entirely old or entirely new at any moment and a
    kill between any two calls loses nothing:

        resume = store.begin(model)          # a new version; or what is half-written; or, if active, itself
        for batch in store.scan(resume):
            store.write(batch, offsets)
        store.activate()                     # one step
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

    progress: Progress | None = None
    """Told of long work that no other method reports: the removal of offsets."""

    @abstractmethod
    def count(self) -> int:
        """How many vectors `scan` yields."""

    @abstractmethod
    def scan(self, after: Id | None = None) -> Iterator[Batch]:
        """Every vector once, in batches, behind the point `after`. The vectors are the originals, [b, d].

        In a `shared` store the offsets are those of the version that was begun, until it is active.
        """

    def group_by(self, key: str) -> None:
        """From now on the batches of a scan have `groups`, the value of `key` that each target has, None where it has
        none. They have them without being asked where the correction that lies in the store is by groups."""
        raise StoreError(f"{self.url}: its targets have nothing to be grouped by")

    @abstractmethod
    def correction(self) -> Correction | None:
        """The correction that lies in the store, active or half-written; None if there is none."""

    @abstractmethod
    def begin(self, model: OffsetModel) -> Id | None:
        """Prepares to write the offsets of `model`; searches stay as they are until `activate`.

        If this very model (`model.fingerprint`) is half-written, returns where to go on; if it is active, its
        offsets are amended in place. Otherwise it starts a new version.
        """

    @abstractmethod
    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Stores `offsets` [b] with the targets of `batch`, under the version that was begun."""

    @abstractmethod
    def activate(self) -> None:
        """Makes the version that was begun the one that searches use, in one step."""

    def release(self) -> None:  # noqa: B027
        """Called when a job on the store ends, also by an error: others may write again."""

    def notes(self) -> Sequence[str]:
        """What the store has to add to an inspection, a line each: where and how the correction lies in it."""
        return ()

    def plan(self) -> Sequence[str]:
        """What writing a correction anew would do to the store, a line each."""
        return ()

    @abstractmethod
    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        """The k nearest of each query [m, d] by the store's own search, corrected if a correction is active."""

    @abstractmethod
    def remove(self) -> None:
        """Takes the correction out; the store is as if it had never been there. Nothing happens without one."""
