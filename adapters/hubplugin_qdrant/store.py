"""A vector of a Qdrant collection as a `hubplugin.store.Store`, and the job on it: apply, refresh, inspect, remove."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar, cast
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import UnexpectedResponse
from qdrant_client.local.qdrant_local import QdrantLocal
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    wait_random_exponential,
)

from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.jobs import correction
from hubplugin.methods import asked_for
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.store import Batch, Correction, Hits, Id, Store
from hubplugin.tuning import Pairs
from hubplugin.vectors import Progress, VectorLike
from hubplugin_qdrant import companion
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.calibration import calibrated, chosen_probes
from hubplugin_qdrant.client import HubQdrantClient, require_client
from hubplugin_qdrant.errors import PASSING, Fault, fault_of, finished, one_line
from hubplugin_qdrant.manifest import Manifest, Version
from hubplugin_qdrant.streams import Writers, read_ahead
from hubplugin_qdrant.writes import chunks, group_of, neutral, set_offsets, stored_offset, values

BATCH = 2000
"""Points read and written at a time, at most, where their vectors are not too large for it."""

BATCH_NUMBERS = 1_000_000
"""Numbers read at a time: some 10 MB of JSON, where a server by default accepts 32."""

WRITERS = 4
"""Writing requests under way at a time: enough that the server never waits for us."""

QUERIES_AT_ONCE = 32

FORMULAS, VECTORS_IN_PLACE = (1, 14), (1, 18)
"""Server versions: the oldest one supported, whose formulas add offsets to scores; and the first that adds a named
vector to a collection."""

RETRY_SECONDS, LIMITED_SECONDS = 60.0, 600.0
"""For how long a request is made again while the server does not answer, as during a restart, and while it limits the
rate, which it counts by the minute."""

SCHEMA_SECONDS, OPTIMISE_SECONDS, POLL_SECONDS = 3600.0, 600.0, 0.5
"""For how long a server may take to make an index or a vector, and to build its graph before the oversampling is
calibrated on it; and how often it is asked."""

RETRY_WAIT = wait_random_exponential(multiplier=0.2, max=10)

SMALLER = (Fault.TOO_LARGE, Fault.LATE, Fault.LIMITED)
"""Faults of a write that one of fewer points may not have."""

logger = logging.getLogger("hubplugin_qdrant")

Page = TypeVar("Page")

METRICS = {
    models.Distance.COSINE: Metric.COSINE,
    models.Distance.DOT: Metric.DOT,
    models.Distance.EUCLID: Metric.EUCLIDEAN,
}

Storage: TypeAlias = Literal["payload", "vector"]


class QdrantStore(Store):
    """The vector `using` of a collection ("" is the unnamed one), with its offsets as `storage`; see `apply`.

    Raises StoreError for a collection or vector that is not there or cannot carry offsets, and for a server that
    cannot be reached. `collection` may be an alias: the correction belongs to what it stands for now.
    """

    shared = True

    def __init__(
        self, client: QdrantClient, collection: str, using: str = "", storage: Storage | None = None, *, url: str = ""
    ):
        self.client = require_client(client, QdrantClient)
        if not isinstance(collection, str):
            raise InputError(f"collection must be a name, not {type(collection).__name__}; the client comes before it")
        self.url = url or f"qdrant collection {collection!r}"
        with one_line(self.url, "opening", collection):
            self.collection = companion.real_name(self.client, collection)
            info = self._described(collection)
            self._server = _version(self.client.info().version)
        if self._server < FORMULAS:
            found = ".".join(map(str, self._server))
            raise StoreError(
                f"{self.url}: the server is Qdrant {found}, which has no formulas; upgrade it to 1.14 or newer"
            )
        self._local = isinstance(self.client._client, QdrantLocal)  # which is no use from a second thread
        self._given_up = threading.Event()
        manifest = self._manifest()
        self.using, parameters = _chosen_vector(self.url, info, using, manifest)
        self.metric, self.dim = METRICS[parameters.distance], parameters.size
        self._info = info
        if storage not in (None, "payload", "vector"):
            raise InputError(f"storage={storage!r}: use 'payload' or 'vector'")
        if storage == "vector":
            self._require_second_vectors()
        active = manifest.active.get(self.using)
        self.storage = storage or (active.storage if active is not None else "payload")
        self._target: Version | None = None
        self._group_by: str | None = None
        self._writers = Writers(0 if self._local else WRITERS)
        self._probes = np.empty((0, self.dim), np.float32)
        self._undirected: dict[Any, list[Id]] = {}  # points of length 0 that are not neutral, by shard key

    def _described(self, collection: str) -> models.CollectionInfo:
        try:
            return self.client.get_collection(self.collection)
        except Exception as error:
            if fault_of(error) is not Fault.MISSING:
                raise
            names = [c.name for c in self.client.get_collections().collections if not c.name.endswith("--hub")]
            listed = ", ".join(sorted(names)) or "none"
            raise StoreError(f"{self.url}: there is no collection {collection!r}; there are: {listed}") from None

    def count(self) -> int:
        strict = self._info.config.strict_mode_config
        inexact = strict is not None and strict.enabled and strict.search_allow_exact is False
        with self._one_line("counting"):
            return int(self._retry(self.client.count, self.collection, exact=not inexact).count)

    def group_by(self, key: str) -> None:
        self._group_by = key

    def scan(self, after: Id | None = None) -> Iterator[Batch]:
        """Every point that has the vector, in the order of ids. A vector of length 0 has no cosine and is left out.

        No batch has a `resume`: a run that was cut off reads on from the start, and writes what lacks its offset.
        """
        self._writers.settle()
        self._undirected = {}
        manifest = self._manifest()
        if self._target is not None:
            self._require_undisturbed(self._target, manifest)
        version = self._target or manifest.active.get(self.using)
        key = self._group_by if self._target is None else None
        key = key or (version.group_by if version is not None else None)
        vectors, payload = self._vectors_read(version), [m.KEY, key] if key else [m.KEY]
        for batches in self._pages(lambda records: self._batches(records, version, manifest, key), vectors, payload):
            yield from batches

    def _pages(
        self,
        turned: Callable[[list[models.Record]], Page],
        with_vectors: list[str] | bool,
        with_payload: list[str] | bool,
    ) -> Iterator[Page]:
        """All points, in the order of ids, page by page as `turned` makes them."""

        def pages() -> Iterator[Page]:
            offset: Any = None
            more = True
            while more:
                with self._one_line("reading"):
                    records, offset = self._retry(
                        self.client.scroll,
                        self.collection,
                        limit=self._largest,
                        offset=offset,
                        with_vectors=with_vectors,
                        with_payload=with_payload,
                    )
                yield turned(records)
                more = offset is not None

        return pages() if self._local else read_ahead(pages())

    @property
    def _largest(self) -> int:
        """Points read and written at a time, at most."""
        strict = self._info.config.strict_mode_config
        limits = (strict.max_query_limit, strict.upsert_max_batchsize) if strict is not None and strict.enabled else ()
        return max(1, min(BATCH, BATCH_NUMBERS // self.dim, *(limit for limit in limits if limit)))

    def _vectors_read(self, version: Version | None) -> list[str] | bool:
        if not self.using:
            return True
        return [self.using, version.second] if version is not None and version.storage == "vector" else [self.using]

    def _batches(
        self, records: list[models.Record], version: Version | None, manifest: Manifest, key: str | None
    ) -> list[Batch]:
        """One batch for each shard key, which is what its points are written by, where the user shards by key."""
        by_shard: dict[Any, list[models.Record]] = {}
        for record in records:
            by_shard.setdefault(record.shard_key, []).append(record)
        batches = [self._batch(part, place, version, manifest, key) for place, part in by_shard.items()]
        return [batch for batch in batches if len(batch.ids)]

    def _batch(
        self,
        records: list[models.Record],
        shard_key: Any,
        version: Version | None,
        manifest: Manifest,
        key: str | None,
    ) -> Batch:
        ids: list[Id] = []
        vectors, groups = [], []
        offsets: list[float | None] = []
        for record in records:
            vector: Any = record.vector
            second = None
            if isinstance(vector, dict):
                second = vector.get(version.second) if version is not None else None
                vector = vector.get(self.using)
            if vector is None:
                continue
            if self.metric is Metric.COSINE and not any(vector):
                if version is not None and not _is_neutral(version, record.payload, second):
                    self._undirected.setdefault(shard_key, []).append(_plain(record.id))
                continue
            ids.append(_plain(record.id))
            vectors.append(vector)
            if key is not None:
                groups.append(group_of(record.payload, key))
            if version is not None and version.storage == "vector":
                offsets.append(stored_offset(vector, second, version))
            else:
                offsets.append(version.held(record.payload) if version is not None else None)
        matrix = np.array(vectors, np.float32).reshape(len(ids), self.dim)
        foreign = sum(manifest.is_foreign(record.payload) for record in records)
        found = np.array(offsets, np.float32)
        return Batch(ids, matrix, found, place=shard_key, foreign=foreign, groups=groups if key is not None else None)

    def correction(self) -> Correction | None:
        version, active = self._manifest().lying(self.using)
        if version is None:
            return None
        with self._one_line("reading the model"):
            return Correction(companion.read_model(self.client, self.collection, version), active)

    def _require_writable(self) -> None:
        """Raises StoreError where there is nothing to write to, or writing would take for ever."""
        if self.count() == 0:
            raise StoreError(f"{self.url}: the collection is empty; add points first")
        if getattr(self._info.config.optimizer_config, "prevent_unoptimized", None):
            raise StoreError(
                f"{self.url}: with prevent_unoptimized each write waits for the graph; switch it off for the time: "
                "update_collection(optimizers_config=OptimizersConfigDiff(prevent_unoptimized=False))"
            )

    def _require_second_vectors(self) -> None:
        """Raises StoreError where no second vector can be added."""
        found = ".".join(map(str, self._server))
        if self._server < VECTORS_IN_PLACE or not hasattr(self.client, "create_vector_name"):
            why = f"server (this one is {found}) and qdrant-client add vectors to a collection from 1.18 on"
        elif self._local and not self.using:
            why = "a collection of qdrant-client's local mode takes no unnamed vectors beside a named one"
        else:
            return
        raise StoreError(
            f"{self.url}: ",
            Parameter("storage", "vector"),
            f" adds a second vector, and {why}; use ",
            Parameter("storage", "payload"),
        )

    def begin(self, model: OffsetModel) -> Id | None:
        self._require_writable()
        self._probes = chosen_probes(model, self.scan())
        with self._one_line("preparing"):
            self._retry(companion.create, self.client, self.collection, self._info.config.params.replication_factor)
            manifest = self._manifest()
            active, writing = manifest.active.get(self.using), manifest.writing
            if _is_of(active, model, self.storage):
                self._target = active
                return None
            owner = uuid.uuid4().hex
            if writing is not None and writing.vector == self.using and _is_of(writing, model, self.storage):
                self._target = writing.model_copy(update={"owner": owner})
                self._write_manifest(manifest.changed(writing=self._target))
            else:
                manifest = self._cleared(manifest)
                parts = self._retry(companion.write_model, self.client, self.collection, model)
                self._target = self._new_version(model, manifest.last_number + 1, parts, owner)
                # What is half-written, perhaps by a run that goes on, is given up, and taken out by the next job.
                retired = manifest.retired + ((writing,) if writing is not None else ())
                self._write_manifest(
                    manifest.changed(writing=self._target, last_number=self._target.number, retired=retired)
                )
            if self.storage == "vector":
                self._create_second(self._target)
            return None

    def _new_version(self, model: OffsetModel, number: int, parts: int, owner: str) -> Version:
        return Version.of(model, number, self.using, parts, storage=self.storage, owner=owner, **self._abilities())

    def _abilities(self) -> dict[str, Any]:
        """What the collection allows a search to do at present."""
        strict = self._info.config.strict_mode_config
        return {"max_candidates": strict.max_query_limit if strict is not None and strict.enabled else None}

    def _require_undisturbed(self, target: Version, manifest: Manifest) -> None:
        """Raises StoreError if `manifest` no longer names `target`, which this run writes: another run has begun
        since, or has ended. What the other has taken out is then taken out once more, with what came later."""
        if target.is_same_writing(manifest.writing) or target.is_same_writing(manifest.active.get(self.using)):
            return
        if target.number not in {version.number for version in manifest.everything()}:
            self._writers.settle()
            with self._one_line("stopping"):
                self._take_out([target])
        raise StoreError(
            f"{self.url}: another run has begun since, and this one stops; searches use nothing that it wrote"
        )

    def _create_second(self, version: Version) -> None:
        """The second vector, with the memory and graph settings of the first."""
        given = self._info.config.params.vectors
        first = given if isinstance(given, models.VectorParams) else cast(dict[str, Any], given)[self.using]
        dense = models.DenseVectorConfig(
            size=self.dim + 1,
            distance=models.Distance.EUCLID if self.metric is Metric.EUCLIDEAN else models.Distance.DOT,
            # A coarser type would leave nothing of the offset.
            datatype=models.VectorStorageDatatype.FLOAT16 if first.datatype == models.Datatype.FLOAT16 else None,
        )
        name = version.second
        if name not in self._vectors():
            config = models.DenseVectorNameConfig(dense=dense)
            self._retry(self.client.create_vector_name, self.collection, name, config, wait=True)
            self._until(lambda: name in self._vectors(), SCHEMA_SECONDS)
        # No quantisation: it would clip the query's last component to the range of the others.
        settings = first.model_dump(include={"hnsw_config", "on_disk", "memory"}, exclude_none=True)
        if settings:
            changes = models.VectorParamsDiff.model_validate(settings)
            self._retry(self.client.update_collection, self.collection, vectors_config={name: changes})

    def _vectors(self) -> dict[str, models.VectorParams]:
        """The named vectors that there are now."""
        found = self._retry(self.client.get_collection, self.collection).config.params.vectors
        return found if isinstance(found, dict) else {}

    def _until(self, done: Callable[[], bool], seconds: float) -> None:
        """Waits for the server to finish what it was asked for, `seconds` at most."""
        given_up = time.monotonic() + seconds
        while not done():
            if time.monotonic() > given_up:
                logger.warning("%s: the server has not finished within %g s; going on", self.url, seconds)
                return
            time.sleep(POLL_SECONDS)

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Returns before it is written; what goes wrong is raised by a later call. `scan` and `activate` wait."""
        target = self._begun()
        items = list(zip(batch.ids, values(batch.vectors, offsets, target), strict=True))
        self._writers.submit(lambda: self._write(target, items, batch.place))

    def _write(self, target: Version, items: list[tuple[Id, Any]], shard_key: Any) -> None:
        """Gives each point of `items` its offset or second vector."""

        def send(items: list[tuple[Id, Any]]) -> None:
            if target.storage == "vector":
                points = [models.PointVectors.model_construct(id=k, vector={target.second: v}) for k, v in items]
                self.client.update_vectors(self.collection, points, wait=True, shard_key_selector=shard_key)
            else:
                operations: list[Any] = [set_offsets(k, {target.field: v}, shard_key=shard_key) for k, v in items]
                self.client.batch_update_points(self.collection, operations, wait=True)

        self._send(items, send)

    def _send(self, items: list[tuple[Id, Any]], send: Callable[[list[tuple[Id, Any]]], None]) -> None:
        """Gives `items`, each a point and what goes to it, to `send`, in smaller requests where large ones fail. Those
        of points that are no longer there, for which a server refuses a whole request, are left out."""
        size = len(items)

        def request() -> int:
            nonlocal size
            part = items[:size]
            try:
                send(part)
            except Exception as error:
                if fault_of(error) is Fault.TOO_LARGE and len(part) == 1:
                    raise StoreError(f"{self.url}: the server takes no request as large as one point") from None
                if fault_of(error) in SMALLER:
                    size = max(1, len(part) // 2)
                raise
            return len(part)

        with self._one_line("writing"):
            while items:
                try:
                    sent = self._retry(request)
                except Exception as error:
                    if not isinstance(error, KeyError) and fault_of(error) is not Fault.MISSING:  # local mode, a server
                        raise
                    points = [point for point, _ in items]
                    found = self._retry(self.client.retrieve, self.collection, ids=points, with_payload=False)
                    there = {_plain(record.id) for record in found}
                    if len(there) == len(items):
                        raise
                    items = [item for item in items if item[0] in there]
                else:
                    items = items[sent:]

    def activate(self) -> None:
        target = self._begun()
        self._writers.settle()
        self._require_undisturbed(target, self._manifest())
        for shard_key, points in self._undirected.items():
            self._write(target, [(point, neutral(target)) for point in points], shard_key)
        with self._one_line("activating"):
            target = target.model_copy(update=self._abilities())
            if target.storage == "payload":
                self._index(target)
                self._until(self._optimised, OPTIMISE_SECONDS)
                target = calibrated(self.client, self.collection, target, self._probes, self.count(), self._answers)
            manifest = self._manifest()
            self._require_undisturbed(target, manifest)
            before = manifest.active.get(self.using)
            if before is not None and before.number == target.number:
                manifest = manifest.changed(active=manifest.active | {self.using: target})
            else:
                retired = manifest.retired + ((before,) if before is not None else ())
                active = manifest.active | {self.using: target}
                manifest = manifest.changed(active=active, writing=None, retired=retired)
            self._write_manifest(manifest)

    def _index(self, version: Version) -> None:
        """A float index on the offsets: faster formulas, and under strict mode the only ones allowed."""
        if self._local or version.key in self._schema():  # local mode has no indexes, and warns of it
            return
        schema: Any = models.PayloadSchemaType.FLOAT
        if self._server >= (1, 17):  # nobody filters by it: no links for it in the graph
            schema = models.FloatIndexParams(type=models.FloatIndexType.FLOAT, enable_hnsw=False)
        try:
            self._retry(self.client.create_payload_index, self.collection, version.key, schema, wait=False)
        except UnexpectedResponse as error:
            strict = self._info.config.strict_mode_config
            if error.status_code != 400 or (strict is not None and strict.unindexed_filtering_retrieve is False):
                raise
            logger.warning("%s: no index on the offsets, searches are slower: %s", self.url, error)
            return
        self._until(lambda: version.key in self._schema(), SCHEMA_SECONDS)

    def _schema(self) -> dict[str, models.PayloadIndexInfo]:
        """The payload indexes that there are now."""
        schema: dict[str, models.PayloadIndexInfo] = self._retry(
            self.client.get_collection, self.collection
        ).payload_schema
        return schema

    def _optimised(self) -> bool:
        """Whether searches use the graph again, which a server builds anew after so many writes."""
        status = self._retry(self.client.get_collection, self.collection).status
        return bool(status != models.CollectionStatus.YELLOW)

    def notes(self) -> Sequence[str]:
        manifest = self._manifest()
        active = manifest.active.get(self.using)
        lines = [active.where()] if active is not None else []
        if active is not None and active.metric is Metric.EUCLIDEAN:
            lines.append(
                "a fusion by DBSF gets similarities here where it gets distances raw: other scores, other order"
            )
        if manifest.writing is not None and manifest.writing.vector == self.using:
            lines.append(f"half-written: {manifest.writing.where()}")
        return lines

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        client = self.client if raw else HubQdrantClient.wrap(self.client)
        requests = [
            models.QueryRequest(query=query, using=self.using or None, limit=k, with_payload=False)
            for query in np.asarray(queries, np.float32).tolist()
        ]
        with self._one_line("searching"):
            found = self._answers(client, requests)
        return Hits(
            [[cast(Id, point.id) for point in response.points] for response in found],
            [[point.score for point in response.points] for response in found],
        )

    def _answers(self, client: QdrantClient, requests: list[models.QueryRequest]) -> list[models.QueryResponse]:
        return [
            response
            for chunk in chunks(requests, self._queries_at_once)
            for response in self._retry(client.query_batch_points, self.collection, chunk)
        ]

    def plan(self) -> Sequence[str]:
        number = self._manifest().last_number + 1
        if self.storage == "vector":
            beside = repr(self.using) if self.using else "the unnamed one"
            where = f"a vector 'hub_v{number}' of {self.dim + 1} dimensions beside {beside}"
        else:
            where = f"a number 'v{number}' under the payload key {m.KEY!r}, with a float index"
        lines = [
            f"each point of {self.collection!r} would get {where}",
            f"manifest and model would lie in {m.companion(self.collection)!r}",
        ]
        if self.storage == "vector" and not self.using:
            lines.append('after a removal get_collection would show {"": VectorParams(...)} for VectorParams(...)')
        return lines

    @property
    def _queries_at_once(self) -> int:
        strict = self._info.config.strict_mode_config
        allowed = strict.search_max_batchsize if strict is not None and strict.enabled else None
        return min(QUERIES_AT_ONCE, allowed or QUERIES_AT_ONCE)

    def remove(self) -> None:
        """Deletes our payload, indexes and companion and nothing else; goes on where it was cut off."""
        try:
            with self._one_line("removing"):
                self._remove()
        finally:
            self.release()

    def _remove(self) -> None:
        if not self.client.collection_exists(m.companion(self.collection)):
            return
        manifest = self._manifest()
        active = {name: version for name, version in manifest.active.items() if name != self.using}
        mine = [version for version in manifest.everything() if version not in active.values()]
        writing = manifest.writing if manifest.writing is not None and manifest.writing.vector != self.using else None
        keep = tuple(version for version in mine if version is not writing)
        manifest = manifest.changed(active=active, writing=writing, retired=keep)
        self._write_manifest(manifest)
        if active or writing:
            self._write_manifest(self._cleared(manifest))
        else:
            self._delete_seconds(mine)
            keys = [version.key for version in mine if version.storage == "payload"]
            if keys:
                self._delete_payload([m.KEY], keys)
            self.client.delete_collection(m.companion(self.collection))

    def release(self) -> None:
        """Ends what is under way. What was half-written stays for the next run to go on with."""
        self._given_up.set()  # what is being tried again need not be
        self._writers.abandon()
        self._given_up = threading.Event()
        self._target = None

    def _cleared(self, manifest: Manifest) -> Manifest:
        """`manifest` without what is retired, once that is deleted from the points."""
        self._take_out(list(manifest.retired))
        kept = {version.model for version in manifest.kept_up()}
        for version in manifest.retired:
            if version.model not in kept:
                companion.delete_model(self.client, self.collection, version)
        return manifest.changed(retired=())

    def _take_out(self, versions: list[Version]) -> None:
        """Deletes from the points what `versions` have written."""
        self._delete_seconds(versions)
        keys = [version.key for version in versions if version.storage == "payload"]
        if keys:
            self._delete_payload(keys, keys)

    def _delete_seconds(self, versions: list[Version]) -> None:
        there = self._vectors() if any(version.storage == "vector" for version in versions) else {}
        for version in versions:
            if version.second in there:
                self._retry(self.client.delete_vector_name, self.collection, version.second, wait=True)

    def _delete_payload(self, keys: list[str], indexes: list[str]) -> None:
        if not self._local:
            for key in set(indexes) & set(self._schema()):
                self._retry(self.client.delete_payload_index, self.collection, key, wait=False)
            self._until(lambda: not set(indexes) & set(self._schema()), SCHEMA_SECONDS)
        done, total = 0, self.count()
        for by_shard in self._pages(_by_shard, False, False):
            for shard_key, points in by_shard.items():
                self._writers.submit(partial(self._without, points, keys, shard_key))
                done += len(points)
            if self.progress is not None:
                self.progress("removing offsets", min(done, total), total)
        self._writers.settle()

    def _without(self, points: list[Id], keys: list[str], shard_key: Any) -> None:
        def send(items: list[tuple[Id, Any]]) -> None:
            selector = models.PointIdsList(points=[point for point, _ in items], shard_key=shard_key)
            self.client.delete_payload(self.collection, keys=keys, points=selector, wait=True)

        self._send([(point, None) for point in points], send)

    def _manifest(self) -> Manifest:
        with self._one_line("reading the manifest"):
            return self._retry(companion.read_manifest, self.client, self.collection) or Manifest()

    def _write_manifest(self, manifest: Manifest) -> None:
        self._retry(companion.write_manifest, self.client, self.collection, manifest)

    def _begun(self) -> Version:
        if self._target is None:
            raise StoreError(f"{self.url}: begin was not called")
        return self._target

    def _one_line(self, doing: str) -> AbstractContextManager[None]:
        return one_line(self.url, doing, self.collection)

    def _sleep(self, seconds: float) -> None:
        """Waits before a request is made again, unless this run is given up."""
        self._given_up.wait(seconds)

    def _retry(self, call: Any, *given: Any, **named: Any) -> Any:
        """The answer to a request that does no harm if it is made twice, made again while the server is away."""
        given_up = self._given_up
        attempts = Retrying(
            retry=retry_if_exception(lambda error: fault_of(error) in (*PASSING, Fault.TOO_LARGE)),
            stop=lambda state: _patience_is_over(state) or given_up.is_set(),
            sleep=self._sleep,
            wait=_wait,
            reraise=True,
        )
        return attempts(lambda: finished(call(*given, **named)))


def _patience_is_over(state: RetryCallState) -> bool:
    """Whether a request has been made again for long enough. One that a rate is limited for waits its turn among
    the others that are under way."""
    error = state.outcome.exception() if state.outcome is not None else None
    patience = LIMITED_SECONDS if fault_of(error) is Fault.LIMITED else RETRY_SECONDS
    return (state.seconds_since_start or 0.0) >= patience


def _wait(state: RetryCallState) -> float:
    """Until a request is made again: as long as the server asked for, if it did."""
    error = state.outcome.exception() if state.outcome is not None else None
    return max(RETRY_WAIT(state), float(getattr(error, "retry_after_s", 0)))


def apply(
    client: QdrantClient,
    collection: str,
    query_bank: VectorLike,
    *,
    using: str = "",
    storage: Storage | None = None,
    method: str = "blend",
    target_bank: VectorLike | None = None,
    pairs: Pairs = None,
    group_by: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
    **parameters: Any,
) -> correction.Applied:
    """Corrects the vector `using` of `collection` in place; a `HubQdrantClient` then searches it corrected.

    query_bank: [m, d] example queries, as for `hubplugin.fit`, which also has `method`, its `parameters`,
    `target_bank`, `pairs`, `device`, `memory` and `progress`. force: apply it even if it does not help on held-out
    bank queries. dry_run: write nothing. group_by: a payload key that searches are filtered by, such as "tenant":
    offsets are fitted within each of its values; see `hubplugin.apply`. using: "" is the unnamed vector,
    or the only one there is.
    storage: that of the correction in place, or "payload": one number a point, added to the scores of the candidates
    that a search fetches, which works everywhere. "vector" is a second vector with one more dimension, which ranks
    exactly and at the speed of the index for the price of its space; it needs server 1.18. Beside an unnamed vector it
    leaves a trace when it is removed: `get_collection` then shows {"": VectorParams(...)} for VectorParams(...).
    Searches change in one step at the end; a run that was cut off goes on when it is started again.
    Raises InputError for the bank or a parameter, StoreError for the collection or the server, CorrectionRefused if
    the correction would not help.
    """
    asked_for(method, parameters, apply)  # a misspelt argument of this function lies among them
    store = QdrantStore(client, collection, using, storage)
    return correction.apply(
        store, query_bank, method, target_bank,
        pairs=pairs, group_by=group_by, force=force, dry_run=dry_run,
        device=device, memory=memory, progress=progress, **parameters,
    )  # fmt: skip


def refresh(
    client: QdrantClient,
    collection: str,
    *,
    using: str = "",
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> correction.Applied:
    """Writes the offsets of points that came or changed without the wrapper, and no others; says how many."""
    store = QdrantStore(client, collection, using)
    return correction.refresh(store, device=device, memory=memory, progress=progress)


def inspect(
    client: QdrantClient,
    collection: str,
    *,
    using: str = "",
    probes: int = correction.PROBES,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> correction.Inspection:
    """What correction lies in the collection, whether every point has the offset that its vector gives, and what the
    correction does to hubness now, seen by searching for `probes` queries of the bank; 0 searches for none."""
    store = QdrantStore(client, collection, using)
    return correction.inspect(store, probes=probes, device=device, memory=memory, progress=progress)


def remove(client: QdrantClient, collection: str, *, using: str = "", progress: Progress | None = None) -> None:
    """Takes the correction out: points, payloads and vectors are as if it had never been there."""
    store = QdrantStore(client, collection, using)
    store.progress = progress
    store.remove()


def open_url(url: str) -> QdrantStore:
    """The store behind qdrant://HOST:6333/COLLECTION, qdrant+https://HOST:6333/COLLECTION or
    qdrant-local:PATH/COLLECTION, each with ?using=VECTOR where the collection has named vectors, and &storage=vector
    for offsets in a second vector.

    The api key is read from the environment variable QDRANT_API_KEY and is never part of a URL.
    """
    scheme, _, rest = url.partition(":")
    parts = urlsplit(f"{'local:' if scheme == 'qdrant-local' else '//'}{rest.removeprefix('//')}")
    options = dict(parse_qsl(parts.query))
    using, storage = options.pop("using", ""), options.pop("storage", None)
    place, _, collection = parts.path.rpartition("/")
    expected = "qdrant-local:PATH/COLLECTION" if scheme == "qdrant-local" else f"{scheme}://HOST:6333/COLLECTION"
    if parts.username or parts.password or options:
        raise InputError(
            f"expected {expected}, and no more than ?using=VECTOR&storage=vector behind it; "
            "an api key is read from the environment variable QDRANT_API_KEY"
        )
    if not collection or not (place if scheme == "qdrant-local" else parts.hostname):
        raise InputError(f"{url!r} names no collection; expected {expected}")
    try:
        with one_line(url, "opening", collection):
            client = _connect(scheme, parts, place)
            return QdrantStore(client, collection, using, cast(Storage | None, storage), url=url)
    except StoreError as error:
        if not parts.netloc.endswith(":6334"):
            raise
        raise StoreError(*error.args, "; 6334 is usually the port of gRPC, a URL has that of HTTP, 6333") from None


def _connect(scheme: str, parts: Any, place: str) -> QdrantClient:
    if scheme == "qdrant-local":
        if not os.path.isdir(place):
            raise StoreError(f"qdrant-local:{place}: there is no such folder")
        try:
            return QdrantClient(path=place)
        except RuntimeError as error:
            raise StoreError(f"qdrant-local:{place}: {' '.join(str(error).split())}") from None
    return QdrantClient(
        host=parts.hostname,
        port=parts.port or 6333,
        https=scheme == "qdrant+https",
        prefix=place.strip("/") or None,
        api_key=os.environ.get("QDRANT_API_KEY"),
        timeout=60,
        check_compatibility=False,  # the store asks for the version itself
    )


def _chosen_vector(
    url: str, info: models.CollectionInfo, using: str, manifest: Manifest
) -> tuple[str, models.VectorParams]:
    """The vector called `using`, or the only one that is not ours. Of one that was deleted and whose correction is left
    it is what it was, so that the correction can be removed.

    Raises StoreError if it is not there or cannot carry offsets.
    """
    given = info.config.params.vectors or {}
    given = {"": given} if isinstance(given, models.VectorParams) else given
    dense = {name: parameters for name, parameters in given.items() if name not in manifest.seconds()}
    deleted = [version for version in manifest.everything() if version.vector == using not in dense]
    if deleted and (using or not dense):
        distance = next(known for known, metric in METRICS.items() if metric is deleted[0].metric)
        return using, models.VectorParams(size=deleted[0].dim, distance=distance)
    sparse = info.config.params.sparse_vectors or {}
    listed = ", ".join(repr(name) for name in dense) or "none"
    if using in sparse or not dense:
        raise StoreError(f"{url}: sparse vectors have no offsets; dense vectors there: {listed}")
    if using not in dense:
        if using or len(dense) > 1:
            none_such = (f"there is no vector {using!r}",)
            wanted = none_such if using else ("name one of its vectors with ", Parameter("using"))
            raise StoreError(f"{url}: ", *wanted, f"; dense vectors there: {listed}")
        using = next(iter(dense))
    found = dense[using]
    name = f"vector {using!r}" if using else "the vector"
    if found.multivector_config is not None:
        raise StoreError(f"{url}: {name} is a multi-vector, whose MaxSim has no single offset; use a dense vector")
    if found.datatype == models.Datatype.UINT8:
        raise StoreError(
            f"{url}: {name} is of uint8, which no query bank of floats compares with; use float16 or float32"
        )
    if found.distance not in METRICS:
        known = ", ".join(distance.value for distance in METRICS)
        raise StoreError(f"{url}: {name} ranks by {found.distance.value}; offsets are for {known}: re-create it as one")
    return using, found


def _by_shard(records: list[models.Record]) -> dict[Any, list[Id]]:
    """The ids of `records` by shard key."""
    by_shard: dict[Any, list[Id]] = {}
    for record in records:
        by_shard.setdefault(record.shard_key, []).append(_plain(record.id))
    return by_shard


def _is_of(version: Version | None, model: OffsetModel, storage: Storage) -> bool:
    return version is not None and (version.model, version.storage) == (model.fingerprint, storage)


def _is_neutral(version: Version, payload: dict[str, Any] | None, second: list[float] | None) -> bool:
    """Whether a point whose vector has length 0 holds nothing that moves it."""
    if version.storage == "vector":
        return second is not None and not any(second)
    return not version.held(payload)


def _plain(point: Id | uuid.UUID) -> Id:
    return point if isinstance(point, int) else str(point)


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
