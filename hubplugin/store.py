"""What an adapter offers: a `Store`, and the `Writing` that it begins. `hubplugin.registry` says how it is found."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from hubplugin.atomic import lack_of_room
from hubplugin.errors import EmptyInput, InputError, StoreError
from hubplugin.executors import Shard
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, Value
from hubplugin.recording import Recorded, read
from hubplugin.vectors import Progress, Vectors, to_tempfile

Id: TypeAlias = int | str

Found: TypeAlias = Literal["nothing", "half-written", "active"]


@dataclass(frozen=True)
class Batch:
    """Some targets of a store: `ids`, `vectors` [b, d] float32, and the `offsets` [b] float32 stored with them
    under the active correction, NaN where there is none, infinite where it is that of another vector. `foreign` of
    them carry something else where offsets lie, which no correction of this store has written. `place` is the store's
    own, which it wants back with what is written. `values`: what each target has in the field that `Store.scan` was
    asked for, None where it has nothing there. `rounding`: how far `offsets` may lie from the right ones [b], a
    function of these; None where float32 keeps them."""

    ids: Sequence[Id]
    vectors: np.ndarray
    offsets: np.ndarray
    place: Id | None = None
    foreign: int = 0
    values: Sequence[Value] | None = None
    rounding: Callable[[np.ndarray], np.ndarray] | None = None

    def take(self, rows: np.ndarray) -> Batch:
        """The targets of the row numbers `rows`, to be written."""
        ids = [self.ids[row] for row in rows.tolist()]
        return replace(
            self,
            ids=ids,
            vectors=self.vectors[rows],
            offsets=self.offsets[rows],
            values=None,
            rounding=None,
        )


@dataclass(frozen=True)
class Hits:
    """The nearest ids of every query, best first, and their scores on the store's own scale."""

    ids: list[list[Id]]
    scores: list[list[float]]


@dataclass(frozen=True)
class Correction:
    """The correction that lies in a store: the model, and whether searches use it yet. made: when its writing began, as
    2026-03-01T12:00:00+00:00; None where that is not known."""

    model: OffsetModel
    active: bool
    made: str | None = None


@dataclass(frozen=True)
class Explanation:
    """The question that `Store.search` asks, for another client: `text` for people, the `request` as plain JSON.

    A store whose clients speak a language of their own has a method `explain` that returns it.
    """

    text: str
    request: Mapping[str, object] = field(default_factory=dict)


