"""What a store holds, read once and kept on disk for as long as a job needs it."""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Iterator

import numpy as np

from hubplugin.model import Value
from hubplugin.selection.banks import places
from hubplugin.store import Batch, Store
from hubplugin.vectors import Progress, Sliceable, Vectors, spool


class Members(Vectors):
    """The targets of one group among those of a gallery: `rows` are their numbers."""

    def __init__(self, name: str, gallery: Sliceable, rows: np.ndarray):
        super().__init__(name, len(rows), gallery.dim)
        self._gallery, self.numbers = gallery, rows

    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        for first in range(0, self.rows, size):
            yield self._gallery.take(self.numbers[first : first + size])

    def some(self, rows: np.ndarray) -> np.ndarray:
        return self._checked(self._gallery.take(self.numbers[rows]), rows)


class SpooledGallery:
    """The `vectors` of a store, and, of a shared one, the batches they came in: so a fit reads them as often as it
    needs, and they are written without another scan. rows: of the ids in `clicked`."""

    def __init__(
        self, store: Store, progress: Progress | None, group_by: str | None = None, clicked: np.ndarray | None = None
    ):
        self.rows: dict[int | str, int] = {}
        self._clicked = set() if clicked is None else set(clicked.tolist())
        self._values: dict[Value, int] | None = None if group_by is None else {}
        self._codes = tempfile.TemporaryFile()  # noqa: SIM115 - it goes with this object
        self._lines = tempfile.TemporaryFile("w+")  # noqa: SIM115 - so does this
        for file in (self._codes, self._lines):
            weakref.finalize(self, file.close)
        self.vectors = spool(self._read(store, progress, group_by), store.url)

    def _read(self, store: Store, progress: Progress | None, group_by: str | None) -> Iterator[np.ndarray]:
        total, done = store.count(), 0
        for batch in store.scan(group_by):
            if store.shared:
                print(json.dumps([batch.place, batch.ids]), file=self._lines)
            if self._values is not None:
                codes = [self._values.setdefault(value, len(self._values)) for value in batch.groups or ()]
                np.array(codes, np.int32).tofile(self._codes)
            if self._clicked:
                self.rows.update(places(batch.ids, done, self._clicked))
            yield batch.vectors
            done += len(batch.vectors)
            if progress is not None:
                progress("reading the gallery", min(done, total), total)

    def groups(self) -> list[tuple[Value, Members]]:
        """The targets of each value, but of none: in the order in which they first came."""
        codes = self._by_row()
        return [
            (value, Members(f"{self.vectors.name}, {value!r}", self.vectors, np.flatnonzero(codes == code)))
            for value, code in (self._values or {}).items()
            if value is not None
        ]

    def _by_row(self) -> np.ndarray:
        self._codes.flush()
        return np.memmap(self._codes, np.int32, "r")

    def batches(self) -> Iterator[Batch]:
        self._lines.seek(0)
        values = list(self._values or ())
        first = 0
        for line in self._lines:
            place, ids = json.loads(line)
            rows = slice(first, first + len(ids))
            groups = [values[code] for code in self._by_row()[rows]] if values else None
            first += len(ids)
            offsets = np.full(len(ids), np.nan, np.float32)
            yield Batch(ids, self.vectors.take(rows), offsets, place=place, groups=groups)
