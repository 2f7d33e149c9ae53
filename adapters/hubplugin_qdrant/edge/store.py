"""A Qdrant Edge shard, the engine inside one's own process, as a `hubplugin.store.Store`: for devices without a server.

Offsets lie in the payload and are added by the engine's own formula, as in a collection. The manifest and the models
lie in the shard's folder (see `folder`), so that a copy of the folder is a copy of the correction.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import numpy as np
import qdrant_edge as edge
from qdrant_client import models

from hubplugin.abilities import Explanation
from hubplugin.errors import InputError, StoreError
from hubplugin.model import OffsetModel
from hubplugin.recording import folder_within
from hubplugin.store import Batch, Hits, Id, require_ungrouped
from hubplugin.vectors import Progress
from hubplugin_qdrant.calibration import chosen_queries
from hubplugin_qdrant.edge.folder import Folder
from hubplugin_qdrant.edge.searches import Options, hits, nearest
from hubplugin_qdrant.edge.shard import Shard, one_line
from hubplugin_qdrant.edge.writing import EdgeWriting
from hubplugin_qdrant.explanation import shard_explanation
from hubplugin_qdrant.manifest import Manifest, Payload, Version
from hubplugin_qdrant.points import PointReader, texts_at
from hubplugin_qdrant.requests import rewrite
from hubplugin_qdrant.versioned_store import VersionedStore, usable_key

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EdgeStore(VersionedStore):
    """The vector `using` of a shard ("" is the unnamed one), with its offsets as payload.

    shard: an open `qdrant_edge.EdgeShard`. path: its folder, which the shard does not tell. One process at a time
    can hold a shard open, so nobody else writes to it. Raises StoreError for a vector that is not there or cannot
    carry offsets. Queries are recorded beside the shard, in PATH.queries. offset_key: the payload key for the offsets;
    by default that of the correction in place, or "hub_offset".
    """

    def __init__(
        self, shard: edge.EdgeShard, path: str | os.PathLike[str], using: str = "", *, offset_key: str | None = None
    ):
        self.shard, self._shard = shard, Shard(shard, path, using)
        self.url, self.using = self._shard.url, self._shard.using
        self.metric, self.dim = self._shard.metric, self._shard.dim
        self.record = folder_within(f"{os.fspath(path)}.queries", self.using)
        self.metadata = self._folder = Folder(Path(path), self.url)
        self.offset_key = usable_key(offset_key)

    @classmethod
    def open(cls, path: str | os.PathLike[str], using: str = "", *, offset_key: str | None = None) -> EdgeStore:
        """The shard in the folder `path`, opened. Raises StoreError if there is none or another process holds it."""
        if not (Path(path) / "segments").is_dir():
            raise StoreError(f"qdrant-edge:{path}: there is no shard in that folder")
        with one_line(f"qdrant-edge:{path}"):
            return cls(edge.EdgeShard.load(os.fspath(path)), path, using, offset_key=offset_key)

    def query(
        self, vector: Any, limit: int = 10, *, raw: bool = False, **options: Unpack[Options]
    ) -> list[models.ScoredPoint]:
        """The nearest of `vector` [d], best first, corrected if a correction is active, not switched off, and `raw` is
        not set.

        The options are those of `qdrant_edge.QueryRequest`: offset, filter, params, with_payload, with_vector, and
        score_threshold, which holds for the corrected score.
        """
        version, hidden = self._searched(raw or self.metadata.is_off()), self.metadata.read_manifest().offset_key
        return nearest(self._shard, version, np.asarray([vector]), limit, hidden, **options)[0]

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        return hits(nearest(self._shard, self._searched(raw), queries, k))

    def named(self, ids: Sequence[Id], key: str) -> list[str | None]:
        return texts_at(key, ids, self._shard.retrieved)

    def _searched(self, raw: bool) -> Version | None:
        """The version that a search uses."""
        return None if raw else self.metadata.read_manifest().active.get(self.using)

    def notes(self) -> Sequence[str]:
        return self.switched()

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        version = self.active_version()
        query = asked.astype(np.float32).tolist() if isinstance(asked, np.ndarray) else asked
        given = models.QueryRequest(query=query, using=self.using or None, limit=k, with_payload=True)
        manifest = Manifest(active={self.using: version})
        return shard_explanation(version, rewrite(given, manifest, manifest.offset_key).request)

    def count(self) -> int:
        return self._shard.count()

    def scan(self, group_by: str | None = None) -> Iterator[Batch]:
        require_ungrouped(self, group_by)
        manifest = self.metadata.read_manifest()
        return self._shard.scan(PointReader(self, manifest, manifest.active.get(self.using), None))

    def sample(self, count: int) -> Iterator[Batch]:
        manifest = self.metadata.read_manifest()
        yield self._shard.sampled(count, PointReader(self, manifest, manifest.active.get(self.using), None))

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raises StoreError where there is nothing to write to, or the payload key of the offsets is not free."""
        if self.count() == 0:
            raise StoreError(f"{self.url}: the shard is empty; add points first")
        super().require_writable(dry_run=dry_run)

    def holding(self, key: str, without: Collection[str]) -> Mapping[Id, Payload]:
        return self._shard.holding(key, without)

    def begin(self, model: OffsetModel, progress: Progress | None = None) -> EdgeWriting:
        self.require_writable()
        queries = chosen_queries(model, self.scan())
        version, found = self.version_of(model, progress)
        return EdgeWriting(self, version, found, self._shard, self._folder, queries)

    def delete(self, gone: Sequence[Version], last: bool = False, progress: Progress | None = None) -> None:
        self._shard.delete(gone, last)


def open_url(url: str) -> EdgeStore:
    """The store behind qdrant-edge:PATH, with ?using=VECTOR where the shard has several vectors, and &offset_key=KEY
    where another payload key than hub_offset shall hold the offsets."""
    path, _, query = url.removeprefix("qdrant-edge:").removeprefix("//").partition("?")
    options = dict(parse_qsl(query))
    using, offset_key = options.pop("using", ""), options.pop("offset_key", None)
    if not path or options:
        raise InputError(f"{url!r}: expected qdrant-edge:PATH, and no more than ?using=VECTOR&offset_key=KEY behind it")
    return EdgeStore.open(path, using, offset_key=offset_key)
