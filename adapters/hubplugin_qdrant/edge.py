"""A Qdrant Edge shard, the engine inside one's own process, as a `hubplugin.store.Store`: for devices without a server.

Offsets lie in the payload and are added by the engine's own formula, as in a collection. The manifest and the models
lie in the shard's folder (see `edge_folder`), so that a copy of the folder is a copy of the correction.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import qdrant_edge as edge
from qdrant_client import models

from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.store import Batch, Correction, Hits, Id, Store
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import versions
from hubplugin_qdrant.calibration import chosen_queries, with_oversampling
from hubplugin_qdrant.edge_folder import Folder
from hubplugin_qdrant.manifest import Manifest, Version
from hubplugin_qdrant.requests.scores import similarity_threshold, with_distances

BATCH = 2000
"""Points read and written at a time; each batch is flushed to disk, which takes about a tenth of a second."""

METRICS = {"Cosine": Metric.COSINE, "Dot": Metric.DOT, "Euclid": Metric.EUCLIDEAN}


class EdgeStore(Store):
    """The vector `using` of a shard ("" is the unnamed one), with its offsets as payload.

    shard: an open `qdrant_edge.EdgeShard`. path: its folder, which the shard does not tell. One process at a time
    can hold a shard open, so nobody else writes to it. Raises StoreError for a vector that is not there or cannot
    carry offsets.
    """

    def __init__(self, shard: edge.EdgeShard, path: str | os.PathLike[str], using: str = ""):
        self.shard, self.path = shard, Path(path)
        self.url = f"qdrant-edge:{self.path}"
        self.using, (self.metric, self.dim) = _chosen_vector(self.url, self.path, using)
        self._folder = Folder(self.path, self.url)
        self._target: Version | None = None
        self._calibration_queries = np.empty((0, self.dim), np.float32)

    @classmethod
    def open(cls, path: str | os.PathLike[str], using: str = "") -> EdgeStore:
        """The shard in the folder `path`, opened. Raises StoreError if there is none or another process holds it."""
        if not (Path(path) / "segments").is_dir():
            raise StoreError(f"qdrant-edge:{path}: there is no shard in that folder")
        with _one_line(f"qdrant-edge:{path}"):
            return cls(edge.EdgeShard.load(os.fspath(path)), path, using)

    def query(
        self,
        vector: Any,
        limit: int = 10,
        *,
        offset: int = 0,
        filter: edge.Filter | None = None,
        params: edge.SearchParams | None = None,
        score_threshold: float | None = None,
        with_payload: Any = False,
        with_vector: Any = False,
        raw: bool = False,
    ) -> list[models.ScoredPoint]:
        """The nearest of `vector` [d], best first, corrected if a correction is active and `raw` is not set.

        The other arguments are those of `qdrant_edge.QueryRequest`; `score_threshold` holds for the corrected score.
        """
        version = None if raw else self._folder.read_manifest().active.get(self.using)
        request = self._request(
            vector, limit, version, offset=offset, filter=filter, params=params,
            score_threshold=score_threshold, with_payload=with_payload, with_vector=with_vector,
        )  # fmt: skip
        with _one_line(self.url):
            return _points(self.shard.query(request), version)

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        version = None if raw else self._folder.read_manifest().active.get(self.using)
        requests = [self._request(query, k, version) for query in np.asarray(queries, np.float32)]
        with _one_line(self.url):
            found = [_points(points, version) for points in self.shard.query_batch(edge.QueryBatchRequest(requests))]
        return Hits(
            [[_plain(point.id) for point in points] for points in found],
            [[point.score for point in points] for points in found],
        )

    def _request(
        self,
        vector: Any,
        limit: int,
        version: Version | None,
        *,
        offset: int = 0,
        filter: edge.Filter | None = None,
        params: edge.SearchParams | None = None,
        score_threshold: float | None = None,
        with_payload: Any = False,
        with_vector: Any = False,
    ) -> edge.QueryRequest:
        nearest = edge.Query.Nearest(np.asarray(vector, np.float32).tolist(), self.using or None)
        shown = {
            "with_payload": edge.PayloadSelector.Exclude([m.KEY]) if with_payload is True else with_payload,
            "with_vector": with_vector,
        }
        if version is None:
            return edge.QueryRequest(
                limit, offset, nearest, filter=filter, params=params, score_threshold=score_threshold, **shown
            )
        candidates = edge.Prefetch(version.candidates(limit + offset), nearest, filter=filter, params=params)
        threshold = similarity_threshold(score_threshold, version.metric)
        return edge.QueryRequest(limit, offset, formula(version), [candidates], score_threshold=threshold, **shown)

    def count(self) -> int:
        with _one_line(self.url):
            has_vector = edge.Filter(must=[edge.HasVectorCondition(self.using)])
            return self.shard.count(edge.CountRequest(exact=True, filter=has_vector))

    def scan(self, after: Id | None = None) -> Iterator[Batch]:
        """Every point that has the vector, in the order of ids. A vector of length 0 has no cosine and is left out."""
        manifest = self._folder.read_manifest()
        version = self._target or manifest.active.get(self.using)
        following: Any = after
        more = True
        while more:
            request = edge.ScrollRequest(
                following, BATCH, with_payload=[m.KEY], with_vector=[self.using] if self.using else True
            )
            with _one_line(self.url):
                records, following = self.shard.scroll(request)
            batch = self._batch([record for record in records if _plain(record.id) != after], version, manifest)
            if len(batch.ids):
                yield batch
            more = following is not None

    def _batch(self, records: list[Any], version: Version | None, manifest: Manifest) -> Batch:
        ids: list[Id] = []
        vectors, offsets = [], []
        for record in records:
            vector = record.vector
            if isinstance(vector, dict):
                vector = vector.get(self.using)
            if vector is None or (self.metric is Metric.COSINE and not any(vector)):
                continue
            ids.append(_plain(record.id))
            vectors.append(vector)
            offsets.append(version.held(record.payload) if version is not None else None)
        matrix = np.array(vectors, np.float32).reshape(len(ids), self.dim)
        foreign = sum(manifest.is_foreign(record.payload) for record in records)
        return Batch(ids, matrix, np.array(offsets, np.float32), ids[-1] if ids else None, foreign=foreign)

    def correction(self) -> Correction | None:
        version, active = self._folder.read_manifest().lying(self.using)
        return None if version is None else Correction(self._folder.read_model(version), active)

    def begin(self, model: OffsetModel) -> Id | None:
        if self.count() == 0:
            raise StoreError(f"{self.url}: the shard is empty; add points first")
        self._calibration_queries = chosen_queries(model, self.scan())
        manifest = self._folder.read_manifest()
        self._target = versions.amended(manifest, self.using, model.fingerprint, "payload")
        if self._target is not None:
            return None
        self._target = versions.half_written(manifest, self.using, model.fingerprint, "payload")
        if self._target is not None:
            return self._folder.read_progress(self._target)
        manifest = self._cleared(versions.given_up(manifest, self.using))  # no other run can be writing it
        self._folder.write_model(model)
        self._target = Version.of(model, manifest.last_number + 1, self.using, 1)
        self._folder.write_manifest(versions.begun(manifest, self._target))
        return None

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        target = self._begun()
        with _one_line(self.url):
            for point, offset in zip(batch.ids, offsets.tolist(), strict=True):
                self.shard.update(edge.UpdateOperation.set_payload([point], {target.field: offset}, m.KEY))
            self.shard.flush()
        self._folder.write_progress(target, batch.resume)

    def activate(self) -> None:
        target, manifest = self._begun(), self._folder.read_manifest()
        with _one_line(self.url):
            if target.key not in self.shard.info().payload_schema:  # with an index the formula takes half the time
                self.shard.update(edge.UpdateOperation.create_field_index(target.key, edge.PayloadSchemaType.Float))
            self.shard.flush()
            target = self._calibrated(target)
        self._folder.write_manifest(versions.activated(manifest, target))

    def release(self) -> None:
        self._target = None

    def _calibrated(self, version: Version) -> Version:
        def similarities(limit: int, version: Version | None, offset: int = 0) -> np.ndarray:
            requests = [self._request(query, limit, version, offset=offset) for query in self._calibration_queries]
            found = np.full((len(requests), limit), -np.inf)
            for row, points in enumerate(self.shard.query_batch(edge.QueryBatchRequest(requests))):
                found[row, : len(points)] = [point.score for point in points]
            if version is None and self.metric is Metric.EUCLIDEAN:
                found = -0.5 * found * np.abs(found)
            return found

        def corrected(oversampling: float) -> np.ndarray:
            return similarities(m.SMALLEST_PAGE, version.model_copy(update={"oversampling": oversampling}))

        return with_oversampling(
            version, self.count(), corrected, lambda candidates: similarities(1, None, candidates - 1)[:, 0]
        )

    def remove(self) -> None:
        """Deletes our payload, indexes and folder and nothing else; goes on where it was cut off."""
        manifest = versions.retired(self._folder.read_manifest(), self.using)
        if manifest.kept_up():
            self._folder.write_manifest(self._cleared(manifest))
        elif self._folder.exists():
            self._folder.write_manifest(manifest)
            self._delete(m.KEY, manifest.retired)
            self._folder.delete()

    def _cleared(self, manifest: Manifest) -> Manifest:
        """`manifest` without what is retired, once that is deleted from the points."""
        for version in manifest.retired:
            self._delete(version.key, (version,))
        for version in versions.unused_models(manifest):
            self._folder.delete_model(version)
        return versions.cleared(manifest)

    def _delete(self, key: str, indexed: tuple[Version, ...]) -> None:
        with _one_line(self.url):
            for version in indexed:
                if version.key in self.shard.info().payload_schema:
                    self.shard.update(edge.UpdateOperation.delete_field_index(version.key))
            ours = edge.Filter(must_not=[edge.IsEmptyCondition(m.KEY)])
            self.shard.update(edge.UpdateOperation.delete_payload_by_filter(ours, [key]))
            self.shard.flush()

    def _begun(self) -> Version:
        if self._target is None:
            raise StoreError(f"{self.url}: begin was not called")
        return self._target


def formula(version: Version) -> edge.Formula:
    """The corrected similarity of a candidate, as `hubplugin_qdrant.requests.scores.formula` has it for a server."""
    score = edge.Expression.Variable("$score")
    if version.metric is Metric.EUCLIDEAN:
        score = edge.Expression.Mult([edge.Expression.Constant(-0.5), score, score])
    return edge.Formula(edge.Expression.Sum([score, edge.Expression.Variable(version.key)]), {version.key: 0.0})


def open_url(url: str) -> EdgeStore:
    """The store behind qdrant-edge:PATH, with ?using=VECTOR where the shard has several vectors."""
    path, _, query = url.removeprefix("qdrant-edge:").removeprefix("//").partition("?")
    options = dict(parse_qsl(query))
    using = options.pop("using", "")
    if not path or options:
        raise InputError(f"{url!r}: expected qdrant-edge:PATH, and no more than ?using=VECTOR behind it")
    return EdgeStore.open(path, using)


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
            wanted = none_such if using else ("name one of its dense vectors with ", Parameter("using"))
            raise StoreError(f"{url}: ", *wanted, f"; there are: {listed}")
        using = next(iter(dense))
    found, name = dense[using], f"vector {using!r}" if using else "the vector"
    if found.get("multivector_config"):
        raise StoreError(f"{url}: {name} is a multi-vector, whose MaxSim has no single offset; use a dense vector")
    if found["distance"] not in METRICS:
        raise StoreError(f"{url}: {name} ranks by {found['distance']}; offsets are for {', '.join(METRICS)}")
    return using, (METRICS[found["distance"]], int(found["size"]))


def _points(found: list[Any], version: Version | None) -> list[models.ScoredPoint]:
    points = [
        models.ScoredPoint.model_construct(
            id=point.id, version=point.version, score=point.score, payload=point.payload, vector=point.vector
        )
        for point in found
    ]
    euclidean = version is not None and version.metric is Metric.EUCLIDEAN
    return with_distances(points) if euclidean else points


def _plain(point: Any) -> Id:
    return point if isinstance(point, int) else str(point)


@contextmanager
def _one_line(url: str) -> Iterator[None]:
    """Turns what the engine raises, a bare Exception, into a StoreError."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        text = " ".join(str(error).split())
        held = "; another process has the shard open" if "WouldBlock" in text else ""
        raise StoreError(f"{url}: {text}{held}") from None
