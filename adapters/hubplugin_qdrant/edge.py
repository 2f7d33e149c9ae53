"""A vector of a Qdrant Edge shard, the engine inside one's own process, as a `hubplugin.store.Store`: for devices
without a server. Needs `hubplugin[edge]`.

Offsets lie in the payload and are added by the engine's own formula, as in a collection. The manifest and the models
lie in the shard's folder, so that a copy of the folder is a copy of the correction.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import parse_qsl

import numpy as np
import qdrant_edge as edge
from pydantic import ValidationError
from qdrant_client import models
from typing_extensions import Unpack

from hubplugin import atomic
from hubplugin.abilities import Explanation
from hubplugin.calibration import chosen_queries
from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, load
from hubplugin.recording import folder_within
from hubplugin.store import Batch, Found, Hits, Id, require_ungrouped
from hubplugin.vectors import Progress
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.calibration import calibrated
from hubplugin_qdrant.explanation import shard_explanation
from hubplugin_qdrant.manifest import Manifest, Metadata, Payload, Version
from hubplugin_qdrant.points import PointReader
from hubplugin_qdrant.query_maps import mapped
from hubplugin_qdrant.requests import distance, rewrite, similarity_threshold
from hubplugin_qdrant.store import VersionedStore, VersionWriting, usable_key
from hubplugin_qdrant.transport import plain_id


class Folder(Metadata):
    """The metadata of the shard in the folder `shard`; `url` is what errors call it."""

    def __init__(self, shard: Path, url: str):
        self._path, self._url = shard / "hub", url
        self._known: tuple[object, Manifest] = (None, Manifest())

    def exists(self) -> bool:
        return self._path.exists()

    def create(self) -> None:
        self._path.mkdir(exist_ok=True)

    def delete(self) -> None:
        shutil.rmtree(self._path)

    def read_manifest(self) -> Manifest:
        """The manifest, read again only when its file is another one. Raises StoreError for a damaged one."""
        file = self._path / "manifest.json"
        try:
            status = file.stat()
        except FileNotFoundError:
            return Manifest()
        stamp = (status.st_ino, status.st_mtime_ns)
        if self._known[0] != stamp:
            try:
                self._known = (stamp, m.parse(json.loads(file.read_text()), self._url))
            except (ValueError, ValidationError) as error:
                raise StoreError(
                    f"{self._url}: hub/manifest.json is damaged ({error}); delete the folder hub and apply again"
                ) from None
        return self._known[1]

    def write_manifest(self, manifest: Manifest) -> None:
        """Puts `manifest` in the place of the one before, in one step."""
        self._write("manifest.json", manifest.model_dump_json(indent=2))

    def is_off(self) -> bool:
        return (self._path / "off").exists()

    def write_switch(self, off: bool) -> None:
        switch = self._path / "off"
        if off:
            switch.touch()
        else:
            switch.unlink(missing_ok=True)

    def read_model(self, version: Version) -> OffsetModel:
        return load(self._model_file(version.model))

    def write_model(self, model: OffsetModel) -> int:
        model.save(self._model_file(model.fingerprint))
        return 1

    def delete_model(self, version: Version) -> None:
        self._model_file(version.model).unlink(missing_ok=True)

    def _model_file(self, fingerprint: str) -> Path:
        return self._path / f"{fingerprint}.hub"

    def read_progress(self, version: Version) -> Id | None:
        """The last point that was written under `version`, None if none was."""
        try:
            progress = json.loads((self._path / "progress.json").read_text())
        except FileNotFoundError:
            return None
        return progress["resume"] if progress["number"] == version.number else None

    def write_progress(self, version: Version, resume: Id | None) -> None:
        self._write("progress.json", json.dumps({"number": version.number, "resume": resume}))

    def _write(self, name: str, content: str) -> None:
        """Writes a file of the folder whole or not at all."""
        atomic.write(self._path / name, content.encode())


BATCH = 2000
"""Points read and written at a time; each batch is flushed to disk, which takes about a tenth of a second."""

LARGEST = sys.float_info.max

METRICS = {"Cosine": Metric.COSINE, "Dot": Metric.DOT, "Euclid": Metric.EUCLIDEAN}


def _chosen_vector(url: str, path: Path, using: str) -> tuple[str, tuple[Metric, int]]:
    """The vector called `using`, or the only one. Raises StoreError if it is not there or cannot carry offsets."""
    try:
        dense = json.loads((path / "edge_config.json").read_text())["vectors"]
    except FileNotFoundError:
        raise StoreError(f"{url}: there is no shard in that folder") from None
    listed = ", ".join(repr(name) for name in sorted(dense)) or "none"
    if using not in dense:
        if using or len(dense) != 1:
            none_such = (f"there is no dense vector {using!r}",)
            wanted = none_such if using else ("name one of its dense vectors with ", Parameter("vector"))
            raise StoreError(f"{url}: ", *wanted, f"; there are: {listed}")
        using = next(iter(dense))
    found, name = dense[using], f"vector {using!r}" if using else "the vector"
    if found.get("multivector_config"):
        raise StoreError(f"{url}: {name} is a multi-vector, whose MaxSim has no single offset; use a dense vector")
    if found["distance"] not in METRICS:
        raise StoreError(f"{url}: {name} ranks by {found['distance']}; offsets are for {', '.join(METRICS)}")
    return using, (METRICS[found["distance"]], int(found["size"]))


@contextmanager
def one_line(url: str) -> Iterator[None]:
    """Turns what the engine raises, a bare Exception, into a StoreError."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        text = " ".join(str(error).split())
        held = "; another process has the shard open" if "WouldBlock" in text else ""
        raise StoreError(f"{url}: {text}{held}") from None


