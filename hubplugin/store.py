"""The interface of an adapter: a `Store`, and the `Writing` that it begins.

`hubplugin.registry` finds adapters.
"""

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
    vectors: The vectors, float32 [b, d].
    offsets: The offsets of the active correction in the store, float32 [b]. NaN for a
        target without one, infinite if the offset was computed for another vector.
    place: The position of the batch, for the store: `Writing.write` may need it.
    foreign: The number of targets whose offset was not written by a correction of this
        store.
    values: The value of each target in the field passed to `Store.scan`, or None.
    rounding: A function from correct offsets [b] to the error that storing them may
        cause; None if the store keeps float32.
    """

    ids: Sequence[Id]
    vectors: np.ndarray
    offsets: np.ndarray
    place: Id | None = None
    foreign: int = 0
    values: Sequence[Value] | None = None
    rounding: Callable[[np.ndarray], np.ndarray] | None = None

    def take(self, rows: np.ndarray) -> Batch:
        """Return a batch of the targets in `rows`, for `Writing.write`."""
        ids = [self.ids[row] for row in rows.tolist()]
        return Batch(
            ids, self.vectors[rows], self.offsets[rows], self.place, self.foreign
        )


@dataclass(frozen=True)
class Hits:
    """The ids found for each query, best first, and the store's scores for them."""

    ids: list[list[Id]]
    scores: list[list[float]]


@dataclass(frozen=True)
class Correction:
    """The correction in a store.

    model: The model.
    active: True if searches already use it.
    made: The time at which a run began to write it, such as 2026-03-01T12:00:00+00:00;
        None if unknown.
    """

    model: OffsetModel
    active: bool
    made: str | None = None


@dataclass(frozen=True)
class Explanation:
    """The request that `Store.search` makes, for use in other clients.

    A store with a query language has a method `explain` that returns it.

    text: The request in the store's query language.
    request: The request as plain JSON.
    """

    text: str
    request: Mapping[str, object] = field(default_factory=dict)


