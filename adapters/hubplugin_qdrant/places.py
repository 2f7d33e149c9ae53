"""Where a collection lies: behind a URL, and in ranges of ids for other machines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from qdrant_client import QdrantClient

from hubplugin.errors import InputError, StoreError
from hubplugin.executors import SHARD_ROWS
from hubplugin.model import OffsetModel
from hubplugin.registry import open_store
from hubplugin.store import Batch, Id, Share, Store, StoreShard, Writing
from hubplugin_qdrant.manifest import QdrantVersion

OPTIONS = frozenset(("using", "storage", "pace", "grpc", "record"))
"""The options of a URL."""


class Place:
    """What a URL names: a collection on a server or in a folder; see
    `store.open_url`."""

    def __init__(self, url: str):
        """Raise InputError for a URL that names none."""
        self.scheme, _, rest = url.partition(":")
        self.is_local = self.scheme == "qdrant-local"
        start = "//"
        expected = f"{self.scheme}://HOST:6333/COLLECTION"
        if self.is_local:
            start = "local:"
            expected = "qdrant-local:PATH/COLLECTION"
        self.parts = parts = urlsplit(start + rest.removeprefix("//"))
        self.options = dict(parse_qsl(parts.query))
        self.folder, _, self.collection = parts.path.rpartition("/")
        names_place = self.folder if self.is_local else parts.hostname
        more = parts.username or parts.password or self.options.keys() - OPTIONS
        if more or not self.collection or not names_place:
            raise InputError(
                f"expected {expected}, and no more than "
                "?using=VECTOR&storage=STORAGE&pace=POINTS&grpc=PORT&record=FOLDER "
                "behind it; an api key is read from the environment variable "
                "QDRANT_API_KEY"
            )
        self.prefix = self.folder.strip("/")
        grpc = self.options.get("grpc", "")
        is_port = grpc.isdecimal() and 0 < int(grpc) < 65536
        if grpc and (self.is_local or self.prefix or not is_port):
            raise InputError(
                f"grpc={grpc}: expected the server's port for gRPC, usually 6334, "
                "behind HOST:6333/COLLECTION"
            )

    def connect(self) -> QdrantClient:
        """Return a client of the server, or of the folder."""
        if self.is_local:
            place = f"qdrant-local:{self.folder}"
            if not os.path.isdir(self.folder):
                raise StoreError(f"{place}: there is no such folder")
            try:
                return QdrantClient(path=self.folder)
            except RuntimeError as error:
                reason = " ".join(str(error).split())
                raise StoreError(f"{place}: {reason}") from None
        grpc_port = int(self.options.get("grpc", 0))
        return QdrantClient(
            host=self.parts.hostname,
            port=self.parts.port or 6333,
            grpc_port=grpc_port or 6334,
            prefer_grpc=grpc_port > 0,
            https=self.scheme == "qdrant+https",
            prefix=self.prefix or None,
            api_key=os.environ.get("QDRANT_API_KEY"),
            timeout=60,
            check_compatibility=False,  # the store asks for the version itself
        )


@dataclass(frozen=True)
class QdrantShard(StoreShard):
    """The points with ids from `first` on and below `last`; None for no bound."""

    name: str
    url: str
    first: Id | None
    last: Id | None
    rows: int

    def scan(self) -> Iterator[Batch]:
        yield from _open(self.url).scan(between=(self.first, self.last))


@dataclass(frozen=True)
class QdrantShare(Share):
    """The writing of a version, by its JSON; its model is read from the metadata."""

    url: str
    version: str

    def join(self, shard: StoreShard) -> tuple[Store, Writing, OffsetModel]:
        assert isinstance(shard, QdrantShard)
        store = _open(self.url)
        version = QdrantVersion.model_validate_json(self.version)
        store.require_owner(version)  # another run takes the model with it
        model = _read_model(self.url, self.version)
        return store, store.join(version, model, (shard.first, shard.last)), model


def divide(
    url: str, ids: Iterable[Id], points: int, count: int | None
) -> list[QdrantShard]:
    """Return ranges of as many points each.

    Args:
        url: The URL of the store.
        ids: The ids of all points, in their order.
        points: How many there are.
        count: How many ranges; by default a range has `SHARD_ROWS` points.
    """
    height = max(-(-points // count), 1) if count else SHARD_ROWS
    starts = [id for row, id in enumerate(ids) if row and row % height == 0]
    shards = []
    for number, (first, last) in enumerate(pairwise([None, *starts, None])):
        name = f"{url}, shard {number} (ids from {first or 'the first'} on)"
        shards.append(QdrantShard(name, url, first, last, height))
    return shards


def _open(url: str) -> Any:
    """Return the `QdrantStore`, which knows this module."""
    return open_store(url)


@lru_cache(maxsize=1)
def _read_model(url: str, version: str) -> OffsetModel:
    """Read the model of `version`, once in a process."""
    model: OffsetModel = _open(url).read_model(
        QdrantVersion.model_validate_json(version)
    )
    return model