class Writing(ABC):
    """The offsets of one model on their way into a store. `Store.begin` returns it, and a `with` ends it:

        with store.begin(model) as writing:
            for batch in writing.scan():
                writing.write(batch, model.offsets(batch.vectors))
            writing.activate()  # one step

    A search is entirely old or entirely new at any moment, and a kill between any two calls loses nothing.
    """

    found: Found = "nothing"
    """What of this very model (`model.fingerprint`) lay in the store before. An active one is amended in place."""

    forced: bool = False
    """Whether it is activated even if the store's own searches would lose too much by it."""

    takes_all: bool = False
    """Whether `write` is given every target of `scan`, those whose offset is right, too: all are rounded anew."""

    wrong: int | None = None
    """How many offsets were missing or stale, known before it is activated; None where nobody has counted."""

    @abstractmethod
    def scan(self) -> Iterator[Batch]:
        """The targets that may lack an offset of this version: all, or those behind which a run was cut off.

        Their offsets are those of this version, NaN where there is none yet.
        """

    @abstractmethod
    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Stores offsets under this version.

        Args:
            batch: The targets.
            offsets: Theirs, [b].
        """

    @abstractmethod
    def activate(self) -> None:
        """Makes the model the one that searches use, in one step. The one that was active, if it is another, becomes
        that of `Store.previous`."""

    def wait(self) -> None:  # noqa: B027
        """Waits until all that was written is there."""

    def share(self) -> Share:
        """Return what lets other machines write, in a store that is `hubplugin.executors.Sharded`."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027
        """Releases what was held. What is half-written stays for the next run to go on with."""

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Store(ABC):
    """A gallery of vectors in somebody's store, and the offsets that lie with it.

    `url` is what errors call it, `metric` and `dim` are those of its vectors. Methods raise StoreError, one line. Only
    `remove` and a `Writing` change anything. The six abstract methods are what a store must have. A store that other
    machines can read in parts, `StoreShard`s, has the method of `hubplugin.executors.Sharded`, too.
    """

    url: str
    metric: Metric
    dim: int

    shared: bool = False
    """Whether others may add, change and delete targets while a correction is written."""

    precision: float = 1e-5
    """Offsets that differ by less are the same to this store: float32 rounding of a sum in another order."""

    unit: bool = False
    """Whether a correction by cosine holds only for vectors of unit length, because the store does not normalise."""

    maps_queries: bool = False
    """Whether it holds the query map of a model, too, so that `search` ranks as `model.queries(q)` and the offsets do.
    Where it does not, a model with a map is refused (`hubplugin.jobs.write`)."""

    record: Path | None = None
    """The folder in which a `hubplugin.Recorder` keeps queries to this store; None where nobody has said which."""

    how_to_record: str = "hubplugin.Recorder(FOLDER).add(queries) beside each search"
    """What to do so that there are recorded queries."""

    def for_job(self) -> Store:
        """Return this store for one job.

        What does not change by itself, such as the manifest, is read once by it.
        """
        return self

    def __repr__(self) -> str:
        # Without asking the store, which may be far away, or in the midst of a job.
        parts = [self.url, self.metric.value]
        if "dim" in vars(self):
            parts.append(f"{self.dim} dimensions")
        return f"<{type(self).__name__}: {', '.join(parts)}>"

    @abstractmethod
    def count(self) -> int:
        """Return how many vectors `scan` yields."""

    @abstractmethod
    def scan(self, field: str | None = None) -> Iterator[Batch]:
        """Yield every vector once, in batches: the originals [b, d], with the offsets of the active correction.

        Args:
            field: The key of the targets that is read into `Batch.values`, such as that of titles or names.

        Raises:
            StoreError: The store cannot be read, or its targets have no such field.
        """

    def fields(self) -> Sequence[str]:
        """Return the names that `scan` takes as `field`; none where they are not known."""
        return []

    def require_field(self, field: str) -> None:
        """Raise StoreError if `fields` lacks a field, in a store with a schema."""
        known = self.fields()
        if field not in known:
            raise StoreError(
                f"{self.url} has no column {field!r}; there are {', '.join(known)}"
            )

    @abstractmethod
    def correction(self) -> Correction | None:
        """The correction that lies in the store, active or half-written; None if there is none."""

    def previous(self) -> OffsetModel | None:
        """The model that was active before, whole, which `rollback` writes. None if there is none, or the store keeps
        none, as here."""
        return None

    @abstractmethod
    def begin(self, model: OffsetModel, progress: Progress | None = None) -> Writing:
        """Prepares to write the offsets of a model; searches stay as they are until `Writing.activate`.

        If this very model is half-written, goes on with that; if it is active, amends it in place. Otherwise starts a
        new version.

        Args:
            model: the fitted model.
            progress: told of what takes long before, such as removing what an earlier run has left.
        """

    def require_writable(self, *, dry_run: bool = False) -> None:  # noqa: B027
        """Raises StoreError for what keeps a correction from being written, such as a folder without room for it
        (`require_room`), as far as that can be told without changing anything: `apply` asks before it reads the
        gallery. dry_run: whoever asks need not have the right to write."""

    def takes_metric(self, metric: Metric) -> bool:
        """Return True if a model for `metric` can be written. A store whose metric
        nobody has said may take that of the model from then on."""
        return metric is self.metric

    def notes(self) -> Sequence[str]:
        """Return what the store adds to an inspection, a line each: where and how the correction lies in it."""
        return ()

    def attention(self) -> Sequence[str]:
        """Return what keeps searches from using a correction that lies in it, and what to do, a line each."""
        return ()

    def plan(self) -> Sequence[str]:
        """Return what writing a correction anew would do to the store, a line each."""
        return ()

    @abstractmethod
    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        """Searches by the store's search, corrected if a correction is active.

        Args:
            queries: [m, d].
            k: how many results of each.
            raw: search without the correction.
        """

    def how_to_search(self) -> tuple[str, str]:
        """Return the code by which an application searches corrected, and who maps its
        queries where the model has a map."""
        return (
            f"hubplugin.open_store({self.url!r}).search(queries, 10)",
            "it maps each query",
        )

    def read_fields(self, ids: Sequence[Id]) -> list[Mapping[str, Any]]:
        """Return what each of the targets `ids` has beside its vector, by field.

        Nothing, as here, for a store of vectors alone. An unknown id has no fields.
        """
        return [{} for _ in ids]

    @abstractmethod
    def remove(self, progress: Progress | None = None) -> None:
        """Takes the correction out; the store is as if it had never been there. Nothing happens without one."""

    def with_filter(self, condition: str) -> Store:
        """Return this store with searches that find only targets that meet `condition`, in its own language.

        Raises InputError for a condition that it cannot read.
        """
        raise StoreError(f"{self.url} searches without filters")


