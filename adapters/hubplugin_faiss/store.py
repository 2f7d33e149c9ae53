"""A Faiss file as a `Store`: URL `faiss:photos.faiss`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np

from hubplugin.abilities import Explanation
from hubplugin.errors import InputError, StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.quarantine import Quarantine, parse
from hubplugin.store import Batch, Correction, Hits, Id, Store, StoredVersion, require_ungrouped
from hubplugin.vectors import Progress
from hubplugin_faiss.files import HALF
from hubplugin_faiss.index_file import IndexFile
from hubplugin_faiss.kept_versions import KeptVersions
from hubplugin_faiss.shards import FaissShard, divided
from hubplugin_faiss.writing import FaissWriting, Pending


class FaissStore(Store):
    """One index file. Its queries are recorded beside it: photos.faiss.queries."""

    def __init__(self, path: str | os.PathLike[str], metric: Metric | None = None):
        self._file = IndexFile(path, metric)
        self.url, self.dim = self._file.url, int(self._file.index.d)
        self.record = Path(f"{os.fspath(path)}.queries")
        self.how_to_record = f"hubplugin.Recorder({str(self.record)!r}).add(queries) beside each search"

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
        require_ungrouped(self, group_by)
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
        return FaissWriting.joined(self._file, fingerprint, rows)

    def correction(self) -> Correction | None:
        active = self._file.model()
        if active is not None:
            return Correction(active, True)
        pending = Pending(self._file).found()
        return None if pending is None else Correction(pending[0], False)

    def begin(self, model: OffsetModel, progress: Progress | None = None) -> FaissWriting:
        return FaissWriting.begun(self._file, model)

    def versions(self) -> Sequence[StoredVersion]:
        return KeptVersions(self._file).listed(Pending(self._file).found())

    def return_to(self, number: int) -> None:
        KeptVersions(self._file).return_to(number)

    def prune(self, keep: int, progress: Progress | None = None) -> None:
        KeptVersions(self._file).prune(keep)

    def quarantined(self) -> Quarantine:
        listed = self._file.folder.quarantine
        if not os.path.lexists(listed):
            return Quarantine()
        try:
            return parse(listed.read_bytes(), repr(str(listed)))
        except OSError as error:
            raise StoreError(f"{str(listed)!r} cannot be read: {error.strerror}") from None

    def write_quarantine(self, quarantine: Quarantine) -> None:
        with self._file.run() as run:
            run.folder.write(run.folder.quarantine, quarantine.model_dump_json(indent=2).encode())

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
        """The model is not needed: it may be missing or damaged."""
        if not self._file.handler.is_upgraded() and not self._file.folder.path.is_dir():
            return
        with self._file.run() as run:
            if self._file.handler.is_upgraded():
                self._file.downgrade(run)
            run.delete_folder()


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
