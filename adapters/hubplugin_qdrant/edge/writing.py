"""Offsets on their way into a shard."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hubplugin.store import Batch, Found
from hubplugin_qdrant.calibration import calibrated
from hubplugin_qdrant.edge.folder import Folder
from hubplugin_qdrant.edge.searches import CalibrationSearches
from hubplugin_qdrant.edge.shard import Shard
from hubplugin_qdrant.manifest import Version
from hubplugin_qdrant.points import PointReader
from hubplugin_qdrant.versioned_store import VersionedStore, VersionWriting


class EdgeWriting(VersionWriting):
    """The offsets of `version` on their way into `shard`. queries: [m, d], with which its search is calibrated."""

    def __init__(
        self, store: VersionedStore, version: Version, found: Found, shard: Shard, folder: Folder, queries: np.ndarray
    ):
        super().__init__(store, version, found)
        self._shard, self._folder, self._queries = shard, folder, queries

    def scan(self) -> Iterator[Batch]:
        """The points in the order of ids, behind the last one that a half-written version has."""
        after = self._folder.read_progress(self.version) if self.found == "half-written" else None
        return self._shard.scan(PointReader(self.store, self.undisturbed(), self.version, None), after)

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        self._shard.write(self.version, batch.ids, offsets)
        self._folder.write_progress(self.version, batch.ids[-1])

    def finished(self) -> Version:
        self._shard.index(self.version)
        return calibrated(self.version, self._shard.count(), CalibrationSearches(self._shard, self._queries))