def for_job(store: Store) -> Store:
    """Return `store` as one job asks it. Raises InputError for anything else."""
    if not isinstance(store, Store):
        raise InputError(
            f"expected a store, got {type(store).__name__}; open one: "
            "hubplugin.open_store(URL)"
        )
    return store.for_job()


class StoreShard(Shard):
    """A part of a store, such as a range of ids, as other machines read it. No two parts share a target, and all parts
    together have every target, also one that comes later."""

    @abstractmethod
    def scan(self) -> Iterator[Batch]:
        """Yield its targets, as `Store.scan` does."""

    def vectors(self) -> Vectors | None:
        try:
            return to_tempfile((batch.vectors for batch in self.scan()), self.name)
        except EmptyInput:
            return None


class Share(Protocol):
    """A `Writing` that its coordinator has begun, for other machines to take part in: a small value that travels."""

    def join(self, shard: StoreShard) -> tuple[Store, Writing, OffsetModel]:
        """The store, the writing of `shard` alone, which is not to be activated, and its model."""


class ErrorTranslator:
    """A client library, or what it gave, whose errors of `kinds` are StoreErrors of one line that begins with `url`. So
    is all of the same library that it returns."""

    def __init__(self, of: Any, url: str, kinds: tuple[type[Exception], ...]):
        self._of = of
        self._url = url
        self._kinds = kinds
        name = of.__name__ if isinstance(of, ModuleType) else type(of).__module__
        self._library = name.partition(".")[0]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._of, name)
        return functools.partial(self._call, value) if callable(value) else value

    def _call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        try:
            result = function(*args, **named)
        except self._kinds as error:
            raise as_store_error(error, self._url) from error
        if isinstance(result, list):
            return [self._wrap(item) for item in result]
        return self._wrap(result)

    def _wrap(self, result: Any) -> Any:
        if type(result).__module__.partition(".")[0] != self._library:
            return result
        return ErrorTranslator(result, self._url, self._kinds)


def as_store_error(error: Exception, url: str) -> StoreError:
    """A StoreError of `url` with the first line of an `error` of another library, without the source line that it
    names."""
    first = re.sub(r",? \S+\.rs:\d+(:\d+)?", "", str(error).strip().partition("\n")[0])
    return StoreError(f"{url}: {first}")


def require_room(folder: Path, needed: int) -> None:
    """Raises StoreError if no file of `needed` bytes, of which there are going to be that many at least, can be made in
    `folder`."""
    if lack := lack_of_room(folder, needed):
        raise StoreError(
            f"cannot write in {str(folder)!r}: {lack}; nothing was changed"
        )


def read_recorded(store: Store, since: float | None = None) -> Recorded | None:
    """The queries recorded of `store`, a bank of its dimensions; None if there are none. With `since`, only those that
    were asked after that moment, in Unix seconds."""
    return None if store.record is None else read(store.record, store.dim, since)
