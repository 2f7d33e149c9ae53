"""A Faiss file as a `Store`: URL `faiss:photos.faiss`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np

from hubplugin.errors import InputError, ModelFileError, StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.model.file import write
from hubplugin.quarantine import Quarantine, parse
from hubplugin.store import Batch, Correction, Explanation, Hits, Id, Store, StoredVersion
from hubplugin.vectors import Progress
from hubplugin_faiss.file_reader import beside
from hubplugin_faiss.files import HALF
from hubplugin_faiss.index_file import IndexFile
from hubplugin_faiss.kept_versions import KeptVersions
from hubplugin_faiss.shards import FaissShard, divided
from hubplugin_faiss.writing import FaissWriting, PendingOffsets


class FaissStore(Store):
    """One index file. Its queries are recorded beside it: photos.faiss.queries."""

    def __init__(self, path: str | os.PathLike[str], metric: Metric | None = None):
        self._file = IndexFile(path, metric)
        self.url, self.dim = self._file.url, int(self._file.index.d)
        self.record = Path(f"{os.fspath(path)}.queries")

    @property
    def metric(self) -> Metric:  # type: ignore[override]
        """euclidean for an L2 index; for inner product cosine if its vectors are of unit length, else dot."""
        return self._file.metric

    @property
    def precision(self) -> float:  # type: ignore[override]
        """A quantiser rounds offsets: twice its largest error over the range of the model's offsets is added."""
        model, handler = self._file.model(), self._file.handler
        if model is None or model.gallery is None:
            return Store.precision
        tried = np.linspace(model.gallery.smallest, model.gallery.largest, 1000, dtype=np.float32)
        # A second stage that an upgrade added rounds the vectors, too, and so what a model gives for them.
        return Store.precision + 2 * (handler.rounding(tried) + (HALF if handler.two_stage else 0.0))

    @property
    def unit(self) -> bool:  # type: ignore[override]
        return self._file.unit

    def count(self) -> int:
        return self._file.handler.count

    def scan(self, group_by: str | None = None) -> Iterator[Batch]:
        self.require_ungrouped(group_by)
        return self._file.scan()

    def sample(self, count: int) -> Iterator[Batch]:
        return self._file.sample(count)

    def shards(self, count: int | None) -> list[FaissShard]:
        """Ranges of rows. The machines that read them see the same file system."""
        return divided(self._file, count)

    @property
    def stamp(self) -> str:
        return self._file.stamp

    def scan_rows(self, start: int, stop: int) -> Iterator[Batch]:
        """`scan` of some rows."""
        return self._file.scan(start, stop)

    def joined(self, fingerprint: str, rows: range) -> tuple[FaissWriting, OffsetModel]:
        """The part for some rows of a writing that another process has begun, and its model."""
        model = PendingOffsets(self._file).model()
        if model is None or model.fingerprint != fingerprint:
            raise StoreError(f"{self.url}: another run has begun since, and this one stops; the index is unchanged")
        return FaissWriting(self._file, model, rows), model

    def correction(self) -> Correction | None:
        active = self._file.model()
        model = PendingOffsets(self._file).model() if active is None else active
        return None if model is None else Correction(model, active is not None)

    def begin(self, model: OffsetModel, progress: Progress | None = None) -> FaissWriting:
        return FaissWriting(self._file, model)

    def versions(self) -> Sequence[StoredVersion]:
        return KeptVersions(self._file).listed(PendingOffsets(self._file).model())

    def return_to(self, number: int) -> None:
        KeptVersions(self._file).return_to(number)

    def prune(self, keep: int, progress: Progress | None = None) -> None:
        KeptVersions(self._file).prune(keep)

    def quarantined(self) -> Quarantine:
        listed = self._quarantine
        return parse(listed.read_text(), repr(str(listed))) if listed.is_file() else Quarantine()

    def write_quarantine(self, quarantine: Quarantine) -> None:
        try:
            write(self._quarantine, quarantine.model_dump_json(indent=2).encode())
        except ModelFileError as error:
            raise StoreError(f"{self.url}: the quarantine list cannot be written: {error}") from None

    @property
    def _quarantine(self) -> Path:
        return beside(self._file.path, ".quarantine")

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        index = self._file.raw if raw else self._file.index
        scores, ids = index.search(np.ascontiguousarray(queries, np.float32), k)
        found = ids >= 0
        return Hits(
            [row[keep].tolist() for row, keep in zip(ids, found, strict=True)],
            [row[keep].tolist() for row, keep in zip(scores, found, strict=True)],
        )

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        """The same for every query: `asked` and `k` are what they always were."""
        extra = self._file.handler.extra_dimensions()
        if not extra:
            raise StoreError(f"{self.url}: no correction is active; run `hubplugin apply` first")
        appended = [float(str(each)) for each in extra[0].query.astype(np.float32)]
        scores = "|q - t|^2 - 2 offset, plus a constant" if extra[0].euclidean else "similarity + offset"
        text = (
            "Plain Faiss, in any language, searches this file corrected: read_index, then search(q, k) with queries\n"
            f"of {self.dim} components as before. The index itself turns q into [q, {str(appended)[1:-1]}], whose\n"
            f"extra components meet those that store each target's offset. A score is {scores}."
        )
        return Explanation(text, {"dim": self.dim, "appended": appended})

    def remove(self, progress: Progress | None = None) -> None:
        self._file.downgrade()
        PendingOffsets(self._file).delete()
        KeptVersions(self._file).delete()
        self._quarantine.unlink(missing_ok=True)


def open_url(url: str) -> FaissStore:
    """The store behind `faiss:PATH`, or `faiss:PATH?metric=dot`, which overrules what the index looks like.

    Raises StoreError if there is no such file, or Faiss cannot read it, or its type cannot carry offsets.
    """
    path, _, query = url.removeprefix("faiss:").partition("?")
    if path.startswith("//") and not os.path.exists(path):  # faiss://FILE, as other URLs are written
        path = path[2:]
    options = parse_qs(query)
    metric = options.pop("metric", [None])[0]
    if options:
        raise InputError(f"{url!r}: unknown option {next(iter(options))!r}; the only one is metric")
    return FaissStore(path, None if metric is None else Metric.parse(metric))
