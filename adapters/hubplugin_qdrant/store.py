"""A vector of a Qdrant collection as a `hubplugin.store.Store`."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
from qdrant_client import QdrantClient, models

from hubplugin import corrections
from hubplugin.calibration import choose_queries, largest_offset
from hubplugin.corrections import ManifestStore
from hubplugin.errors import InputError, StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.recording import folder_within
from hubplugin.store import (
    Batch,
    Explanation,
    Found,
    Hits,
    Id,
    Share,
    Writing,
    require_room,
)
from hubplugin.vectors import Progress
from hubplugin_qdrant import explanation, metadata, plain_client, searches
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.calls import Answer, Operation, run
from hubplugin_qdrant.client import require_client
from hubplugin_qdrant.manifest import KEY, QdrantManifest, QdrantVersion, vectors_of
from hubplugin_qdrant.metadata import CorrectionCache
from hubplugin_qdrant.offsets import group_of, read_offsets, rounding, values_of
from hubplugin_qdrant.places import Place, QdrantShard, QdrantShare, divide
from hubplugin_qdrant.schema import (
    PayloadSchema,
    Schema,
    Storage,
    VectorSchema,
    choose_storage,
    dense_vectors,
    find_vector,
    vector_names,
)
from hubplugin_qdrant.transport import (
    EVERY_ID,
    IdRange,
    QdrantTransport,
    by_shard,
    one_line,
    plain_id,
)

PARTS = 10
"""A collection is written in so many parts: meanwhile most of its graph serves."""


SLOWER = "searches of everybody are slower"

logger = logging.getLogger("hubplugin.qdrant")


class QdrantStore(ManifestStore[QdrantVersion]):
    """The vector `vector` of a collection, with its offsets as `storage`.

    `open_store` makes it.
    """

    shared = True
    how_to_record = (
        "search through HubQdrantClient(..., record=FOLDER), and name the folder "
        "behind this store: ?record=FOLDER"
    )

    def __init__(
        self,
        client: QdrantClient,
        collection: str,
        vector: str | None = None,
        storage: Storage | Literal["auto"] = "auto",
        *,
        agreement: float | None = None,
        pace: int | str | None = None,
        url: str = "",
        record: str | os.PathLike[str] | None = None,
    ):
        self.client = require_client(client, QdrantClient)
        if not isinstance(collection, str):
            raise InputError(
                f"collection must be a name, not {type(collection).__name__}; the "
                "client comes before it"
            )
        if agreement is not None and not 0 < agreement <= 1:
            raise InputError(
                f"agreement={agreement!r}: it is a share of the raw recall, above 0 "
                "and at most 1"
            )
        if pace not in (None, "all") and not (str(pace).isdecimal() and int(pace)):
            raise InputError(f"pace={pace!r}: it is a number of points, or 'all'")
        self._agreement = agreement
        self._pace = pace
        self.url = url or f"qdrant collection {collection!r}"
        self._condition: models.Filter | None = None
        self._seen: QdrantManifest | None = None
        self._cache: CorrectionCache | None = None
        with one_line(self.url, "opening", collection):
            transport = self.transport = QdrantTransport(self.client, self.url)
            self.collection = transport.retry(
                lambda: run(metadata.real_name(self.client, collection))
            )
            transport.open(self.collection, collection)
            manifest = self._run("opening", metadata.read_manifest)
        self.vector, self._parameters = find_vector(
            self.url, transport.opened, vector or "", manifest
        )
        self.dim = transport.dim = self._parameters.size
        self._attach(transport)
        in_vector = cast(VectorSchema, self.schemas["vector"])
        self.metric = in_vector.metric
        self.maps_queries = self.metric is not Metric.EUCLIDEAN
        self.storage, self._choice = choose_storage(in_vector, storage, manifest)
        self.record = None
        if record is not None:
            self.record = folder_within(record, self.collection, self.vector)

    def _attach(self, transport: QdrantTransport) -> None:
        self.transport = transport
        parameters = self._parameters
        self.schemas: dict[Storage, Schema] = {
            "vector": VectorSchema(transport, self.vector, parameters),
            "payload": PayloadSchema(transport, self.vector, parameters),
        }

    def for_job(self) -> QdrantStore:
        store = copy.copy(self)
        with self.transport.one_line("describing"):
            store._attach(self.transport.for_job())
        store._cache = CorrectionCache(self.client)
        return store

    def _run(
        self, doing: str, operation: Callable[..., Operation[Answer]], *args: object
    ) -> Answer:
        """Return what `operation` does; it is made again while the server is away."""
        with self.transport.one_line(doing):
            return self.transport.retry(
                lambda: run(operation(self.client, self.collection, *args))
            )

    def seen(self) -> QdrantManifest:
        return self.read_manifest() if self._seen is None else self._seen

    def read_manifest(self) -> QdrantManifest:
        manifest = self._run("reading the manifest", metadata.read_manifest)
        return self._see(manifest)

    def write_manifest(self, manifest: corrections.Manifest[QdrantVersion]) -> None:
        self._run("writing the manifest", metadata.write_manifest, manifest)
        self._see(cast(QdrantManifest, manifest))

    def _see(self, manifest: QdrantManifest) -> QdrantManifest:
        if self._cache is not None:
            self._seen = manifest
        return manifest

    def delete_manifest(self) -> None:
        with self.transport.one_line("removing"):
            self.client.delete_collection(m.metadata_collection(self.collection))
        self._seen = None

    def has_manifest(self) -> bool:
        """Raise StoreError where the user has a collection in its place."""
        return self._run("looking for the manifest", metadata.exists)

    def new_version(self, model: OffsetModel, number: int) -> QdrantVersion:
        return QdrantVersion.of(
            model,
            number,
            self.vector,
            storage=self.storage,
            parts=len(model.to_texts()),
            ceiling=max(0.0, largest_offset(model)),
        )

    def read_model(self, version: QdrantVersion) -> OffsetModel:
        return self._run("reading the model", metadata.read_model, version)

    def write_model(self, version: QdrantVersion, model: OffsetModel) -> None:
        self._run("writing the model", metadata.write_model, version, model)

    def delete_model(self, version: QdrantVersion) -> None:
        self._run("deleting a model", metadata.delete_model, version)

    def make_room(self, version: QdrantVersion) -> None:
        self.schemas[version.storage].prepare(version)

    def delete_offsets(
        self, versions: Sequence[QdrantVersion], progress: Progress | None = None
    ) -> None:
        with self.transport.one_line("removing"):
            self.transport.flush_all()
            is_last = not self.read_manifest().maintained
            for schema in self.schemas.values():
                schema.delete(versions, is_last, progress)

    def delete_numbers(
        self, manifest: QdrantManifest, progress: Progress | None = None
    ) -> None:
        """Delete the offsets in payloads that `manifest` does not know."""
        transport = self.transport
        reader = PointReader(self.schemas["payload"], manifest, None, None)
        done, total = 0, self.count()
        try:
            with transport.one_line("removing"):
                transport.flush_all()
                for _ in transport.pages(reader.batches, with_payload=[KEY]):
                    done = min(done + transport.page_size, total)
                    if progress is not None:
                        progress("removing offsets", done, total)
                reader.delete_left_over()
                transport.wait()
        finally:
            transport.give_up()

    def find(
        self, manifest: corrections.Manifest[QdrantVersion], model: OffsetModel
    ) -> tuple[QdrantVersion | None, Found]:
        """Return the version before, too: its numbers lie there, all but a few right."""
        fingerprint = model.fingerprint
        version, found = manifest.find(self.vector, fingerprint, storage=self.storage)
        if version is None and self.storage == "payload":
            before = manifest.replace(writing=manifest.previous.get(self.vector))
            version, found = before.find(self.vector, fingerprint, storage="payload")
        return version, found

    def next_number(self, manifest: corrections.Manifest[QdrantVersion]) -> int:
        """Return a new number by which no vector of the user's is called."""
        names = vector_names(self.transport.info)
        for number in itertools.count(manifest.last_number + 1):
            if f"hub_v{number}" not in names:
                break
        return number

    def count(self) -> int:
        return self.transport.count()

    def how_to_search(self) -> tuple[str, str]:
        return (
            "client = hubplugin_qdrant.HubQdrantClient.wrap(client)",
            "this client maps each query",
        )

    def read_fields(self, ids: Sequence[Id]) -> list[Mapping[str, Any]]:
        with self.transport.one_line("reading payloads"):
            records = self.client.retrieve(self.collection, [*ids], with_vectors=False)
        fields = {plain_id(record.id): record.payload or {} for record in records}
        for payload in fields.values():
            payload.pop(KEY, None)
        return [fields.get(key, {}) for key in ids]

    def scan(self, field: str | None = None) -> Iterator[Batch]:
        return self.scan_between(EVERY_ID, field)

    def fields(self) -> Sequence[str]:
        """Return the payload keys of the first points."""
        pages = self.transport.pages(list, with_payload=True)
        keys = {key for record in next(pages) for key in record.payload or {}}
        return sorted(keys - {KEY})

    def scan_between(
        self, between: IdRange, field: str | None = None
    ) -> Iterator[Batch]:
        """Yield the points `between` two ids as `scan` yields all."""
        manifest = self.seen()
        version = manifest.active.get(self.vector)
        if version is not None and version.mapped:
            version = version.with_map(self.model(version))
        reader = PointReader(self.schemas["payload"], manifest, version, field)
        return reader.read(between)

    def pace(self) -> float:
        """Return how many points are written before the graph is waited for."""
        schema = self.schemas[self.storage]
        if self._pace == "all" or not schema.expects_graph():
            return math.inf
        return int(self._pace) if self._pace else math.ceil(self.count() / PARTS)

    def shards(self, count: int | None) -> list[QdrantShard]:
        """Return ranges of ids, of as many points each: all ids are read for it."""
        if not self.url.startswith(("qdrant:", "qdrant+https:")):
            raise StoreError(
                f"{self.url}: other machines cannot open it; open a server's by "
                "hubplugin.open_store('qdrant://...')"
            )
        pages = self.transport.pages(
            lambda records: [plain_id(record.id) for record in records]
        )
        return divide(self.url, chain.from_iterable(pages), self.count(), count)

    def join(
        self, version: QdrantVersion, model: OffsetModel, between: IdRange
    ) -> QdrantWriting:
        """Return the part `between` two ids of what another process has begun."""
        return QdrantWriting(
            self, version, "half-written", model, self.seen(), between=between
        )

    def begin(
        self, model: OffsetModel, progress: Progress | None = None
    ) -> QdrantWriting:
        before = self.seen()
        with self.transport.one_line("preparing"):
            version, _ = self.find(before, model)
            self.schemas[self.storage].require_room(before, version)
            if not before.last_number:
                params = self.transport.opened.config.params
                factor = params.replication_factor
                self._run("preparing", metadata.create, factor)
            version, found = self.start_version(model, progress)
        for line in self._price() if found == "nothing" else ():
            logger.warning("%s: %s", self.url, line)
        version = version.replace(
            max_candidates=self.transport.strict.max_query_limit,
            agreement=self._agreement or version.agreement,
        )
        return QdrantWriting(self, version, found, model, before, progress)

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raise StoreError where a correction cannot be written.

        There is nothing to write to, writing would take for ever, the payload key of
        the offsets is not free, or the api key may not write.
        """
        if self.count() == 0:
            raise StoreError(f"{self.url}: the collection is empty; add points first")
        if self.transport.info.config.optimizer_config.prevent_unoptimized:
            raise StoreError(
                f"{self.url}: with prevent_unoptimized each write waits for the graph; "
                "switch it off for the time: update_collection(optimizers_config="
                "OptimizersConfigDiff(prevent_unoptimized=False))"
            )
        manifest = self.seen()
        has_manifest = manifest.last_number > 0 or self.has_manifest()
        if self.storage == "payload":
            # An active correction may be what is written, for which there is room.
            if self.vector not in manifest.active:
                self.schemas["payload"].require_room(manifest, manifest.writing)
            if manifest.offset_key is None:  # else the key is ours
                self._require_free_key()
        if dry_run:
            return
        folder = plain_client.folder_of(self.client)
        if folder is not None:
            each = 4 * self.dim if self.storage == "vector" else 20
            require_room(folder, each * self.count())
        if not self.transport.is_local:
            self.transport.require_right_to_write(self.collection)
            if has_manifest:
                ours = m.metadata_collection(self.collection)
                self.transport.require_right_to_write(ours)

    def _require_free_key(self) -> None:
        """Offsets of a correction whose manifest was lost are written over."""
        for page in self.transport.pages(list, with_payload=[KEY]):
            for record in page:
                payload = record.payload or {}
                if KEY in payload and not (
                    payload[KEY] and m.holds_offsets(payload[KEY])
                ):
                    raise StoreError(
                        f"{self.url}: the payload key {KEY!r} holds something of "
                        f"yours, in point {record.id!r}; call it otherwise first: "
                        "hubplugin keeps its offsets there"
                    )

    def notes(self) -> Sequence[str]:
        manifest = self.seen()
        active = manifest.active.get(self.vector)
        lines = []
        if active is not None:
            cost = self.schemas[active.storage].cost()
            lines = [active.where(), *self._choice, f"they take {cost}"]
            if active.metric is Metric.EUCLIDEAN:
                lines.append(
                    "a fusion by DBSF gets similarities here where it gets distances "
                    "raw: other scores, other order"
                )
        if manifest.writing is not None and manifest.writing.vector == self.vector:
            lines.append(f"half-written: {manifest.writing.where()}")
        return lines

    def plan(self) -> Sequence[str]:
        schema = self.schemas[self.storage]
        first, *others = schema.plan(self.next_number(self.seen()))
        return [
            f"each point of {self.collection!r} would get {first}",
            *self._choice,
            f"offsets would take {schema.cost()}",
            f"manifest and model would lie in {m.metadata_collection(self.collection)!r}",
            *self._price(),
            *others,
        ]

    def _price(self) -> list[str]:
        """Say what the writing takes, and what other searches pay, before it begins."""
        schema = self.schemas[self.storage]
        if not schema.expects_graph():
            return []
        points = self.count()
        seconds = schema.writing * self.transport.seconds_to_read()
        return [
            f"to write {points:,} points takes about {seconds:,.0f} s, by the time that "
            "reading them took, and the server builds their graph anew; meanwhile "
            f"{SLOWER} (docs/qdrant.md, On a live service)"
        ]

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        options: Any = {
            "using": self.vector or None,
            "limit": k,
            "filter": self._condition,
            "with_payload": False,
        }
        rows = np.asarray(queries, np.float32).tolist()
        requests = [models.QueryRequest(query=row, **options) for row in rows]
        cache = self._cache or CorrectionCache(self.client)

        def search_corrected(
            collection: str, requests: list[models.QueryRequest]
        ) -> list[models.QueryResponse]:
            arguments = {"collection_name": collection, "requests": requests}
            answers = run(searches.query_batch_points(cache, arguments))
            return cast("list[models.QueryResponse]", answers)

        with self.transport.one_line("searching"):
            responses = self.transport.answers(
                requests, None if raw else search_corrected
            )
        found = [response.points for response in responses]
        return Hits(
            [[cast(Id, point.id) for point in points] for points in found],
            [[point.score for point in points] for points in found],
        )

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        self.require_active()
        query: Any = asked
        if isinstance(asked, np.ndarray):
            query = asked.astype(np.float32).tolist()
        request = models.QueryRequest(
            query=query, using=self.vector or None, limit=k, with_payload=True
        )
        with self.transport.one_line("explaining"):
            return explanation.explain(self.client, self.collection, request)

    def with_filter(self, condition: str) -> QdrantStore:
        """Return this store, whose searches return what meets `condition`.

        condition: a filter as Qdrant has it in JSON, {"must": [{"key": ..., ...}]}.
        """
        store = copy.copy(self)
        try:
            store._condition = models.Filter.model_validate_json(condition)
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"{condition!r} is no Qdrant filter in JSON: {reason}"
            ) from None
        return store

    def remove(self, progress: Progress | None = None) -> None:
        """Delete offsets, indexes, vectors and the metadata, or go on with that.

        Offsets that a client brought along from elsewhere go, too, and corrections of
        vectors that are gone.
        """
        has_manifest = self.has_manifest()
        manifest = self.read_manifest() if has_manifest else QdrantManifest()
        with self.transport.one_line("looking for vectors"):
            vectors = dense_vectors(self.transport.describe())
        corrected = {version.vector for version in manifest.everything}
        for vector in {self.vector} | (corrected - vectors.keys()):
            manifest = manifest.withdraw(vector)
        if has_manifest:
            self.write_manifest(manifest)
        self.delete_numbers(manifest.replace(retired=()), progress)
        if has_manifest:
            super().remove(progress)
        else:
            self.delete_offsets((), progress)


def open_url(url: str) -> QdrantStore:
    """Open qdrant://HOST:6333/COLLECTION or qdrant-local:PATH/COLLECTION.

    By https it is qdrant+https://HOST:6333/COLLECTION. Options follow: ?using=VECTOR
    where the collection has named vectors. &storage=vector or &storage=payload where
    offsets shall lie elsewhere than "auto" puts them. &pace=POINTS or &pace=all is how
    many are written before the graph is waited for. &grpc=6334 is the server's port
    for gRPC, where it is asked by that. &record=FOLDER is where
    `HubQdrantClient(record=FOLDER)` records queries.

    The api key is read from the environment variable QDRANT_API_KEY and is never part
    of a URL.
    """
    place = Place.of(url)
    options = {
        name: place.options[name]
        for name in ("storage", "pace", "record")
        if name in place.options
    }
    with one_line(url, "opening", place.collection):
        return QdrantStore(
            place.connect(),
            place.collection,
            place.options.get("using"),
            url=url,
            **cast(Any, options),
        )


class QdrantWriting(Writing):
    """The offsets of `version`, those of `model`, on their way into a collection.

    The search is calibrated by the bank of the model. before: the manifest before this
    run. progress: told of what comes after the last write. between: ids of the points
    that `scan` yields.
    """

    def __init__(
        self,
        store: QdrantStore,
        version: QdrantVersion,
        found: Found,
        model: OffsetModel,
        before: QdrantManifest,
        progress: Progress | None = None,
        between: IdRange = EVERY_ID,
    ):
        self.store = store
        self.found = found
        self.version = version.with_map(model)
        self._model = model
        self._progress = progress
        self._between = between
        self._schema = store.schemas[version.storage]
        self._transport = store.transport
        keys = set(m.payload_keys(before.everything))
        self._dropped = keys.difference(m.payload_keys(self._later(before).everything))
        self._pace = store.pace()
        self._sent = 0
        self._is_overtaken = False
        self._reader: PointReader | None = None  # that has read the points last

    def scan(self) -> Iterator[Batch]:
        """Yield every point, as it is once all is written that is under way."""
        self._transport.wait()
        manifest = self._unless_overtaken(self.store.require_owner)
        later = self._later(cast(QdrantManifest, manifest))
        self._reader = PointReader(self._schema, later, self.version, None)
        yield from self._reader.read(self._between)

    def _later(self, manifest: QdrantManifest) -> QdrantManifest:
        """Return the manifest as it is once this version is active."""
        return manifest.activate(self.version).replace(retired=())

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Start to write `offsets` to the points of `batch`.

        Numbers that nobody needs any more go at once, before there is a new graph. What
        goes wrong is raised by a later call; `scan` and `activate` wait.
        """
        self._unless_overtaken(self.store.require_owner)
        if self._sent >= self._pace:
            self._transport.wait()
            self._schema.wait_for_graph(self._progress)
            self._sent = 0
        self._sent += len(batch.ids)
        values = values_of(self.version, batch.vectors, offsets)
        items = list(zip(batch.ids, values, strict=True))
        self._schema.write(self.version, items, batch.place)
        self._schema.delete_keys(sorted(self._dropped), list(batch.ids), batch.place)

    def wait(self) -> None:
        self._transport.wait()
        if self._reader is not None:
            self._reader.delete_left_over()
        self._transport.wait()

    def share(self) -> Share:
        return QdrantShare(self.store.url, self.version.model_dump_json())

    def _unless_overtaken(self, step: Callable[[QdrantVersion], Answer]) -> Answer:
        """Return what `step` makes of the version, unless another run took its place."""
        try:
            return step(self.version)
        except StoreError:
            self._is_overtaken = True
            raise

    def activate(self) -> None:
        """Switch. What the version before has beside the points goes at last."""
        self.wait()
        with self._transport.one_line("activating"):
            queries = choose_queries(self._model, self.store.scan())
            self.version = self._schema.finish(self.version, queries, self._progress)
        self._unless_overtaken(self.store.switch)
        if self.store.seen().retired:
            self._wait_for_clients()
            self.store.clear(self._progress)

    def _wait_for_clients(self) -> None:
        """Wait until all have read the manifest again. Local mode has one client."""
        end = time.monotonic()
        if not self._transport.is_local:
            end += metadata.MANIFEST_SECONDS
        self._transport.wait_until(
            lambda: time.monotonic() >= end,
            "waiting for clients",
            "the next job deletes what the version before leaves",
            self._progress,
        )

    def close(self) -> None:
        """End what is under way.

        What another run has taken out is taken out once more, with what came later.
        """
        try:
            if self._is_overtaken:
                self._transport.wait()
                manifest = self.store.read_manifest()
                numbers = {version.number for version in manifest.everything}
                if self.version.number not in numbers:
                    self.store.delete_offsets([self.version])
                    self.store.delete_numbers(manifest)
        finally:
            self._transport.give_up()


