"""A collection in ranges of ids, for machines that each read and write one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from hubplugin.abilities import Share, StoreShard
from hubplugin.errors import StoreError
from hubplugin.model import OffsetModel
from hubplugin.registry import open_store
from hubplugin.store import Batch, Id, Store, Writing
from hubplugin.vectors import SHARD_ROWS
from hubplugin_qdrant.manifest import Version


@dataclass(frozen=True)
class QdrantShard(StoreShard):
    """The points with ids from `first` on and below `last`; None is no bound. count: of the points of the
    collection, when it was divided."""

    name: str
    url: str
    first: Id | None
    last: Id | None
    count: int

    @property
    def identity(self) -> str:
        return f"{self.url}|{self.first}|{self.last}|{self.count}"

    def scan(self) -> Iterator[Batch]:
        yield from _opened(self.url).scan_between((self.first, self.last))


@dataclass(frozen=True)
class QdrantShare(Share):
    """The writing of a version, by its JSON. The model lies in the metadata collection."""

    url: str
    version: str

    @property
    def key(self) -> str:
        version = Version.model_validate_json(self.version)
        return f"{self.url}|{version.number}|{version.model}"

    def joined(self, shard: StoreShard) -> tuple[Store, Writing, OffsetModel]:
        assert isinstance(shard, QdrantShard)
        store, version = _opened(self.url), Version.model_validate_json(self.version)
        return store, store.joined(version, (shard.first, shard.last)), _model(self.url, self.version)


def divided(url: str, ids: Iterable[Id], points: int, count: int | None) -> list[QdrantShard]:
    """Ranges of as many points each. ids: of all points, in their order."""
    height = -(-points // count) if count else SHARD_ROWS
    bounds: list[Id | None] = [None]
    bounds += [each for number, each in enumerate(ids) if number and number % max(height, 1) == 0]
    ranges = pairwise([*bounds, None])
    return [
        QdrantShard(
            f"{url}, shard {number} (ids from {'the first' if first is None else first} on)", url, first, last, points
        )
        for number, (first, last) in enumerate(ranges)
    ]


def require_url(url: str) -> None:
    """Raises StoreError for a collection that other machines cannot open."""
    if not url.startswith(("qdrant:", "qdrant+https:")):
        raise StoreError(
            f"{url}: other machines cannot open it; open a server's by hubplugin.open_store('qdrant://...')"
        )


def _opened(url: str) -> Any:
    """The `QdrantStore`, which knows this module."""
    return open_store(url)


@lru_cache(maxsize=1)
def _model(url: str, version: str) -> OffsetModel:
    """Read once in a process."""
    model: OffsetModel = _opened(url).metadata.read_model(Version.model_validate_json(version))
    return model
