"""Where a collection lies: behind a URL, and in ranges of ids, for machines that each read and write one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from qdrant_client import QdrantClient

from hubplugin.errors import InputError, StoreError
from hubplugin.executors import SHARD_ROWS
from hubplugin.model import OffsetModel
from hubplugin.registry import open_store
from hubplugin.store import Batch, Id, Share, Store, StoreShard, Writing
from hubplugin_qdrant.manifest import QdrantVersion


@dataclass(frozen=True)
class Place:
    """What a URL names: a collection on a server or in a folder, and how its store is opened; see `store.open_url`."""

    scheme: str
    parts: SplitResult
    folder: str
    collection: str
    options: dict[str, str]

    @classmethod
    def of(cls, url: str) -> Place:
        """Raises InputError for a URL that names none."""
        scheme, _, rest = url.partition(":")
        parts = urlsplit(
            f"{'local:' if scheme == 'qdrant-local' else '//'}{rest.removeprefix('//')}"
        )
        options = dict(parse_qsl(parts.query))
        folder, _, collection = parts.path.rpartition("/")
        is_local = scheme == "qdrant-local"
        expected = (
            "qdrant-local:PATH/COLLECTION"
            if is_local
            else f"{scheme}://HOST:6333/COLLECTION"
        )
        if parts.username or parts.password or options.keys() - OPTIONS:
            raise InputError(
                f"expected {expected}, and no more than "
                "?using=VECTOR&storage=STORAGE&pace=POINTS&grpc=PORT&record=FOLDER "
                "behind it; "
                "an api key is read from the environment variable QDRANT_API_KEY"
            )
        grpc = options.get("grpc", "")
        is_port = grpc.isascii() and grpc.isdigit() and 0 < int(grpc) < 65536
        if grpc and (is_local or folder.strip("/") or not is_port):
            raise InputError(
                f"grpc={grpc}: expected the server's port for gRPC, usually 6334, "
                "behind HOST:6333/COLLECTION"
            )
        if not collection or not (folder if is_local else parts.hostname):
            raise InputError(f"{url!r} names no collection; expected {expected}")
        return cls(scheme, parts, folder, collection, options)

    def connect(self) -> QdrantClient:
        """A client of the server, or of the folder."""
        if self.scheme == "qdrant-local":
            if not os.path.isdir(self.folder):
                raise StoreError(f"qdrant-local:{self.folder}: there is no such folder")
            try:
                return QdrantClient(path=self.folder)
            except RuntimeError as error:
                raise StoreError(
                    f"qdrant-local:{self.folder}: {' '.join(str(error).split())}"
                ) from None
        grpc_port = int(self.options.get("grpc", 0))
        return QdrantClient(
            host=self.parts.hostname,
            port=self.parts.port or 6333,
            grpc_port=grpc_port or 6334,
            prefer_grpc=grpc_port > 0,
            https=self.scheme == "qdrant+https",
            prefix=self.folder.strip("/") or None,
            api_key=os.environ.get("QDRANT_API_KEY"),
            timeout=60,
            check_compatibility=False,  # the store asks for the version itself
        )


OPTIONS = frozenset(("using", "storage", "pace", "grpc", "record"))
"""What may stand behind a URL."""


@dataclass(frozen=True)
class QdrantShard(StoreShard):
    """The points with ids from `first` on and below `last`; None is no bound."""

    name: str
    url: str
    first: Id | None
    last: Id | None
    rows: int

    def scan(self) -> Iterator[Batch]:
        yield from _open(self.url).scan_between((self.first, self.last))


@dataclass(frozen=True)
class QdrantShare(Share):
    """The writing of a version, by its JSON. The model lies in the metadata collection."""

    url: str
    version: str

    def join(self, shard: StoreShard) -> tuple[Store, Writing, OffsetModel]:
        assert isinstance(shard, QdrantShard)
        store, version = (
            _open(self.url),
            QdrantVersion.model_validate_json(self.version),
        )
        store.require_owner(version)  # another run takes the model with it
        model = _read_model(self.url, self.version)
        return store, store.join(version, model, (shard.first, shard.last)), model


def divide(
    url: str, ids: Iterable[Id], points: int, count: int | None
) -> list[QdrantShard]:
    """Ranges of as many points each.

    Args:
        url: of the store.
        ids: of all points, in their order.
        points: how many there are.
        count: of the ranges; by default a range has `SHARD_ROWS` points.
    """
    height = -(-points // count) if count else SHARD_ROWS
    bounds: list[Id | None] = [None]
    bounds += [
        point for row, point in enumerate(ids) if row and row % max(height, 1) == 0
    ]
    shards = []
    for number, (first, last) in enumerate(pairwise([*bounds, None])):
        name = f"{url}, shard {number} (ids from {'the first' if first is None else first} on)"
        shards.append(QdrantShard(name, url, first, last, height))
    return shards


def _open(url: str) -> Any:
    """The `QdrantStore`, which knows this module."""
    return open_store(url)


@lru_cache(maxsize=1)
def _read_model(url: str, version: str) -> OffsetModel:
    """Read once in a process."""
    model: OffsetModel = _open(url).read_model(
        QdrantVersion.model_validate_json(version)
    )
    return model