@dataclasses.dataclass
class PointReader:
    """Turns records into batches, with the vector of `schema` and the offsets of `version`.

    field: the payload key that is read as the values of the batches. left_over: by
    shard key and payload keys, the points that hold offsets there of no version of
    `manifest`.
    """

    schema: Schema
    manifest: QdrantManifest
    version: QdrantVersion | None
    field: str | None
    left_over: dict[tuple[Id | None, tuple[str, ...]], list[Id]] = dataclasses.field(
        default_factory=dict
    )

    def read(self, between: IdRange = EVERY_ID) -> Iterator[Batch]:
        """Yield every point that has the vector, or those `between` two ids."""
        vectors: list[str] | bool = True  # of an unnamed one, all are read
        if self.schema.using:
            ours = vectors_of([self.version] if self.version is not None else [])
            vectors = [self.schema.using, *ours]
        payload = [KEY] if self.field is None else [KEY, self.field]
        pages = self.schema.transport.pages(self.batches, vectors, payload, between)
        for batches in pages:
            yield from batches

    def delete_left_over(self) -> None:
        """Start to delete the offsets of versions that nobody knows."""
        for (shard_key, keys), points in self.left_over.items():
            self.schema.delete_keys(keys, points, shard_key)

    def batches(self, records: Sequence[models.Record]) -> list[Batch]:
        """Return one batch for each shard key, by which points are written."""
        batches = [self.batch(part, key) for key, part in by_shard(records).items()]
        return [batch for batch in batches if len(batch.ids)]

    def batch(self, records: Sequence[Any], shard_key: Id | None = None) -> Batch:
        """Return `records` as one batch, all with this `shard_key`."""
        using = self.schema.using
        foreign = 0
        kept, vectors, augmented = [], [], []
        for record in records:
            foreign += self.manifest.is_foreign(record.payload)
            unknown = self.manifest.unknown_keys(record.payload)
            if unknown:
                points = self.left_over.setdefault((shard_key, unknown), [])
                points.append(plain_id(record.id))
            named = record.vector
            if not isinstance(named, dict):
                named = {using: named}
            if named.get(using) is None:
                continue
            kept.append(record)
            vectors.append(named[using])
            if self.version is not None:
                augmented.append(named.get(self.version.augmented_vector))
        ids = [plain_id(record.id) for record in kept]
        payloads = [record.payload for record in kept]
        matrix = np.array(vectors, np.float32).reshape(len(ids), self.schema.dim)
        offsets = np.full(len(ids), np.nan, np.float32)
        loss = None
        if self.version is not None:
            offsets = read_offsets(self.version, matrix, payloads, augmented)
            loss = rounding(self.version, augmented)
        values = None
        if self.field is not None:
            values = [group_of(payload, self.field) for payload in payloads]
        return Batch(
            ids,
            matrix,
            offsets,
            place=shard_key,
            foreign=foreign,
            values=values,
            rounding=loss,
        )
