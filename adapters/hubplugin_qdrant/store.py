"""The `hubplugin.store.Store` of a vector in a Qdrant collection."""

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

VECTORS_AT_ONCE = 500
"""The number of vectors in a writing request. A server stores one small request while it
reads the next. It took 6,100 vectors of 384 dimensions per second in requests of 500,
and 4,200 in requests of 2,000. Numbers in payloads are sent page by page, up to 2,000:
requests of 500 took twice as long."""

logger = logging.getLogger("hubplugin.qdrant")


class QdrantStore(ManifestStore[QdrantVersion]):
    """The store of one vector of a collection, returned by `open_store`.

    collection: The real name of the collection.
    metadata_name: The name of the metadata collection.
    vector: The name of the vector; "" for the unnamed one.
    storage: The storage of new offsets.
    """

    shared = True
    how_to_record = (
        "search through HubQdrantClient(..., record=FOLDER), and append ?record=FOLDER "
        "to the URL of this store"
    )

    def __init__(
        self,
        client: QdrantClient,
        collection: str,
        vector: str | None = None,
        storage: Storage | Literal["auto"] = "auto",
        *,
        pace: int | str | None = None,
        url: str = "",
        record: str | os.PathLike[str] | None = None,
    ):
        self.client = require_client(client, QdrantClient)
        if pace not in (None, "all") and not (str(pace).isdecimal() and int(pace)):
            raise InputError(f"pace={pace!r}: expected a number of points, or 'all'")
        self.url = url or f"qdrant collection {collection!r}"
        self._condition: models.Filter | None = None
        self._seen: QdrantManifest | None = None
        self._corrected: HubQdrantClient | None = None  # set for the time of a job
        self.transport = QdrantTransport(self.client, self.url, collection)
        if pace is not None:
            self.transport.pace = math.inf if pace == "all" else int(pace)
        self.collection = self._run("opening", metadata.real_name, collection)
        self.metadata_name = m.metadata_collection(self.collection)
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
        """Return the schema of `storage` for this vector."""
        return SCHEMAS[storage](self.transport, self.vector, self._parameters)

    def for_job(self) -> QdrantStore:
        store = copy.copy(self)
        store.transport = self.transport.for_job()
        store._corrected = HubQdrantClient.wrap(self.client)
        return store

    def _run(
        self, doing: str, operation: Callable[..., Operation[Answer]], *args: object
    ) -> Answer:
        """Return the result of `operation`, repeated as in `QdrantTransport.retry`."""

        def call() -> Answer:
            return run(operation(self.client, *args))

        return self.transport.retry(doing, call)

    def view_manifest(self) -> QdrantManifest:
        return self._seen or self.read_manifest()

    def read_manifest(self) -> QdrantManifest:
        payload = self._run(
            "reading the manifest", metadata.read_payload, self.collection
        )
        return self._remember(metadata.parse_manifest(payload, self.collection))

    def _remember(self, manifest: QdrantManifest) -> QdrantManifest:
        """Return `manifest`, which `view_manifest` reuses in the store of a job."""
        if self._corrected is not None:
            self._seen = manifest
        return manifest

    def write_manifest(self, manifest: corrections.Manifest[QdrantVersion]) -> None:
        self._replace_point(metadata.MANIFEST_ID, manifest.model_dump(mode="json"))
        self._remember(cast(QdrantManifest, manifest))

    def _replace_point(self, point: PointId, payload: m.Payload) -> None:
        """Replace the `payload` of a point of the metadata collection in one step."""
        points = [models.PointStruct(id=point, vector={}, payload=payload)]
        self.transport.retry(
            "writing the manifest",
            self.client.upsert,
            self.metadata_name,
            points,
            wait=True,
        )

    def delete_manifest(self) -> None:
        self.transport.retry(
            "removing", self.client.delete_collection, self.metadata_name
        )
        self._seen = None

    def has_manifest(self) -> bool:
        """Return True if the metadata collection exists.

        Raises StoreError if a collection of that name belongs to the user.
        """
        doing = "looking for the manifest"
        info = self._run(doing, metadata.describe, self.metadata_name)
        if info is not None and not metadata.is_metadata(info):
            raise StoreError(
                f"collection {self.metadata_name!r} has vectors, so it is not "
                f"hubplugin's; hubplugin keeps the correction of {self.collection!r} "
                "in a collection of that name, which must be free"
            )
        return info is not None

    def _create_metadata(self) -> None:
        """Create the metadata collection, unless it exists."""
        replicas = self.transport.opened.config.params.replication_factor
        try:
            self.transport.retry(
                "preparing",
                self.client.create_collection,
                self.metadata_name,
                vectors_config={},
                shard_number=1,
                replication_factor=replicas,
                on_disk_payload=True,
                # A server may enable strict mode by default.
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
        return self._run(
            "reading the model", metadata.read_model, self.collection, version
        )

    def write_model(self, version: QdrantVersion, model: OffsetModel) -> None:
        texts = model.to_texts()
        for point, part in zip(metadata.part_ids(version), texts, strict=True):
            self._replace_point(point, {"part": part})

    def delete_model(self, version: QdrantVersion) -> None:
        points = models.PointIdsList(points=metadata.part_ids(version))
        self.transport.retry(
            "deleting a model",
            self.client.delete,
            self.metadata_name,
            points,
            wait=True,
        )

    def make_room(self, version: QdrantVersion) -> None:
        self.schema(version.storage).prepare(version)

    def delete_offsets(self, versions: Sequence[QdrantVersion]) -> None:
        """Delete the payload indexes and the augmented vectors of `versions`.

        Numbers in payloads stay: see `delete_unknown_numbers`.
        """
        self.transport.flush_all()
        is_last = not self.read_manifest().maintained
        for storage in SCHEMAS:
            self.schema(storage).delete(versions, is_last)

    def delete_unknown_numbers(
        self, manifest: QdrantManifest, progress: Progress | None = None
    ) -> None:
        """Delete the payload offsets of versions that `manifest` does not know."""
        transport = self.transport
        reader = PointReader(self.schema("payload"), manifest)
        total = self.count()
        done = 0
        try:
            transport.flush_all()
            for records in transport.pages(with_payload=[KEY]):
                reader.batches(records)  # fills `reader.left_over`
                done = min(done + len(records), total)
                if progress is not None:
                    progress("removing offsets", done, total)
            reader.delete_left_over(progress)
            transport.wait()
            reader.schema.wait_for_graph(progress)
        finally:
            transport.give_up()

    def find(
        self, manifest: corrections.Manifest[QdrantVersion], model: OffsetModel
    ) -> tuple[QdrantVersion | None, Found]:
        """Find the version of `model` and its state.

        With offsets in payloads, this may be the previous version: payloads still hold
        its offsets, and most of them are still correct.
        """
        fingerprint = model.fingerprint
        version, found = manifest.find(self.vector, fingerprint, storage=self.storage)
        if version is None and self.storage == "payload":
            # Treat the previous version as half-written, so that it is completed.
            resumed = manifest.replace(writing=manifest.previous.get(self.vector))
            version, found = resumed.find(self.vector, fingerprint, storage="payload")
        return version, found

    def next_number(self, manifest: corrections.Manifest[QdrantVersion]) -> int:
        """Return a new version number whose augmented vector has a free name."""
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
        without_offsets = models.PayloadSelectorExclude(exclude=[KEY])
        records = self.transport.ask("retrieve", [*ids], with_payload=without_offsets)
        fields = {plain_id(record.id): record.payload or {} for record in records}
        return [fields.get(key, {}) for key in ids]

    def fields(self) -> Sequence[str]:
        """Return the payload keys of the points on the first page."""
        pages = self.transport.pages(with_payload=True)
        keys = {key for record in next(pages) for key in record.payload or {}}
        return sorted(keys - {KEY})

    def scan(
        self, field: str | None = None, between: IdRange = EVERY_ID
    ) -> Iterator[Batch]:
        """Yield every point in the id range `between`."""
        manifest = self.view_manifest()
        version = manifest.active.get(self.vector)
        if version is not None and version.mapped:
            query_map = self.model(version).query_map
            version = version.replace(query_map=query_map)
        reader = PointReader(self.schema(self.storage), manifest, version, field)
        return reader.read(between)

    def shards(self, count: int | None) -> list[QdrantShard]:
        """Divide the ids into ranges with equal numbers of points.

        This reads all ids.
        """
        if not self.url.startswith(("qdrant:", "qdrant+https:")):
            raise StoreError(
                f"{self.url}: other machines cannot open it; use a server: "
                "hubplugin.open_store('qdrant://...')"
            )
        records = chain.from_iterable(self.transport.pages())
        ids = (plain_id(record.id) for record in records)
        return divide(self.url, ids, self.count(), count)

    def join(
        self, version: QdrantVersion, model: OffsetModel, between: IdRange
    ) -> QdrantWriting:
        """Join a run that another process began, for the ids in `between`."""
        return QdrantWriting(
            self, version, "half-written", model, self.view_manifest(), between=between
        )

    def begin(
        self, model: OffsetModel, progress: Progress | None = None
    ) -> QdrantWriting:
        """Begin as any store does. Before a new version, log what writing it costs."""
        earlier = self.view_manifest()
        if earlier.last_number == 0:  # no version was ever written
            self._create_metadata()
        version, found = self.start_version(model)
        if found == "nothing":  # the version is new
            for notice in self._cost_notices():
                logger.warning("%s: %s", self.url, notice)
        version = version.replace(max_candidates=self.transport.strict.max_query_limit)
        return QdrantWriting(self, version, found, model, earlier, progress)

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raise StoreError if a correction cannot be written.

        The reasons are: the collection is empty, every write would wait for the graph,
        strict mode or the disk leaves no room, the user has data under our payload key,
        or the api key may not write.
        """
        if self.count() == 0:
            raise StoreError(f"{self.url}: the collection is empty; add points first")
        if self.transport.opened.config.optimizer_config.prevent_unoptimized:
            raise StoreError(
                f"{self.url}: with prevent_unoptimized, each write waits for the graph; "
                "switch it off meanwhile: "
                "update_collection(optimizers_config=OptimizersConfigDiff(prevent_unoptimized=False))"
            )
        manifest = self.view_manifest()
        # Before the first version, ask the server. Even in a dry run, this raises
        # StoreError if the user has a collection with the name of the metadata.
        metadata_exists = manifest.last_number > 0 or self.has_manifest()
        if self.storage == "payload":
            # An active version has its index already.
            if self.vector not in manifest.active:
                schema = PayloadSchema(self.transport, self.vector, self._parameters)
                schema.require_room(manifest)
            if manifest.offset_key is None:  # otherwise we already use the key
                self._require_free_key()
        if dry_run:
            return
        folder = plain_client.folder_of(self.client)
        if folder is not None:
            bytes_per_point = 4 * self.dim if self.storage == "vector" else 20
            require_room(folder, bytes_per_point * self.count())
        if not self.transport.is_local:
            self.transport.require_right_to_write(self.collection)
            if metadata_exists:
                self.transport.require_right_to_write(self.metadata_name)

    def _require_free_key(self) -> None:
        """Raise StoreError if a point has data of the user under our payload key.

        Offsets of a correction whose manifest is lost are allowed, and overwritten.
        """
        pages = self.transport.pages(with_payload=[KEY])
        for record in chain.from_iterable(pages):
            payload = record.payload or {}
            is_ours = payload.get(KEY) and m.holds_offsets(payload)
            if KEY in payload and not is_ours:
                raise StoreError(
                    f"{self.url}: the payload key {KEY!r} holds data that are not "
                    f"hubplugin's, in point {record.id!r}; rename it first: hubplugin "
                    "keeps its offsets there"
                )

    def notes(self) -> Sequence[str]:
        manifest = self.view_manifest()
        active = manifest.active.get(self.vector)
        lines = []
        if active is not None:
            cost = self.schema(active.storage).cost()
            lines = [active.where(), *self._choice, f"they take {cost}"]
            if active.metric is Metric.EUCLIDEAN:
                lines.append(
                    "a DBSF fusion gets similarities here instead of distances, so "
                    "scores and order differ from raw"
                )
        if manifest.writing is not None and manifest.writing.vector == self.vector:
            lines.append(f"half-written: {manifest.writing.where()}")
        return lines

    def plan(self) -> Sequence[str]:
        schema = self.schema(self.storage)
        addition, *side_effects = schema.plan(self.next_number(self.view_manifest()))
        return [
            f"each point of {self.collection!r} would get {addition}",
            *self._choice,
            f"offsets would take {schema.cost()}",
            f"manifest and model would be stored in {self.metadata_name!r}",
            *self._cost_notices(),
            *side_effects,
        ]

    def _cost_notices(self) -> list[str]:
        """Return a line on how long writing takes and how it slows searches.

        The list is empty for a collection without a graph.
        """
        schema = self.schema(self.storage)
        if not schema.expects_graph():
            return []
        points = self.count()
        seconds = schema.write_factor * self.transport.seconds_to_read()
        return [
            f"writing {points:,} points takes about {seconds:,.0f} s, estimated from "
            "the time to read them, and rebuilding their graph takes longer (two cores "
            "rebuild 500 to 1,000 points a second); meanwhile all searches are slower "
            "(docs/qdrant.md, On a live service)"
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
        return self._run("explaining", searches.explain, self.collection, request)

    def with_filter(self, condition: str) -> QdrantStore:
        """Return a copy of this store whose searches only find points that match.

        condition: A Qdrant filter as JSON, {"must": [{"key": ..., ...}]}.
        """
        store = copy.copy(self)
        try:
            store._condition = models.Filter.model_validate_json(condition)
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"{condition!r} is not a Qdrant filter in JSON: {reason}"
            ) from None
        return store

    def remove(self, progress: Progress | None = None) -> None:
        """Delete the offsets, indexes, augmented vectors and metadata of this vector.

        An interrupted removal is continued. This also deletes offsets that a client
        copied from other collections, and corrections of vectors that no longer exist.
        """
        has_manifest = self.has_manifest()
        manifest = self.read_manifest()
        existing = dense_vectors(self.transport.describe()).keys()
        corrected = {version.vector for version in manifest.stored_versions}
        for vector in {self.vector} | (corrected - existing):
            manifest = manifest.withdraw(vector)
        if has_manifest:
            self.write_manifest(manifest)
        # Without its retired versions, the manifest does not know their numbers either,
        # so these are deleted.
        self.delete_unknown_numbers(manifest.replace(retired=()), progress)
        if has_manifest:
            super().remove(progress)
        else:
            self.delete_offsets(())


def open_url(url: str) -> QdrantStore:
    """Open qdrant://HOST:6333/COLLECTION or qdrant-local:PATH/COLLECTION.

    For https, use qdrant+https://HOST:6333/COLLECTION. Options follow the collection
    as ?NAME=VALUE&NAME=VALUE:

    using: The name of the vector, if the collection has named vectors.
    storage: "vector" or "payload", to store offsets elsewhere than "auto" does.
    pace: The number of points to write before each wait for the graph, or "all".
    grpc: The server's gRPC port, usually 6334, to send requests by gRPC.
    record: The folder in which `HubQdrantClient(record=FOLDER)` records queries.

    The api key is read from the environment variable QDRANT_API_KEY. It is never part
    of a URL.
    """
    place = Place(url)
    options: dict[str, Any] = {**place.options, "url": url}
    options["vector"] = options.pop("using", None)
    options.pop("grpc", None)
    return QdrantStore(place.connect(), place.collection, **options)


class QdrantWriting(Writing):
    """A run that writes the offsets of a version to a collection.

    Afterwards it calibrates the search with the query bank of the model.

    store: The store of the collection.
    version: The version to write.
    found: The state in which the version was found.
    model: The model of the version.
    earlier: The manifest before this run.
    progress: A callback for the steps after the last write.
    between: The id range of the points that `scan` yields.
    """

    def __init__(
        self,
        store: QdrantStore,
        version: QdrantVersion,
        found: Found,
        model: OffsetModel,
        earlier: QdrantManifest,
        progress: Progress | None = None,
        between: IdRange = EVERY_ID,
    ):
        self.store = store
        self.found = found
        self.version = version.replace(query_map=model.query_map)
        self._model = model
        self._progress = progress
        self._between = between
        self._schema = store.schema(version.storage)
        self._transport = store.transport
        final = self._final_manifest(earlier)
        keys = m.payload_keys(earlier.stored_versions) - m.payload_keys(
            final.stored_versions
        )
        self._dropped_keys = sorted(keys)
        self._is_overtaken = False
        self._reader: PointReader | None = None  # the reader of the latest scan

    def scan(self) -> Iterator[Batch]:
        """Wait for all writes under way, then yield every point in the range."""
        self._transport.wait()
        manifest = self._unless_overtaken(self.store.require_owner)
        # What the manifest will not list any more need not be read.
        final = self._final_manifest(cast(QdrantManifest, manifest))
        self._reader = PointReader(self._schema, final, self.version)
        yield from self._reader.read(self._between)

    def _final_manifest(self, manifest: QdrantManifest) -> QdrantManifest:
        """Return `manifest` with this version active and retired versions deleted."""
        return manifest.activate(self.version).replace(retired=())

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Start to write `offsets` to the points of `batch`.

        The same requests delete payload offsets that are no longer needed. `scan` and
        `activate` wait for these writes. A later call raises their errors.
        """
        self._unless_overtaken(self.store.require_owner)
        self._schema.keep_pace(len(batch.ids), self._progress)
        shard_key = batch.place
        stored = values_of(self.version, batch.vectors, offsets)
        values = dict(zip(batch.ids, stored, strict=True))

        def change(ids: list[Id]) -> list[models.UpdateOperation]:
            chosen = {key: values[key] for key in ids}
            operations = set_values(self.version, chosen, shard_key)
            return operations + delete_keys(self._dropped_keys, shard_key, ids)

        size = len(batch.ids)
        if self.version.storage == "vector":
            size = VECTORS_AT_ONCE
        for part in chunks(batch.ids, size):
            self._transport.send(part, change, shard_key)

    def wait(self) -> None:
        self._transport.wait()
        if self._reader is not None:
            self._reader.delete_left_over(self._progress)
        self._transport.wait()

    def share(self) -> Share:
        return QdrantShare(self.store.url, self.version.model_dump_json())

    def _unless_overtaken(self, step: Callable[[QdrantVersion], Answer]) -> Answer:
        """Return `step(version)`, and note if another run has replaced the version."""
        try:
            return step(self.version)
        except StoreError:
            self._is_overtaken = True
            raise

    def activate(self) -> None:
        """Calibrate the search, then switch to this version.

        Last, delete the indexes, vectors and models of retired versions.
        """
        self.wait()
        queries = choose_queries(self._model, self.store.scan())
        self.version = self._schema.finish(self.version, queries, self._progress)
        self._unless_overtaken(self.store.switch)
        if self.store.view_manifest().retired:
            self._wait_for_clients()
            self.store.clear()

    def _wait_for_clients(self) -> None:
        """Wait until all clients have read the manifest again."""
        if self._transport.is_local:  # there are no other clients
            return
        end = time.monotonic() + metadata.MANIFEST_SECONDS
        self._transport.wait_until(
            lambda: time.monotonic() >= end,
            "waiting for clients",
            "the next job deletes the data of the previous version",
            self._progress,
        )

    def close(self) -> None:
        """Cancel or finish the writes under way.

        If another run has removed this version meanwhile, delete the offsets that were
        written after the removal.
        """
        try:
            if self._is_overtaken:
                self._transport.wait()
                manifest = self.store.read_manifest()
                numbers = {version.number for version in manifest.stored_versions}
                if self.version.number not in numbers:
                    self.store.delete_offsets([self.version])
                    self.store.delete_unknown_numbers(manifest)
        finally:
            self._transport.give_up()
