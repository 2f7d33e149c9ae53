"""What an adapter offers: a `Store`, and the `Writing` that it begins. `hubplugin.registry` says how it is found."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    """Some targets of a store.

    ids: The ids [b].
    vectors: float32 [b, d].
    offsets: The offsets stored under the active correction, float32 [b]. NaN if a target
        has none, infinite if its offset belongs to another vector.
    place: For the store alone, which needs it back when the batch is written.
    foreign: How many targets carry something in the place of offsets that no correction
        of this store has written.
    values: What each target has in the field that `Store.scan` was asked for, or None.
    rounding: Returns how far stored offsets may lie from the right ones, given these
        [b]; None if the store keeps float32.
    """

    ids: Sequence[Id]
    vectors: np.ndarray
    offsets: np.ndarray
    place: Id | None = None
    foreign: int = 0
    values: Sequence[Value] | None = None
    rounding: Callable[[np.ndarray], np.ndarray] | None = None

    def take(self, rows: np.ndarray) -> Batch:
        """Return the targets in `rows`, to be written."""
        ids = [self.ids[row] for row in rows.tolist()]
        vectors = self.vectors[rows]
        offsets = self.offsets[rows]
        return Batch(ids, vectors, offsets, self.place, self.foreign)


@dataclass(frozen=True)
class Hits:
    """The ids that each query finds, best first, and their scores as the store gives them."""

    ids: list[list[Id]]
    scores: list[list[float]]


@dataclass(frozen=True)
class Correction:
    """The correction in a store.

    model: The model.
    active: True if searches use it already.
    made: When its writing began, as 2026-03-01T12:00:00+00:00; None if unknown.
    """

    model: OffsetModel
    active: bool
    made: str | None = None


@dataclass(frozen=True)
class Explanation:
    """The request of `Store.search`, for another client.

    A store with a query language of its own has a method `explain` that returns it.

    text: The request as people write it.
    request: The request as plain JSON.
    """

    text: str
    request: Mapping[str, object] = field(default_factory=dict)


class Writing(ABC):
    """The offsets of one model on their way into a store. `Store.begin` returns it, and a `with` ends it:

        with store.begin(model) as writing:
            for batch in writing.scan():
                writing.write(batch, model.offsets(batch.vectors))
            writing.activate()  # one step

    Each search is entirely old or entirely new. A kill between any two calls loses
    nothing.
    """

    found: Found = "nothing"
    """The state in which this very model (by `model.fingerprint`) was in the store before.

    If it was active, it is amended in place.
    """

    forced: bool = False
    """True to activate even if the store's own searches would lose too much."""

    takes_all: bool = False
    """True if `write` needs every target of `scan`, even if its offset is right.

    A store that encodes all offsets anew needs them all.
    """

    wrong: int | None = None
    """How many offsets were missing or stale, set before `activate`; None if not counted."""

    @abstractmethod
    def scan(self) -> Iterator[Batch]:
        """Yield the targets that may lack an offset of this version.

        They are all targets, or those from which on an earlier run was cut off. Batches
        have the offsets of this version, NaN for a target without.
        """

    @abstractmethod
    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Store offsets under this version.

        Args:
            batch: The targets.
            offsets: The offset of each target [b].
        """

    @abstractmethod
    def activate(self) -> None:
        """Let searches use the model, in one step.

        If another model was active, `Store.previous` returns it from now on.
        """

    def wait(self) -> None:  # noqa: B027
        """Wait until the store has taken everything that was written."""

    def share(self) -> Share:
        """Return what lets other machines write, in a store that is `hubplugin.executors.Sharded`."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027
        """Release what was held. A half-written version stays for the next run."""

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Store(ABC):
    """A gallery of vectors in somebody's store, and the offsets that lie with it.

    Methods raise StoreError, of one line. Only `remove` and a `Writing` change anything.
    The six abstract methods are what a store must have. A store that other machines can
    read in parts, `StoreShard`s, has the method of `hubplugin.executors.Sharded`, too.

    url: What errors call the store.
    metric, dim: Metric and dimensions of its vectors.
    """

    url: str
    metric: Metric
    dim: int

    shared: bool = False
    """True if others may add, change and delete targets while a correction is written."""

    precision: float = 1e-5
    """Offsets that differ by less are the same to this store: float32 rounding of a sum in another order."""

    unit: bool = False
    """True if the store does not normalise.

    A correction by cosine then holds only for vectors of unit length.
    """

    maps_queries: bool = False
    """True if `search` applies the query map of a model: it ranks by `model.queries(q)` and
    the offsets. Otherwise a model with a map is refused (`hubplugin.jobs.write`)."""

    record: Path | None = None
    """The folder in which a `hubplugin.Recorder` keeps queries to this store, if known."""

    how_to_record: str = "hubplugin.Recorder(FOLDER).add(queries) beside each search"
    """What to do to record queries, for errors."""

    def for_job(self) -> Store:
        """Return this store for one job.

        The returned store may read once what does not change by itself, such as a
        manifest.
        """
        return self

    def __repr__(self) -> str:
        # Ask the store nothing: it may be far away, or in the midst of a job.
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
            field: The field that is read into `Batch.values`, such as titles or names.

        Raises:
            StoreError: The store cannot be read, or its targets have no such field.
        """

    def fields(self) -> Sequence[str]:
        """Return the names that `scan` takes as `field`; none if they are not known."""
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
        """Return the correction in the store, active or half-written, or None."""

    def previous(self) -> OffsetModel | None:
        """Return the model that was active before, which `rollback` writes, or None.

        By default a store keeps none.
        """
        return None

    @abstractmethod
    def begin(self, model: OffsetModel, progress: Progress | None = None) -> Writing:
        """Prepare to write the offsets of a model. `Writing.activate` lets searches use them.

        If this very model is half-written, the writing goes on with it; if it is active,
        it is amended in place. Otherwise a new version is started.

        Args:
            model: The fitted model.
            progress: Told of preparations that take long, such as the removal of what an
                earlier run has left.
        """

    def require_writable(self, *, dry_run: bool = False) -> None:  # noqa: B027
        """Raise StoreError if a correction cannot be written, such as for lack of room.

        `apply` asks before it reads the gallery, and nothing may be changed to find out.

        dry_run: The caller need not have the right to write.
        """

    def takes_metric(self, metric: Metric) -> bool:
        """Return True if a model for `metric` can be written.

        A store whose metric is unknown may adopt that of the model.
        """
        return metric is self.metric

    def notes(self) -> Sequence[str]:
        """Return lines for an inspection that say where and how the correction is kept."""
        return ()

    def attention(self) -> Sequence[str]:
        """Return lines on what keeps searches from using the correction, and what to do."""
        return ()

    def plan(self) -> Sequence[str]:
        """Return lines on what writing a new correction would do to the store."""
        return ()

    @abstractmethod
    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        """Search as the store does, corrected if a correction is active.

        Args:
            queries: [m, d].
            k: How many results each query gets.
            raw: Search without the correction.
        """

    def how_to_search(self) -> tuple[str, str]:
        """Return code that searches corrected, and who maps the queries of a model with a map."""
        return (
            f"hubplugin.open_store({self.url!r}).search(queries, 10)",
            "it maps each query",
        )

    def read_fields(self, ids: Sequence[Id]) -> list[Mapping[str, Any]]:
        """Return what each of the targets `ids` has beside its vector, by field.

        An unknown id has no fields. By default a store keeps vectors alone.
        """
        return [{} for _ in ids]

    @abstractmethod
    def remove(self, progress: Progress | None = None) -> None:
        """Take the correction out, if there is one, as if it had never been there."""

    def with_filter(self, condition: str) -> Store:
        """Return this store with searches that find only targets that meet a condition.

        Raises InputError if the store cannot read `condition`, which is in its own query
        language, and StoreError if it has no filters.
        """
        raise StoreError(f"{self.url} searches without filters")


def for_job(store: Store) -> Store:
    """Return `store.for_job()`. Raises InputError if `store` is not a store."""
    if not isinstance(store, Store):
        raise InputError(
            f"expected a store, got {type(store).__name__}; open one: "
            "hubplugin.open_store(URL)"
        )
    return store.for_job()


class StoreShard(Shard):
    """A part of a store that other machines can read, such as a range of ids.

    No two parts share a target. All parts together have every target, even if it is
    added later.
    """

    @abstractmethod
    def scan(self) -> Iterator[Batch]:
        """Yield its targets, as `Store.scan` does."""

    def vectors(self) -> Vectors | None:
        try:
            return to_tempfile((batch.vectors for batch in self.scan()), self.name)
        except EmptyInput:
            return None


class Share(Protocol):
    """A picklable handle by which other machines take part in a `Writing`."""

    def join(self, shard: StoreShard) -> tuple[Store, Writing, OffsetModel]:
        """Return the store, a writing of `shard` alone, and the model.

        The writing must not be activated.
        """


class ErrorTranslator:
    """A proxy of a client library, or of an object of it, that raises StoreError.

    It translates errors of `kinds` into one line that begins with `url`. Objects of the
    same library that a call returns are proxies, too.
    """

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
    """Return a StoreError for `url` with the first line of another library's `error`.

    The place in the library's Rust source is left out.
    """
    first = re.sub(r",? \S+\.rs:\d+(:\d+)?", "", str(error).strip().partition("\n")[0])
    return StoreError(f"{url}: {first}")


def require_room(folder: Path, needed: int) -> None:
    """Raise StoreError if `needed` bytes cannot be written to a file in `folder`."""
    if lack := lack_of_room(folder, needed):
        raise StoreError(
            f"cannot write in {str(folder)!r}: {lack}; nothing was changed"
        )


def read_recorded(store: Store, since: float | None = None) -> Recorded | None:
    """Return the queries recorded from `store` with its dimensions, None if there are none.

    since: Only queries that were asked after that moment, in Unix seconds.
    """
    return None if store.record is None else read(store.record, store.dim, since)
