"""Offsets on their way into a collection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from hubplugin.abilities import Share
from hubplugin.store import Batch, Found, Id
from hubplugin.vectors import Progress
from hubplugin_qdrant.manifest import Version
from hubplugin_qdrant.offsets_in_writes import chunks
from hubplugin_qdrant.points import PointReader, can_tell, changed_ids
from hubplugin_qdrant.requests import having, lacking_offset
from hubplugin_qdrant.schema import Schema
from hubplugin_qdrant.shards import QdrantShare
from hubplugin_qdrant.stored_offsets import storage_of
from hubplugin_qdrant.streams import read_ahead
from hubplugin_qdrant.transport import EVERY_ID, IdRange
from hubplugin_qdrant.versioned_store import VersionedStore, VersionWriting


class QdrantWriting(VersionWriting):
    """The offsets of `version` on their way into the collection of `schema`. queries: [m, d], with which its search is
    calibrated. progress: told of what comes after the last write. between: ids of the points that `scan` yields."""

    def __init__(
        self,
        store: VersionedStore,
        version: Version,
        found: Found,
        schema: Schema,
        queries: np.ndarray,
        progress: Progress | None,
    ):
        super().__init__(store, version, found)
        self._progress = progress
        self.between: IdRange = EVERY_ID
        self._schema, self._transport, self._queries = schema, schema.transport, queries
        self._undirected: dict[Id | None, list[Id]] = {}  # points of length 0 that are not neutral, by shard key
        self._others: set[Id] = set()  # points that others have written since they were read

    def scan(self) -> Iterator[Batch]:
        """Every point: one that came meanwhile may stand before those that are written."""
        yield from self._reader().read(self._transport, between=self.between)

    def changed(self, read: Iterable[Batch]) -> Iterator[Batch]:
        """What others have written since `read`: once seen, a point is read each time. All, where a server cannot tell,
        and where a point may have moved to another group."""
        if self.version.group_by is not None or not can_tell(self._transport):
            yield from self.scan()
            return
        reader, using, metric = self._reader(), self.store.using, self.version.metric
        done, total = 0, self._transport.count()
        for seen, ids in read_ahead((len(b.ids), changed_ids(self._transport, using, metric, b)) for b in read):
            self._others.update(ids)
            done += seen
            if self._progress is not None:
                self._progress("closing", min(done, total), total)
        for part in chunks(list(self._others), self._transport.page):
            yield from reader.read(self._transport, having(part))
        for batch in reader.read(self._transport, lacking_offset(self.version)):
            self._others.update(batch.ids)
            yield batch

    def _reader(self) -> PointReader:
        """What reads the points as they are once all is written that is under way."""
        self._transport.settle()
        reader = PointReader(self.store, self.undisturbed(), self.version, self.version.group_by)
        self._undirected = reader.undirected
        return reader

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Returns before it is written; what goes wrong is raised by a later call. `scan` and `activate` wait."""
        items = list(zip(batch.ids, storage_of(self.version).values(batch.vectors, offsets), strict=True))
        self._transport.submit(lambda: self._schema.write(self.version, items, batch.place))

    def settle(self) -> None:
        self._transport.settle()
        self.undisturbed()
        for shard_key, points in self._undirected.items():
            neutral = storage_of(self.version).neutral()
            self._schema.write(self.version, [(point, neutral) for point in points], shard_key)

    def share(self) -> Share:
        return QdrantShare(self.store.url, self.version.model_dump_json())

    def finished(self) -> Version:
        self.settle()
        with self._transport.one_line("activating"):
            return self._schema.finish(self.version, self._queries, self._progress)

    def close(self) -> None:
        """Ends what is under way."""
        try:
            if self.is_taken_out:
                self._transport.settle()
            super().close()
        finally:
            self._transport.give_up()
