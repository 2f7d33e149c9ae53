"""An index file in ranges of rows, for processes that each read and write one. All see the same file system."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hubplugin.abilities import Share, StoreShard
from hubplugin.errors import StoreError
from hubplugin.model import OffsetModel
from hubplugin.registry import open_store
from hubplugin.store import Batch, Store, Writing
from hubplugin.vectors import even_ranges
from hubplugin_faiss.index_file import IndexFile

PAGE = 1024
"""Offsets on a page of memory: they gather in a mapped file, of which two machines must not write one page."""


@dataclass(frozen=True)
class FaissShard(StoreShard):
    """The rows of an index file from `start` to `stop`. stamp: what the file system says of the file."""

    name: str
    url: str
    stamp: str
    start: int
    stop: int

    @property
    def identity(self) -> str:
        return f"{self.url}|{self.stamp}|{self.start}|{self.stop}"

    def scan(self) -> Iterator[Batch]:
        yield from _opened(self.url, self.stamp).scan_rows(self.start, self.stop)


@dataclass(frozen=True)
class FaissShare(Share):
    """The writing of the model called `fingerprint` into an index file, beside which it lies."""

    url: str
    stamp: str
    fingerprint: str

    @property
    def key(self) -> str:
        return f"{self.url}|{self.stamp}|{self.fingerprint}"

    def joined(self, shard: StoreShard) -> tuple[Store, Writing, OffsetModel]:
        assert isinstance(shard, FaissShard)
        store = _opened(self.url, self.stamp)
        return store, *store.joined(self.fingerprint, range(shard.start, shard.stop))


def divided(file: IndexFile, count: int | None) -> list[FaissShard]:
    """Ranges of about as many rows each."""
    rows, url = file.handler.count, url_of(file)
    cuts = [
        (start // PAGE * PAGE, stop if stop == rows else stop // PAGE * PAGE)
        for start, stop in even_ranges(rows, count)
    ]
    return [
        FaissShard(f"{file.url}, shard {number} (from row {start} on)", url, file.stamp, start, stop)
        for number, (start, stop) in enumerate(cuts)
        if stop > start
    ]


def url_of(file: IndexFile) -> str:
    """What another process opens the same file by."""
    return f"faiss:{file.path.absolute()}?metric={file.metric.value}"


@lru_cache(maxsize=1)
def _opened(url: str, stamp: str) -> Any:
    """The `FaissStore`, which knows this module, read once in a process as long as the file stays as it is."""
    store: Any = open_store(url)
    if store.stamp != stamp:
        raise StoreError(f"{store.url}: the file was changed by another program meanwhile; run it again")
    return store
