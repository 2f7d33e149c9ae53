"""A vector of a Qdrant collection as a `hubplugin.store.Store`."""

from __future__ import annotations

import copy
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
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata, plain_client, searches
from hubplugin_qdrant.calls import Answer, Operation, run
from hubplugin_qdrant.client import HubQdrantClient, require_client
from hubplugin_qdrant.manifest import KEY, QdrantManifest, QdrantVersion
from hubplugin_qdrant.offsets import delete_keys, set_values, values_of
from hubplugin_qdrant.places import Place, QdrantShard, QdrantShare, divide
from hubplugin_qdrant.plain_client import PointId
from hubplugin_qdrant.reading import PointReader
from hubplugin_qdrant.schema import (
    SCHEMAS,
    PayloadSchema,
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
    as_hits,
    chunks,
    plain_id,
)

PARTS = 10
"""A collection is written in so many parts: meanwhile most of its graph serves."""

VECTORS_AT_ONCE = 500
"""Vectors in a request. With small requests a server reads some while it stores others:
it took 6,100 vectors of 384 dimensions a second, but 4,200 in requests of 2,000.
Numbers in payloads are sent page by page: in requests of 500, writing took twice as long."""

logger = logging.getLogger("hubplugin.qdrant")


class QdrantStore(ManifestStore[QdrantVersion]):
    """The vector `vector` of a collection, with its offsets as `storage`.

    `open_store` makes it.

    ours: The name of the metadata collection.
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
        self._corrected: HubQdrantClient | None = None  # that of a job
        self.transport = QdrantTransport(self.client, self.url, collection)
        self.collection = self._run("opening", metadata.real_name, collection)
        self.ours = m.metadata_collection(self.collection)
        self.transport.open(self.collection)
        manifest = self.read_manifest()
        self.vector, self._parameters = find_vector(
            self.url, self.transport.opened, vector or "", manifest
        )
        self.dim = self.transport.dim = self._parameters.size
        in_vector = VectorSchema(self.transport, self.vector, self._parameters)
        self.metric = in_vector.metric
        self.maps_queries = self.metric is not Metric.EUCLIDEAN
        self.storage, self._choice = choose_storage(in_vector, storage, manifest)
        self.record = None
        if record is not None:
            self.record = folder_within(record, self.collection, self.vector)

    def schema(self, storage: Storage) -> PayloadSchema | VectorSchema:
        """Return how the collection keeps offsets by `storage`."""
        return SCHEMAS[storage](self.transport, self.vector, self._parameters)

    def for_job(self) -> QdrantStore:
        store = copy.copy(self)
        store.transport = self.transport.for_job()
        store._corrected = HubQdrantClient.wrap(self.client)
        return store

    def _run(
        self, doing: str, operation: Callable[..., Operation[Answer]], *args: object
    ) -> Answer:
        """Return what `operation` does; it is made again while the server is away."""

        def call() -> Answer:
            return run(operation(self.client, *args))

        return self.transport.retry(doing, call)

    def seen(self) -> QdrantManifest:
        return self._seen or self.read_manifest()

    def read_manifest(self) -> QdrantManifest:
        read = metadata.read_payload
        payload = self._run("reading the manifest", read, self.collection)
        return self._see(metadata.parse_manifest(payload, self.collection))

    def _see(self, manifest: QdrantManifest) -> QdrantManifest:
        """Return `manifest`, which a job keeps in mind."""
        if self._corrected is not None:
            self._seen = manifest
        return manifest

    def write_manifest(self, manifest: corrections.Manifest[QdrantVersion]) -> None:
        self._keep(metadata.MANIFEST_ID, manifest.model_dump(mode="json"))
        self._see(cast(QdrantManifest, manifest))

    def _keep(self, point: PointId, payload: m.Payload) -> None:
        """Replace the `payload` of a point of the metadata collection, in one step."""
        points = [models.PointStruct(id=point, vector={}, payload=payload)]
        self.transport.retry(
            "writing the manifest", self.client.upsert, self.ours, points, wait=True
        )

    def delete_manifest(self) -> None:
        self.transport.retry("removing", self.client.delete_collection, self.ours)
        self._seen = None

    def has_manifest(self) -> bool:
        """Return True if there is a metadata collection.

        Raises StoreError if the user has a collection of that name.
        """
        doing = "looking for the manifest"
        info = self._run(doing, metadata.describe, self.ours)
        if info is not None and not metadata.is_metadata(info):
            raise StoreError(
                f"collection {self.ours!r} has vectors, so it is yours; hubplugin keeps "
                f"the correction of {self.collection!r} in a collection of that name, "
                "which must be free"
            )
        return info is not None

    def _create_metadata(self) -> None:
        """Create the metadata collection, unless it is there."""
        replicas = self.transport.opened.config.params.replication_factor
        try:
            self.transport.retry(
                "preparing",
                self.client.create_collection,
                self.ours,
                vectors_config={},
                shard_number=1,
                replication_factor=replicas,
                on_disk_payload=True,
                # The limits of a server may be its default.
                strict_mode_config=models.StrictModeConfig(enabled=False),
            )
        except StoreError:
            if not self.has_manifest():
                raise

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
        read = metadata.read_model
        return self._run("reading the model", read, self.collection, version)

    def write_model(self, version: QdrantVersion, model: OffsetModel) -> None:
        texts = model.to_texts()
        for point, part in zip(metadata.part_ids(version), texts, strict=True):
            self._keep(point, {"part": part})

    def delete_model(self, version: QdrantVersion) -> None:
        points = models.PointIdsList(points=metadata.part_ids(version))
        self.transport.retry(
            "deleting a model", self.client.delete, self.ours, points, wait=True
        )

    def make_room(self, version: QdrantVersion) -> None:
        self.schema(version.storage).prepare(version)

    def delete_offsets(
        self, versions: Sequence[QdrantVersion], progress: Progress | None = None
    ) -> None:
        self.transport.flush_all()
        is_last = not self.read_manifest().maintained
        for storage in SCHEMAS:
            self.schema(storage).delete(versions, is_last)

    def delete_numbers(
        self, manifest: QdrantManifest, progress: Progress | None = None
    ) -> None:
        """Delete the offsets in payloads that `manifest` does not know."""
        transport = self.transport
        reader = PointReader(self.schema("payload"), manifest)
        total = self.count()
        done = 0
        try:
            transport.flush_all()
            for records in transport.pages(with_payload=[KEY]):
                reader.batches(records)
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
        """Find the version before, too: its numbers are there, all but a few right."""
        fingerprint = model.fingerprint
        version, found = manifest.find(self.vector, fingerprint, storage=self.storage)
        if version is None and self.storage == "payload":
            before = manifest.replace(writing=manifest.previous.get(self.vector))
            version, found = before.find(self.vector, fingerprint, storage="payload")
        return version, found

    def next_number(self, manifest: corrections.Manifest[QdrantVersion]) -> int:
        """Return a new number by which no vector of the user's is called."""
        names = vector_names(self.transport.opened)
        number = manifest.last_number + 1
        while f"hub_v{number}" in names:
            number += 1
        return number

    def count(self) -> int:
        return self.transport.count()

    def how_to_search(self) -> tuple[str, str]:
        return (
            "client = hubplugin_qdrant.HubQdrantClient.wrap(client)",
            "this client maps each query",
        )

    def read_fields(self, ids: Sequence[Id]) -> list[Mapping[str, Any]]:
        theirs = models.PayloadSelectorExclude(exclude=[KEY])
        records = self.transport.ask("retrieve", [*ids], with_payload=theirs)
        fields = {plain_id(record.id): record.payload or {} for record in records}
        return [fields.get(key, {}) for key in ids]

    def fields(self) -> Sequence[str]:
        """Return the payload keys of the first points."""
        pages = self.transport.pages(with_payload=True)
        keys = {key for record in next(pages) for key in record.payload or {}}
        return sorted(keys - {KEY})

    def scan(
        self, field: str | None = None, between: IdRange = EVERY_ID
    ) -> Iterator[Batch]:
        """Yield every point, or those `between` two ids."""
        manifest = self.seen()
        version = manifest.active.get(self.vector)
        if version is not None and version.mapped:
            version = version.with_map(self.model(version))
        reader = PointReader(self.schema(self.storage), manifest, version, field)
        return reader.read(between)

    def pace(self) -> float:
        """Return how many points are written before the graph is waited for."""
        if self._pace == "all" or not self.schema(self.storage).expects_graph():
            return math.inf
        if self._pace:
            return int(self._pace)
        return math.ceil(self.count() / PARTS)

    def shards(self, count: int | None) -> list[QdrantShard]:
        """Return ranges of ids, of as many points each: all ids are read for it."""
        if not self.url.startswith(("qdrant:", "qdrant+https:")):
            raise StoreError(
                f"{self.url}: other machines cannot open it; open a server's by "
                "hubplugin.open_store('qdrant://...')"
            )
        records = chain.from_iterable(self.transport.pages())
        ids = (plain_id(record.id) for record in records)
        return divide(self.url, ids, self.count(), count)

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
        if not before.last_number:
            self._create_metadata()
        version, found = self.start_version(model, progress)
        if found == "nothing":
            for line in self._price():
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
        if self.transport.opened.config.optimizer_config.prevent_unoptimized:
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
                schema = PayloadSchema(self.transport, self.vector, self._parameters)
                schema.require_room(manifest)
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
                self.transport.require_right_to_write(self.ours)

    def _require_free_key(self) -> None:
        """Raise StoreError if a point has something of the user's under our key.

        Offsets of a correction whose manifest was lost are written over.
        """
        pages = self.transport.pages(with_payload=[KEY])
        for record in chain.from_iterable(pages):
            payload = record.payload or {}
            is_ours = payload.get(KEY) and m.holds_offsets(payload)
            if KEY in payload and not is_ours:
                raise StoreError(
                    f"{self.url}: the payload key {KEY!r} holds something of yours, in "
                    f"point {record.id!r}; call it otherwise first: hubplugin keeps its "
                    "offsets there"
                )

    def notes(self) -> Sequence[str]:
        manifest = self.seen()
        active = manifest.active.get(self.vector)
        lines = []
        if active is not None:
            cost = self.schema(active.storage).cost()
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
        schema = self.schema(self.storage)
        gets, *others = schema.plan(self.next_number(self.seen()))
        return [
            f"each point of {self.collection!r} would get {gets}",
            *self._choice,
            f"offsets would take {schema.cost()}",
            f"manifest and model would lie in {self.ours!r}",
            *self._price(),
            *others,
        ]

    def _price(self) -> list[str]:
        """Say what the writing takes, and what other searches pay, before it begins."""
        schema = self.schema(self.storage)
        if not schema.expects_graph():
            return []
        points = self.count()
        seconds = schema.writing * self.transport.seconds_to_read()
        return [
            f"to write {points:,} points takes about {seconds:,.0f} s, by the time that "
            "reading them took, and the server builds their graph anew; meanwhile "
            "searches of everybody are slower (docs/qdrant.md, On a live service)"
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
        client = self.client
        if not raw:
            client = self._corrected or HubQdrantClient.wrap(self.client)
        responses = self.transport.answers(requests, client.query_batch_points)
        return as_hits(response.points for response in responses)

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        self.require_active()
        query: Any = asked
        if isinstance(asked, np.ndarray):
            query = asked.astype(np.float32).tolist()
        request = models.QueryRequest(
            query=query, using=self.vector or None, limit=k, with_payload=True
        )
        explain = searches.explain
        return self._run("explaining", explain, self.collection, request)

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
        manifest = self.read_manifest()
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
    place = Place(url)
    options: dict[str, Any] = {**place.options, "url": url}
    options["vector"] = options.pop("using", None)
    options.pop("grpc", None)
    return QdrantStore(place.connect(), place.collection, **options)


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
        self._schema = store.schema(version.storage)
        self._transport = store.transport
        later = self._later(before)
        keys = m.payload_keys(before.everything) - m.payload_keys(later.everything)
        self._dropped = sorted(keys)
        self._pace = store.pace()
        self._sent = 0
        self._is_overtaken = False
        self._reader: PointReader | None = None  # that has read the points last

    def scan(self) -> Iterator[Batch]:
        """Yield every point, as it is once all is written that is under way."""
        self._transport.wait()
        manifest = self._unless_overtaken(self.store.require_owner)
        later = self._later(cast(QdrantManifest, manifest))
        self._reader = PointReader(self._schema, later, self.version)
        yield from self._reader.read(self._between)

    def _later(self, manifest: QdrantManifest) -> QdrantManifest:
        """Return the manifest as it is once this version is active."""
        return manifest.activate(self.version).replace(retired=())

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Start to write `offsets` to the points of `batch`.

        The same requests delete numbers that nobody needs any more. What goes wrong is
        raised by a later call; `scan` and `activate` wait.
        """
        self._unless_overtaken(self.store.require_owner)
        if self._sent >= self._pace:
            self._transport.wait()
            self._schema.wait_for_graph(self._progress)
            self._sent = 0
        self._sent += len(batch.ids)
        shard_key = batch.place
        found = values_of(self.version, batch.vectors, offsets)
        values = dict(zip(batch.ids, found, strict=True))

        def change(ids: list[Id]) -> list[models.UpdateOperation]:
            those = {key: values[key] for key in ids}
            operations = set_values(self.version, those, shard_key)
            return operations + delete_keys(self._dropped, shard_key, ids)

        size = len(batch.ids)
        if self.version.storage == "vector":
            size = VECTORS_AT_ONCE
        for part in chunks(batch.ids, size):
            self._transport.send(part, change, shard_key)

    def wait(self) -> None:
        self._transport.wait()
        if self._reader is not None:
            self._reader.delete_left_over()
        self._transport.wait()

    def share(self) -> Share:
        return QdrantShare(self.store.url, self.version.model_dump_json())

    def _unless_overtaken(self, step: Callable[[QdrantVersion], Answer]) -> Answer:
        """Return what `step` makes of the version, which another run may replace."""
        try:
            return step(self.version)
        except StoreError:
            self._is_overtaken = True
            raise

    def activate(self) -> None:
        """Switch. What the version before has beside the points goes at last."""
        self.wait()
        queries = choose_queries(self._model, self.store.scan())
        self.version = self._schema.finish(self.version, queries, self._progress)
        self._unless_overtaken(self.store.switch)
        if self.store.seen().retired:
            self._wait_for_clients()
            self.store.clear(self._progress)

    def _wait_for_clients(self) -> None:
        """Wait until all have read the manifest again. Local mode has one client."""
        if self._transport.is_local:
            return
        end = time.monotonic() + metadata.MANIFEST_SECONDS
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