class Writing(ABC):
    """Writes the offsets of one model to a store. Use it in a `with` statement:

        with store.begin(model) as writing:
            for batch in writing.scan():
                writing.write(batch, model.offsets(batch.vectors))
            writing.activate()  # one step

    Every search uses either only old or only new offsets. If the process is killed
    between two calls, nothing is lost.
    """

    found: Found = "nothing"
    """The state in which `begin` found this model (by `model.fingerprint`).

    An active model is amended in place.
    """

    forced: bool = False
    """True to activate even if the store's searches would lose too much accuracy."""

    takes_all: bool = False
    """True if `write` needs every target of `scan`, even those with a correct offset.

    This is the case in a store that encodes all offsets anew.
    """

    wrong: int | None = None
    """The number of missing or stale offsets; None if nobody counted them.

    The job sets it before `activate`.
    """

    @abstractmethod
    def scan(self) -> Iterator[Batch]:
        """Yield the targets that may lack an offset of this version.

        These are all targets, or the remaining targets if an earlier run was
        interrupted. The batches have the offsets of this version, NaN for a target
        without one.
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
        """Make searches use the model, in one step.

        If another model was active, `Store.previous` returns it from then on.
        """

    def wait(self) -> None:  # noqa: B027
        """Wait until the store has processed all writes."""

    def share(self) -> Share:
        """Return a handle with which other machines write.

        Only a store that is `hubplugin.executors.Sharded` has one.
        """
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027
        """Release all resources. A half-written version stays for the next run."""

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Store(ABC):
    """A gallery of vectors in a user's store, with the offsets of a correction.

    Methods raise StoreError, of one line. Only `remove` and a `Writing` change the
    store. A store must implement the six abstract methods. A store that other machines
    can read in parts, `StoreShard`s, also implements `hubplugin.executors.Sharded`.

    url: The name of the store in error messages.
    metric, dim: The metric and the dimensions of its vectors.
    """

    url: str
    metric: Metric
    dim: int

    shared: bool = False
    """True if other clients may change targets while a correction is written."""

    precision: float = 1e-5
    """The difference below which offsets count as equal.

    The default allows for float32 sums in a different order.
    """

    unit: bool = False
    """True if the store does not normalise vectors.

    A correction for cosine then holds only for vectors of unit length.
    """

    maps_queries: bool = False
    """True if `search` applies a model's query map, and ranks with `model.queries(q)`.

    Otherwise, `hubplugin.jobs.write` refuses a model that has a map.
    """

    record: Path | None = None
    """The folder of the `hubplugin.Recorder` for this store's queries, if known."""

    how_to_record: str = "call hubplugin.Recorder(FOLDER).add(queries) at each search"
    """The advice in error messages on how to record queries."""

    def for_job(self) -> Store:
        """Return this store for one job.

        The returned store may cache data that only jobs change, such as a manifest. By
        default, it is this store.
        """
        return self

    def __repr__(self) -> str:
        # Send no request: the store may be remote, or busy with a job. So `dim` is only
        # shown if it is known already.
        parts = [self.url, self.metric.value]
        if "dim" in vars(self):
            parts.append(f"{self.dim} dimensions")
        return f"<{type(self).__name__}: {', '.join(parts)}>"

    @abstractmethod
    def count(self) -> int:
        """Return the number of vectors that `scan` yields."""

    @abstractmethod
    def scan(self, field: str | None = None) -> Iterator[Batch]:
        """Yield every original vector once, in batches with the active offsets.

        Args:
            field: The field to read into `Batch.values`, such as titles or names.

        Raises:
            StoreError: The store cannot be read, or its targets have no such field.
        """

    def fields(self) -> Sequence[str]:
        """Return the fields that `scan` can read, or nothing if they are unknown."""
        return []

    def require_field(self, field: str) -> None:
        """Raise StoreError if `fields` lacks a field. For stores with a schema."""
        fields = self.fields()
        if field not in fields:
            raise StoreError(
                f"{self.url} has no column {field!r}; its columns are "
                f"{', '.join(fields)}"
            )

    @abstractmethod
    def correction(self) -> Correction | None:
        """Return the correction in the store, active or half-written, or None."""

    def previous(self) -> OffsetModel | None:
        """Return the model that was active before, which `rollback` writes, or None.

        By default, a store keeps no such model.
        """
        return None

    @abstractmethod
    def begin(self, model: OffsetModel, progress: Progress | None = None) -> Writing:
        """Prepare to write the offsets of a model, which `Writing.activate` activates.

        If the same model is half-written, the writing continues it; if it is active,
        the writing amends it in place. Otherwise, a new version is started.

        Args:
            model: The fitted model.
            progress: The callback for long preparations, such as the removal of an
                earlier run's data.
        """

    def require_writable(self, *, dry_run: bool = False) -> None:  # noqa: B027
        """Raise StoreError if a correction cannot be written, e.g. for lack of space.

        `apply` calls this before it reads the gallery. It must not change the store.

        dry_run: True if the caller may lack the right to write.
        """

    def takes_metric(self, metric: Metric) -> bool:
        """Return True if a model for `metric` can be written.

        A store with an unknown metric may adopt the model's metric.
        """
        return metric is self.metric

    def notes(self) -> Sequence[str]:
        """Return lines on where and how the correction is stored, for `inspect`."""
        return ()

    def attention(self) -> Sequence[str]:
        """Return lines on why searches do not use the correction, and what to do."""
        return ()

    def plan(self) -> Sequence[str]:
        """Return lines on how writing a new correction would change the store."""
        return ()

    @abstractmethod
    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        """Search as the store does, corrected if a correction is active.

        Args:
            queries: The queries, [m, d].
            k: The number of results for each query.
            raw: True to search without the correction.
        """

    def how_to_search(self) -> tuple[str, str]:
        """Return code that searches with the correction, and who maps queries.

        `apply` prints the code, for use in the application. If the model has a query
        map, it adds the second text, such as "it maps each query".
        """
        return (
            f"hubplugin.open_store({self.url!r}).search(queries, 10)",
            "it maps each query",
        )

    def read_fields(self, ids: Sequence[Id]) -> list[Mapping[str, Any]]:
        """Return the fields of each of the targets `ids`.

        An unknown id has no fields. By default, no target has any.
        """
        return [{} for _ in ids]

    @abstractmethod
    def remove(self, progress: Progress | None = None) -> None:
        """Remove the correction, if there is one, without a trace."""

    def with_filter(self, condition: str) -> Store:
        """Return this store with searches limited to targets that meet `condition`.

        The condition is in the store's query language. Raises InputError if the store
        cannot parse it, and StoreError if the store has no filters.
        """
        raise StoreError(f"{self.url} does not support filters")


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

    No two parts share a target. Together, the parts contain every target, including
    targets that are added later.
    """

    @abstractmethod
    def scan(self) -> Iterator[Batch]:
        """Yield the targets of this part, as `Store.scan` does."""

    def vectors(self) -> Vectors | None:
        try:
            return to_tempfile((batch.vectors for batch in self.scan()), self.name)
        except EmptyInput:
            return None


class Share(Protocol):
    """A picklable handle with which other machines join a `Writing`."""

    def join(self, shard: StoreShard) -> tuple[Store, Writing, OffsetModel]:
        """Return the store, a writing for only `shard`, and the model.

        The writing must not be activated.
        """


class ErrorTranslator:
    """A proxy for a client library, or one of its objects, that raises StoreError.

    It translates errors of `kinds` into one line that begins with `url`. If a call
    returns objects of the same library, it returns proxies for them.
    """

    def __init__(self, wrapped: Any, url: str, kinds: tuple[type[Exception], ...]):
        self._wrapped = wrapped
        self._url = url
        self._kinds = kinds
        module = type(wrapped).__module__
        if isinstance(wrapped, ModuleType):
            module = wrapped.__name__
        self._library = module.partition(".")[0]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._wrapped, name)
        return functools.partial(self._call, value) if callable(value) else value

    def _call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call `function`; raise its errors as StoreError, and wrap what it returns."""
        try:
            result = function(*args, **named)
        except self._kinds as error:
            raise as_store_error(error, self._url) from error
        if isinstance(result, list):
            return [self._wrap(item) for item in result]
        return self._wrap(result)

    def _wrap(self, result: Any) -> Any:
        """Return a proxy for an object of the library, and other objects unchanged."""
        if type(result).__module__.partition(".")[0] != self._library:
            return result
        return ErrorTranslator(result, self._url, self._kinds)


def as_store_error(error: Exception, url: str) -> StoreError:
    """Return a StoreError for `url` with the first line of another library's `error`.

    Positions in the library's Rust source are left out.
    """
    first_line = str(error).strip().partition("\n")[0]
    message = re.sub(r",? \S+\.rs:\d+(:\d+)?", "", first_line)
    return StoreError(f"{url}: {message}")


def require_room(folder: Path, needed: int) -> None:
    """Raise StoreError if `needed` bytes cannot be written to a file in `folder`."""
    if reason := lack_of_room(folder, needed):
        raise StoreError(
            f"cannot write in {str(folder)!r}: {reason}; nothing was changed"
        )


def read_recorded(store: Store, since: float | None = None) -> Recorded | None:
    """Return the recorded queries to `store` with its dimensions, or None.

    since: Leave out queries that were last asked before this time (Unix seconds).
    """
    return None if store.record is None else read(store.record, store.dim, since)
