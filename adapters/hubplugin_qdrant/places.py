"""URLs of collections, and ranges of ids that other machines process."""

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
"""The options that a URL may have."""


class Place:
    """A parsed URL of a collection on a server or in a folder; see `store.open_url`."""

    def __init__(self, url: str):
        """Parse `url`. Raises InputError if it does not name a collection."""
        self.scheme, _, rest = url.partition(":")
        self.is_local = self.scheme == "qdrant-local"
        if self.is_local:
            start = "local:"
            expected = "qdrant-local:PATH/COLLECTION"
        else:
            start = "//"
            expected = f"{self.scheme}://HOST:6333/COLLECTION"
        self.parts = parts = urlsplit(start + rest.removeprefix("//"))
        self.options = dict(parse_qsl(parts.query))
        self.folder, _, self.collection = parts.path.rpartition("/")
        server_or_folder = self.folder if self.is_local else parts.hostname
        credentials = parts.username or parts.password
        unknown = self.options.keys() - OPTIONS
        is_complete = self.collection and server_or_folder
        if credentials or unknown or not is_complete:
            raise InputError(
                f"expected {expected}, optionally followed by "
                "?using=VECTOR&storage=STORAGE&pace=POINTS&grpc=PORT&record=FOLDER; the "
                "api key is read from the environment variable QDRANT_API_KEY"
            )
        self.prefix = self.folder.strip("/")
        grpc = self.options.get("grpc", "")
        is_port = grpc.isdecimal() and 0 < int(grpc) < 65536
        if grpc and (self.is_local or self.prefix or not is_port):
            raise InputError(
                f"grpc={grpc}: expected the server's port for gRPC, usually 6334, after "
                "HOST:6333/COLLECTION"
            )

    def connect(self) -> QdrantClient:
        """Connect to the server, or open the folder.

        Raises StoreError if the folder does not exist or cannot be opened.
        """
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
    """The points with first <= id < last; None for no bound.

    rows: The largest number of points when the ids were divided.
    """

    name: str
    url: str
    first: Id | None
    last: Id | None
    rows: int

    def scan(self) -> Iterator[Batch]:
        yield from _open(self.url).scan(between=(self.first, self.last))


@dataclass(frozen=True)
class QdrantShare(Share):
    """A run that other processes can join.

    url: The URL of the store.
    version: The version that is written, as JSON.
    """

    url: str
    version: str

    def join(self, shard: StoreShard) -> tuple[Store, Writing, OffsetModel]:
        assert isinstance(shard, QdrantShard)
        store = _open(self.url)
        version = QdrantVersion.model_validate_json(self.version)
        store.require_owner(version)  # otherwise another run has deleted the model
        model = _read_model(self.url, self.version)
        return store, store.join(version, model, (shard.first, shard.last)), model


def divide(
    url: str, ids: Iterable[Id], points: int, count: int | None
) -> list[QdrantShard]:
    """Divide the ids of a collection into ranges with equal numbers of points.

    Args:
        url: The URL of the store.
        ids: The ids of all points, in the order of the server.
        points: The number of points.
        count: The number of ranges. By default, a range has `SHARD_ROWS` points.
    """
    rows_per_range = SHARD_ROWS
    if count:
        rows_per_range = max(-(-points // count), 1)  # rounded up
    starts = [id for row, id in enumerate(ids) if row and row % rows_per_range == 0]
    shards = []
    for number, (first, last) in enumerate(pairwise([None, *starts, None])):
        name = f"{url}, shard {number} (ids from {first or 'the first'} on)"
        shards.append(QdrantShard(name, url, first, last, rows_per_range))
    return shards


def _open(url: str) -> Any:
    """Open the `QdrantStore` at `url`."""
    # By the registry: the module of the store imports this one.
    return open_store(url)


@lru_cache(maxsize=1)
def _read_model(url: str, version: str) -> OffsetModel:
    """Read the model of `version`, given as JSON, once per process."""
    model: OffsetModel = _open(url).read_model(
        QdrantVersion.model_validate_json(version)
    )
    return model