class Options(TypedDict, total=False):
    """Further arguments of `qdrant_edge.QueryRequest`, by the same names."""

    offset: int
    filter: edge.Filter | None
    params: edge.SearchParams | None
    score_threshold: float | None
    with_payload: bool | list[str] | edge.PayloadSelector
    with_vector: bool | list[str]


def formula(version: Version, length: float) -> edge.Formula:
    """The corrected similarity of a candidate, as `hubplugin_qdrant.requests.formula` has it for a server."""
    score = edge.Expression.Variable("$score")
    if length != 1:
        score = edge.Expression.Mult([edge.Expression.Constant(length), score])
    if version.metric is Metric.EUCLIDEAN:
        score = edge.Expression.Mult([edge.Expression.Constant(-0.5), score, score])
    return edge.Formula(edge.Expression.Sum([score, edge.Expression.Variable(version.key)]), {version.key: 0.0})


def _scale(version: Version | None) -> Callable[[float], float]:
    """From what `version` ranks by to the scores of the shard."""
    return distance if version is not None and version.metric is Metric.EUCLIDEAN else float


class EdgeStore(VersionedStore):
    """The vector `vector` of a shard (None is the unnamed one, or the only one), with its offsets as payload.

    shard: an open `qdrant_edge.EdgeShard`. path: its folder, which the shard does not tell. One process at a time
    can hold a shard open, so nobody else writes to it. Raises StoreError for a vector that is not there or cannot
    carry offsets. Queries are recorded beside the shard, in PATH.queries. offset_key: the payload key for the offsets;
    by default that of the correction in place, or "hub_offset".
    """

    def __init__(
        self,
        shard: edge.EdgeShard,
        path: str | os.PathLike[str],
        vector: str | None = None,
        *,
        offset_key: str | None = None,
    ):
        self.shard, self.url = shard, f"qdrant-edge:{Path(path)}"
        self.using, (self.metric, self.dim) = _chosen_vector(self.url, Path(path), vector or "")
        self.maps_queries = self.metric is not Metric.EUCLIDEAN
        self.record = folder_within(f"{os.fspath(path)}.queries", self.using)
        self.metadata: Folder = Folder(Path(path), self.url)
        self.offset_key = usable_key(offset_key)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], vector: str | None = None, *, offset_key: str | None = None
    ) -> EdgeStore:
        """The shard in the folder `path`, opened. Raises StoreError if there is none or another process holds it."""
        if not (Path(path) / "segments").is_dir():
            raise StoreError(f"qdrant-edge:{path}: there is no shard in that folder")
        with one_line(f"qdrant-edge:{path}"):
            return cls(edge.EdgeShard.load(os.fspath(path)), path, vector, offset_key=offset_key)

    def query(
        self, vector: Any, limit: int = 10, *, raw: bool = False, **options: Unpack[Options]
    ) -> list[models.ScoredPoint]:
        """The nearest of `vector` [d], best first, corrected if a correction is active, not switched off, and `raw` is
        not set.

        The options are those of `qdrant_edge.QueryRequest`: offset, filter, params, with_payload, with_vector, and
        score_threshold, which holds for the corrected score.
        """
        version, hidden = self._searched(raw or self.metadata.is_off()), self.metadata.read_manifest().offset_key
        if hidden is not None and options.get("with_payload") is True:  # no key was asked for by name
            options["with_payload"] = edge.PayloadSelector.Exclude([hidden])
        scale, found = _scale(version), self._answers(version, np.asarray([vector]), limit, **options)[0]
        return [
            models.ScoredPoint.model_construct(
                id=point.id, version=point.version, score=scale(point.score), payload=point.payload, vector=point.vector
            )
            for point in found
        ]

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        return self.nearest(self._searched(raw), queries, k)

    def _searched(self, raw: bool) -> Version | None:
        """The version that a search uses."""
        return None if raw else self.mapping(self.metadata.read_manifest().active.get(self.using))

    def nearest(self, version: Version | None, queries: np.ndarray, k: int, **options: Unpack[Options]) -> Hits:
        """The `k` nearest of each of `queries` [m, d], best first, corrected by `version` unless it is None."""
        scale, found = _scale(version), self._answers(version, queries, k, **options)
        return Hits(
            [[plain_id(point.id) for point in points] for points in found],
            [[scale(point.score) for point in points] for points in found],
        )

    def _answers(
        self, version: Version | None, queries: np.ndarray, limit: int, **options: Unpack[Options]
    ) -> list[list[edge.ScoredPoint]]:
        requests = [self._request(version, query, limit, **options) for query in np.asarray(queries, np.float32)]
        with one_line(self.url):
            found: list[list[edge.ScoredPoint]] = self.shard.query_batch(edge.QueryBatchRequest(requests))
        return found

    def _request(
        self, version: Version | None, query: np.ndarray, limit: int, **options: Unpack[Options]
    ) -> edge.QueryRequest:
        given: dict[str, Any] = {"with_payload": False, "with_vector": False, **options}
        offset = given.pop("offset", 0)
        if version is None:
            return edge.QueryRequest(limit, offset, edge.Query.Nearest(query.tolist(), self.using or None), **given)
        asked, length = mapped(query.tolist(), version)
        raw = edge.Query.Nearest(asked, self.using or None)
        filtered = {name: given.pop(name, None) for name in ("filter", "params")}
        params = filtered["params"]
        exact = params is not None and params.exact
        candidates = edge.Prefetch(version.candidates(limit + offset, exact), raw, **filtered)
        given["score_threshold"] = similarity_threshold(given.get("score_threshold"), version.metric)
        return edge.QueryRequest(limit, offset, formula(version, length), [candidates], **given)

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        version = self.active_version()
        query = asked.astype(np.float32).tolist() if isinstance(asked, np.ndarray) else asked
        given = models.QueryRequest(query=query, using=self.using or None, limit=k, with_payload=True)
        manifest = Manifest(active={self.using: self.mapping(version) or version})
        return shard_explanation(version, rewrite(given, manifest, manifest.offset_key).request)

    def count(self) -> int:
        with one_line(self.url):
            has_vector = edge.Filter(must=[edge.HasVectorCondition(self.using)])
            count: int = self.shard.count(edge.CountRequest(exact=True, filter=has_vector))
            return count

    def scan(self, group_by: str | None = None) -> Iterator[Batch]:
        require_ungrouped(self, group_by)
        manifest = self.metadata.read_manifest()
        return self.scan_behind(None, PointReader(self, manifest, manifest.active.get(self.using), None))

    def scan_behind(self, after: Id | None, reader: PointReader) -> Iterator[Batch]:
        """The points behind the point `after`, in the order of ids, in batches as `reader` makes them."""
        vectors = [self.using] if self.using else True
        for records in self._pages(after, with_payload=reader.payload, with_vector=vectors):
            batch = reader.batch([record for record in records if plain_id(record.id) != after])
            if len(batch.ids):
                yield batch

    def _pages(self, following: Any = None, **asked: Any) -> Iterator[list[Any]]:
        """The points from the point `following` on, in the order of ids, page by page."""
        more = True
        while more:
            with one_line(self.url):
                records, following = self.shard.scroll(edge.ScrollRequest(following, BATCH, **asked))
            yield records
            more = following is not None

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raises StoreError where there is nothing to write to, or the payload key of the offsets is not free."""
        if self.count() == 0:
            raise StoreError(f"{self.url}: the shard is empty; add points first")
        super().require_writable(dry_run=dry_run)

    def holding(self, key: str, without: Collection[str]) -> Mapping[Id, Payload]:
        anything = edge.Filter(must_not=[edge.IsEmptyCondition(key)])
        numbers: list[Any] = [
            edge.FieldCondition(f"{key}.{each}", range=edge.RangeFloat(gte=-LARGEST)) for each in without
        ]
        chosen = edge.Filter(should=[edge.IsNullCondition(key), anything], must_not=numbers)
        records = next(self._pages(filter=chosen, with_payload=[key], with_vector=False))
        return {plain_id(record.id): record.payload for record in records}

    def begin(self, model: OffsetModel, progress: Progress | None = None) -> EdgeWriting:
        self.require_writable()
        version, found = self.version_of(model, progress)
        return EdgeWriting(self, version, found, model)

    def delete(self, gone: Sequence[Version], last: bool = False, progress: Progress | None = None) -> None:
        if not gone:
            return
        key = gone[0].offset_key
        with one_line(self.url):
            for version in gone:
                if version.key in self.shard.info().payload_schema:
                    self.shard.update(edge.UpdateOperation.delete_field_index(version.key))
        for records in self._pages(with_payload=[key], with_vector=False):
            points: dict[tuple[str, ...], list[Any]] = {}
            for record in records:
                keys = m.to_delete(record.payload, gone) if last else m.payload_keys(gone)
                points.setdefault(keys, []).append(plain_id(record.id))
            with one_line(self.url):
                for keys, some in points.items():
                    if keys:
                        self.shard.update(edge.UpdateOperation.delete_payload(some, list(keys)))
        with one_line(self.url):
            self.shard.flush()


class EdgeWriting(VersionWriting):
    """The offsets of `version` on their way into the shard. model: theirs, by whose bank the search is calibrated."""

    def __init__(self, store: EdgeStore, version: Version, found: Found, model: OffsetModel):
        super().__init__(store, version, found, model)
        self._edge, self._model = store, model

    def scan(self) -> Iterator[Batch]:
        """The points in the order of ids, behind the last one that a half-written version has."""
        after = self._edge.metadata.read_progress(self.version) if self.found == "half-written" else None
        return self._edge.scan_behind(after, PointReader(self._edge, self.undisturbed(), self.version, None))

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Gives each point its offset, for good when this returns."""
        version, shard = self.version, self._edge.shard
        with one_line(self._edge.url):
            for point, offset in zip(batch.ids, offsets.tolist(), strict=True):
                shard.update(edge.UpdateOperation.set_payload([point], {version.field: offset}, version.offset_key))
            shard.flush()
        self._edge.metadata.write_progress(version, batch.ids[-1])

    def finished(self) -> Version:
        """With an index on the offsets, with which the formula takes half the time."""
        version, shard = self.version, self._edge.shard
        with one_line(self._edge.url):
            if version.key not in shard.info().payload_schema:
                shard.update(edge.UpdateOperation.create_field_index(version.key, edge.PayloadSchemaType.Float))
            shard.flush()
        queries = chosen_queries(self._model, self._edge.scan())
        return calibrated(version, self._edge.count(), CalibrationSearches(self._edge, queries))


