"""Where the shards of a gallery are: parts in files, ranges of rows of one file, and what a store hands out."""

from __future__ import annotations

import glob
import itertools
import os
import posixpath
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from hubplugin.errors import EmptyInput, InputError, Parameter, install
from hubplugin.metric import Metric
from hubplugin.vectors.base import Directed, Sliceable, VectorLike, Vectors, as_vectors, spool

SHARD_ROWS = 250_000
"""Rows of a shard, where they can be chosen: at 384 dimensions 384 MB, some seconds of work a pass."""


class Shard(ABC):
    """Some targets of a gallery: where they are, not what. A small value that travels to whoever reads it.

    name: what errors call it. identity: other where the shard is, as far as can be seen without reading it.
    """

    name: str

    @property
    @abstractmethod
    def identity(self) -> str: ...

    @abstractmethod
    def vectors(self) -> Vectors | None:
        """Its vectors as whoever calls this can read them, again and again; None if it has none."""


@runtime_checkable
class Sharded(Protocol):
    """A store that other machines can read in parts, and write to: its `Writing` is a `SharedWriting`."""

    def shards(self, count: int | None) -> Sequence[Shard]:
        """About `count` parts; by default as many as have `SHARD_ROWS` targets each."""


GalleryLike: TypeAlias = VectorLike | Sharded | Sequence["Shard | str | os.PathLike[str]"]
"""What can be read as vectors, and a gallery in parts: a list of files, or a pattern of their names."""


@dataclass(frozen=True)
class FileShard(Shard):
    """The vectors in a file, or its rows from `start` to `stop`. stamp: what the file system says of it."""

    name: str
    path: str
    stamp: str = ""
    start: int = 0
    stop: int | None = None

    @property
    def identity(self) -> str:
        return f"{self.path}|{self.stamp}|{self.start}|{self.stop}"

    def vectors(self) -> Vectors | None:
        try:
            if _is_url(self.path):
                return spool(self._fetched(), self.name)
            found = as_vectors(self.path, self.name)
        except EmptyInput:
            return None
        if not isinstance(found, Sliceable):
            return spool(found.blocks(), self.name)  # unpacked once, not in every pass
        if self.stop is None:
            found.name = self.name
            return found
        return RowRange(found, self.name, self.start, self.stop)

    def _fetched(self) -> Iterator[np.ndarray]:
        files, path = _file_system(self.path)
        with tempfile.TemporaryDirectory(prefix="hubplugin-") as folder:
            copy = os.path.join(folder, posixpath.basename(path))
            try:
                files.get_file(path, copy)
            except FileNotFoundError:
                raise InputError(f"{self.name}: there is no file {_shown(self.path)!r}") from None
            except OSError as error:
                raise InputError(f"{self.name}: cannot be fetched to {folder!r}: {error.strerror or error}") from None
            yield from as_vectors(copy, self.name).blocks()


@dataclass(frozen=True)
class DirectedShard(Shard):
    """`whole`, without its zero vectors where the `metric` is cosine."""

    whole: Shard
    metric: Metric

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.whole.name

    @property
    def identity(self) -> str:
        return f"{self.whole.identity}|{self.metric.value}"

    def vectors(self) -> Vectors | None:
        found = self.whole.vectors()
        try:
            return None if found is None else Directed.of(found, self.metric)
        except EmptyInput:
            return None


class RowRange(Sliceable):
    """The rows of `whole` from `start` to `stop`."""

    def __init__(self, whole: Sliceable, name: str, start: int, stop: int):
        if whole.rows < stop:
            raise InputError(f"{name}: the file has {whole.rows} rows; it changed after the shards were planned")
        super().__init__(name, whole, (stop - start, whole.dim), np.asarray)
        self._start = start

    def take(self, rows: slice | np.ndarray) -> np.ndarray:
        if isinstance(rows, slice):
            first, last, _ = rows.indices(self.rows)
            return self._source.take(slice(self._start + first, self._start + last))  # type: ignore[no-any-return]
        return self._source.take(self._start + rows)  # type: ignore[no-any-return]


def shards_of(source: GalleryLike, count: int | None = None, name: str = "targets") -> list[Shard]:
    """The shards of a gallery.

    source: a list of shards or of files (.npy, .npz, .safetensors, .parquet); a pattern of file names, as in
        "parts/*.parquet" or "s3://bucket/parts/*.npy", which fsspec reads; one .npy or .safetensors file, whose rows
        are divided; or a store that other machines can read (`hubplugin.open_store`).
    count: into how many shards a file or a store is divided; by default as many as have `SHARD_ROWS` each.

    Raises InputError for what workers cannot read, such as an array in the memory of this process.
    """
    if count is not None and count < 1:
        raise InputError(Parameter("shards", count), ": expected 1 or more")
    if isinstance(source, Sharded):
        return list(source.shards(count))
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if glob.has_magic(path):
            return _parts(_matches(path, name), name)
        return _parts([path], name) if _is_url(path) else _divided(path, count, name)
    if isinstance(source, (list, tuple)) and source:
        if all(isinstance(each, Shard) for each in source):
            return list(source)
        if all(isinstance(each, (str, os.PathLike)) for each in source):
            return _parts([os.fspath(each) for each in source], name)
    raise InputError(
        f"{name}: workers cannot read {type(source).__name__} from the memory of this process; with ",
        Parameter("executor"),
        " pass files, as in 'parts/*.npy', or a store",
    )


def even_ranges(rows: int, count: int | None) -> list[tuple[int, int]]:
    """First and last of the rows of `count` shards; by default as many as have `SHARD_ROWS` each."""
    number = count or -(-rows // SHARD_ROWS)
    ends = np.linspace(0, rows, number + 1).astype(int).tolist()
    return list(itertools.pairwise(ends))


def _divided(path: str, count: int | None, name: str) -> list[Shard]:
    whole = as_vectors(path, name)
    if not isinstance(whole, Sliceable) or path.endswith(".npz"):
        return _parts([path], name)
    stamp, file = _stamp(path), os.path.basename(path)
    return [
        FileShard(f"{name}, shard {number} ({file} from row {start} on)", os.path.abspath(path), stamp, start, stop)
        for number, (start, stop) in enumerate(even_ranges(whole.rows, count))
        if stop > start
    ]


def _parts(paths: Sequence[str], name: str) -> list[Shard]:
    return [
        FileShard(
            f"{name}, shard {number} ({posixpath.basename(path)})",
            path if _is_url(path) else os.path.abspath(path),
            _stamp(path),
        )
        for number, path in enumerate(paths)
    ]


def _stamp(path: str) -> str:
    """What the file system says of a file that it has; whoever reads it tells what is missing."""
    try:
        if not _is_url(path):
            found = os.stat(path)
            return f"{found.st_size}|{found.st_mtime_ns}"
        files, inside = _file_system(path)
        return str(files.ukey(inside))
    except (OSError, NotImplementedError):
        return ""


def _matches(pattern: str, name: str) -> list[str]:
    if _is_url(pattern):
        files, inside = _file_system(pattern)
        found = sorted(files.unstrip_protocol(path) for path in files.glob(inside))
    else:
        found = sorted(glob.glob(pattern))
    if not found:
        raise InputError(f"{name}: no file matches {_shown(pattern)!r}")
    return found


def _is_url(path: str) -> bool:
    return "://" in path


def _file_system(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise InputError(f"reading {_shown(url)} needs fsspec; {install('cluster')}") from None
    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(f"{_shown(url)} cannot be opened: {error}") from None
    return files, path


def _shown(url: str) -> str:
    """A URL without what may be a secret in it."""
    scheme, colon, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if colon else url