class CalibrationSearches:
    """Searches of `store` for `queries` [m, d]; see `calibration.Searches`."""

    exact_allowed = True

    def __init__(self, store: EdgeStore, queries: np.ndarray):
        self._store, self._queries = store, queries

    def raw(self, limit: int, exact: bool) -> Hits:
        return self._found(None, limit, exact)

    def corrected(self, version: Version, limit: int, exact: bool) -> Hits:
        return self._found(version, limit, exact)

    def _found(self, version: Version | None, limit: int, exact: bool) -> Hits:
        return self._store.nearest(version, self._queries, limit, params=edge.SearchParams(exact=exact))


def open_url(url: str) -> EdgeStore:
    """The store behind qdrant-edge:PATH, with ?using=VECTOR where the shard has several vectors, and &offset_key=KEY
    where another payload key than hub_offset shall hold the offsets."""
    path, _, query = url.removeprefix("qdrant-edge:").removeprefix("//").partition("?")
    options = dict(parse_qsl(query))
    using, offset_key = options.pop("using", ""), options.pop("offset_key", None)
    if not path or options:
        raise InputError(f"{url!r}: expected qdrant-edge:PATH, and no more than ?using=VECTOR&offset_key=KEY behind it")
    return EdgeStore.open(path, using, offset_key=offset_key)
