"""A vector of a Qdrant collection as a `hubplugin.store.Store`."""

from __future__ import annotations

import copy
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
from qdrant_client import QdrantClient, models

from hubplugin import corrections
from hubplugin.calibration import choose_queries
from hubplugin.corrections import ManifestStore
from hubplugin.errors import InputError, Parameter, StoreError
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
)  # fmt: skip
from hubplugin_qdrant.transport import (
    EVERY_ID,
    IdRange,
    NoAnswerError,
    QdrantTransport,
    by_shard,
    one_line,
    plain_id,
)


class QdrantStore(ManifestStore[QdrantVersion]):
    """The vector `vector` of a collection, with its offsets as `storage`; see `open_store`, which makes it."""

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
        offset_key: str | None = None,
        url: str = "",
        record: str | os.PathLike[str] | None = None,
    ):
        is_name = isinstance(offset_key, str) and re.fullmatch(
            r"[A-Za-z_][A-Za-z0-9_]*", offset_key
        )
        if offset_key is not None and not is_name:
            raise InputError(
                Parameter("offset_key", offset_key),
                ": expected a name of letters, digits and _",
            )
        self._agreement, self.offset_key = agreement, offset_key
        self.client = require_client(client, QdrantClient)
        if not isinstance(collection, str):
            raise InputError(
                f"collection must be a name, not {type(collection).__name__}; the client comes before it"
            )
        if agreement is not None and not 0 < agreement <= 1:
            raise InputError(
                f"agreement={agreement!r}: it is a share of the raw recall, above 0 and at most 1"
            )
        if offset_key is not None and storage == "vector":
            key, vector_storage = (
                Parameter("offset_key", offset_key),
                Parameter("storage", "vector"),
            )
            raise InputError(
                key, " is for offsets in payloads; ", vector_storage, " has none"
            )
        self.url = url or f"qdrant collection {collection!r}"
        self._condition: models.Filter | None = None
        with one_line(self.url, "opening", collection):
            self.collection = run(metadata.real_name(self.client, collection))
            self.transport = QdrantTransport(
                self.client, self.collection, self.url, collection
            )
            manifest = run(metadata.read_manifest(self.client, self.collection))
        self.vector, parameters = find_vector(
            self.url, self.transport.info, vector or "", manifest
        )
        self.dim = self.transport.dim = parameters.size
        in_vector = VectorSchema(self.transport, self.vector, parameters)
        in_payload = PayloadSchema(self.transport, self.vector, parameters)
        self.schemas: dict[Storage, Schema] = {
            "vector": in_vector,
            "payload": in_payload,
        }
        self.metric = in_payload.metric
        self.maps_queries = self.metric is not Metric.EUCLIDEAN
        self.storage, self._choice = choose_storage(in_vector, storage, manifest)
        self.record = (
            None
            if record is None
            else folder_within(record, self.collection, self.vector)
        )

    def _run(
        self, doing: str, operation: Callable[..., Operation[Answer]], *args: object
    ) -> Answer:
        """What `operation` returns; made again while the server is away."""
        with self.transport.one_line(doing):
            return self.transport.retry(
                lambda: run(operation(self.client, self.collection, *args))
            )

    def read_manifest(self) -> QdrantManifest:
        return self._run("reading the manifest", metadata.read_manifest)

    def write_manifest(self, manifest: corrections.Manifest[QdrantVersion]) -> None:
        self._run("writing the manifest", metadata.write_manifest, manifest)

    def delete_manifest(self) -> None:
        with self.transport.one_line("removing"):
            self.client.delete_collection(m.metadata_collection(self.collection))

    def has_manifest(self) -> bool:
        """Raises StoreError where the user has a collection in its place."""
        return self._run("looking for the manifest", metadata.exists)

    def new_version(self, model: OffsetModel, number: int) -> QdrantVersion:
        where = (
            {"offset_key": self.key_for(self.read_manifest())}
            if self.storage == "payload"
            else {}
        )
        return QdrantVersion.of(
            model,
            number,
            self.vector,
            storage=self.storage,
            parts=len(model.to_texts()),
            **where,
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
        try:
            with self.transport.one_line("removing"):
                self.transport.flush()
                is_last = not self.read_manifest().maintained
                for schema in self.schemas.values():
                    schema.delete(versions, is_last, progress)
        finally:
            self.transport.give_up()

    def find(
        self, manifest: corrections.Manifest[QdrantVersion], model: OffsetModel
    ) -> tuple[QdrantVersion | None, Found]:
        return manifest.find(self.vector, model.fingerprint, storage=self.storage)

    def next_number(self, manifest: corrections.Manifest[QdrantVersion]) -> int:
        """The first number behind those given so far whose augmented vector no vector of the user's is called."""
        first, names = manifest.last_number + 1, vector_names(self.transport.describe())
        return next(
            number for number in itertools.count(first) if f"hub_v{number}" not in names
        )

    def count(self) -> int:
        return self.transport.count()

    def scan(self, field: str | None = None) -> Iterator[Batch]:
        """Every point that has the vector; see `QdrantTransport.pages`."""
        return self.scan_between(None, field)

    def scan_between(
        self, between: IdRange | None, field: str | None = None
    ) -> Iterator[Batch]:
        """`scan` of the points `between` two ids, with the same `field`."""
        manifest = self.read_manifest()
        version = manifest.active.get(self.vector)
        if version is not None and version.mapped:
            version = version.with_map(self.model(version))
        return PointReader(self.schemas["payload"], manifest, version, field).read(
            between
        )

    def shards(self, count: int | None) -> list[QdrantShard]:
        """Ranges of ids, of as many points each: all ids are read for it."""
        if not self.url.startswith(("qdrant:", "qdrant+https:")):
            raise StoreError(
                f"{self.url}: other machines cannot open it; open a server's by hubplugin.open_store('qdrant://...')"
            )
        pages = self.transport.pages(
            lambda records: [plain_id(record.id) for record in records],
            between=EVERY_ID,
        )
        return divide(self.url, chain.from_iterable(pages), self.count(), count)

    def join(
        self, version: QdrantVersion, model: OffsetModel, between: IdRange
    ) -> QdrantWriting:
        """The part `between` two ids of a writing of `model`, as `version`, that another process has begun."""
        return QdrantWriting(self, version, "half-written", model, between=between)

    def begin(
        self, model: OffsetModel, progress: Progress | None = None
    ) -> QdrantWriting:
        with self.transport.one_line("preparing"):
            manifest = self.read_manifest()
            self.schemas[self.storage].require_room(
                manifest, self.find(manifest, model)[0]
            )
            self._run(
                "preparing",
                metadata.create,
                self.transport.info.config.params.replication_factor,
            )
            version, found = self.start_version(model, progress)
        limit = self.transport.strict.max_query_limit  # as it is now
        version = version.replace(
            max_candidates=limit, agreement=self._agreement or version.agreement
        )
        return QdrantWriting(self, version, found, model, progress)

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raises StoreError where there is nothing to write to, writing would take for ever, the payload key of the
        offsets is not free, or the api key may not write."""
        if self.count() == 0:
            raise StoreError(f"{self.url}: the collection is empty; add points first")
        if self.transport.info.config.optimizer_config.prevent_unoptimized:
            raise StoreError(
                f"{self.url}: with prevent_unoptimized each write waits for the graph; switch it off for the time: "
                "update_collection(optimizers_config=OptimizersConfigDiff(prevent_unoptimized=False))"
            )
        has_manifest = self.has_manifest()
        if self.storage == "payload":
            manifest = self.read_manifest()
            if (
                self.vector not in manifest.active
            ):  # else that may be what is written, for which there is room
                self.schemas[self.storage].require_room(manifest, manifest.writing)
            key = self.key_for(manifest)
            if (
                manifest.offset_key is None
            ):  # else the manifest says that the key is ours
                self._require_free(key)
        folder = plain_client.folder_of(self.client)
        if not dry_run and folder is not None:
            require_room(
                folder,
                (4 * self.dim if self.storage == "vector" else 20) * self.count(),
            )
        if not dry_run and not self.transport.is_local:
            self.transport.require_right_to_write(self.collection)
            if has_manifest:
                self.transport.require_right_to_write(
                    m.metadata_collection(self.collection)
                )

    def key_for(self, manifest: QdrantManifest) -> str:
        """The payload key under which a new version has its offsets: one for all versions. Raises StoreError if
        another one was named than that of the correction in place."""
        key = manifest.offset_key
        if key is not None and self.offset_key not in (None, key):
            raise StoreError(
                f"{self.url}: the offsets of the correction in place lie under the payload key {key!r}; remove it "
                "before you name another: ",
                Parameter("offset_key", self.offset_key),
            )
        return key or self.offset_key or KEY

    def _require_free(self, key: str) -> None:
        """Offsets of a correction whose manifest was lost are ours, too, and written over."""
        for page in self.transport.pages(list, with_payload=[key]):
            for record in page:
                under = (record.payload or {}).get(key, {"v1": 0.0})
                if not under or not m.holds_offsets(under):
                    raise StoreError(
                        f"{self.url}: the payload key {key!r} holds something of yours, in point {record.id!r}; "
                        "name another key for the offsets: ",
                        Parameter("offset_key", f"{key}_2"),
                    )

    def notes(self) -> Sequence[str]:
        manifest = self.read_manifest()
        active = manifest.active.get(self.vector)
        lines = []
        if active is not None:
            lines = [
                active.where(),
                *self._choice,
                f"they take {self.schemas[active.storage].cost()}",
            ]
            if active.metric is Metric.EUCLIDEAN:
                lines.append(
                    "a fusion by DBSF gets similarities here where it gets distances raw: other scores, other order"
                )
        if manifest.writing is not None and manifest.writing.vector == self.vector:
            lines.append(f"half-written: {manifest.writing.where()}")
        return lines

    def attention(self) -> Sequence[str]:
        manifest = self.read_manifest()
        if not manifest.everything:
            return list(self._without_manifest())
        version = manifest.active.get(self.vector)
        hidden = (
            None if version is None else self.schemas[version.storage].hidden(version)
        )
        return [] if hidden is None else [hidden]

    def _without_manifest(self) -> Iterator[str]:
        """What of a correction lies here without its manifest, as after a snapshot of the collection alone."""
        place = m.metadata_collection(self.collection)
        raw = f"whose metadata is not in {place!r}: searches are raw; restore its snapshot under that name, or"
        key = self.offset_key or KEY
        with self.transport.one_line("looking for offsets"):
            first, _ = self.transport.retry(
                self.client.scroll,
                self.collection,
                limit=self.transport.page,
                with_payload=[key],
            )
            vectors = dense_vectors(self.transport.describe())
        if any(m.our_fields((record.payload or {}).get(key)) for record in first):
            yield f"points hold offsets under {key!r} of a correction {raw} run apply; remove takes them out"
        for name, parameters in vectors.items():
            if m.AUGMENTED_VECTOR.fullmatch(name) and parameters.size == self.dim + 1:
                yield f"{name!r} is the second vector of a correction {raw} delete that vector and run apply"

    def plan(self) -> Sequence[str]:
        manifest, schema = self.read_manifest(), self.schemas[self.storage]
        first, *others = schema.plan(self.next_number(manifest), self.key_for(manifest))
        return [
            f"each point of {self.collection!r} would get {first}",
            *self._choice,
            f"offsets would take {schema.cost()}",
            f"manifest and model would lie in {m.metadata_collection(self.collection)!r}",
            *others,
        ]

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        options: Any = {
            "using": self.vector or None,
            "limit": k,
            "filter": self._condition,
            "with_payload": False,
        }
        rows = np.asarray(queries, np.float32).tolist()
        with self.transport.one_line("searching"):
            responses = self.transport.answers(
                [models.QueryRequest(query=row, **options) for row in rows],
                None if raw else self._search_corrected,
            )
        return Hits(
            [
                [cast(Id, point.id) for point in response.points]
                for response in responses
            ],
            [[point.score for point in response.points] for response in responses],
        )

    def _search_corrected(
        self, collection: str, requests: list[models.QueryRequest]
    ) -> list[models.QueryResponse]:
        """`HubQdrantClient.query_batch_points`, of a client that has read nothing yet."""
        arguments = {"collection_name": collection, "requests": requests}
        return cast(
            "list[models.QueryResponse]",
            run(searches.query_batch_points(CorrectionCache(self.client), arguments)),
        )

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        self.require_active()
        query = (
            asked.astype(np.float32).tolist()
            if isinstance(asked, np.ndarray)
            else asked
        )
        request = models.QueryRequest(
            query=query, using=self.vector or None, limit=k, with_payload=True
        )
        with self.transport.one_line("explaining"):
            cache = CorrectionCache(self.client)
            cached = run(cache.lookup(self.collection))
            ((corrected, _),) = run(searches.rewrite_requests(cache, cached, [request]))
        version = (cached.manifest or QdrantManifest()).active[self.vector]
        place, has_key = (
            plain_client.address(self.client),
            "QDRANT_API_KEY" in os.environ,
        )
        return explanation.explain(version, corrected, self.collection, place, has_key)

    def with_filter(self, condition: str) -> QdrantStore:
        """condition: a filter as Qdrant has it in JSON, {"must": [{"key": ..., "match": ...}]}."""
        store = copy.copy(self)
        try:
            store._condition = models.Filter.model_validate_json(condition)
        except ValueError as error:
            raise InputError(
                f"{condition!r} is no Qdrant filter in JSON: {' '.join(str(error).split())}"
            ) from None
        return store

    def remove(self, progress: Progress | None = None) -> None:
        """Deletes the offsets, indexes and vectors of which the manifest tells, the metadata, offsets that a client
        brought along from elsewhere, and corrections of vectors that are gone; goes on where it was cut off."""
        if not self.has_manifest():
            self.delete_offsets((), progress)
            return
        manifest = self.read_manifest()
        with self.transport.one_line("looking for vectors"):
            vectors = dense_vectors(self.transport.describe())
        for vector in {
            version.vector for version in manifest.everything
        } - vectors.keys():
            manifest = manifest.withdraw(vector)
            self.write_manifest(manifest)
        super().remove(progress)


def open_url(url: str) -> QdrantStore:
    """The store behind qdrant://HOST:6333/COLLECTION, qdrant+https://HOST:6333/COLLECTION or
    qdrant-local:PATH/COLLECTION. Options follow: ?using=VECTOR where the collection has named vectors.
    &storage=vector or &storage=payload where offsets shall lie elsewhere than "auto" puts them, and &offset_key=KEY
    where another payload key than hub_offset shall hold them. &grpc=6334 is the server's port for gRPC, where it is
    asked by that. &record=FOLDER is where `HubQdrantClient(record=FOLDER)` records queries.

    The api key is read from the environment variable QDRANT_API_KEY and is never part of a URL.
    """
    place = Place.of(url)
    options = {
        name: place.options[name]
        for name in ("storage", "offset_key", "record")
        if name in place.options
    }
    try:
        with one_line(url, "opening", place.collection):
            client = place.connect()
            return QdrantStore(
                client,
                place.collection,
                place.options.get("using"),
                url=url,
                **cast(Any, options),
            )
    except NoAnswerError as error:
        if not place.hint():
            raise
        raise StoreError(*error.args, place.hint()) from None


class QdrantWriting(Writing):
    """The offsets of `version`, those of `model`, on their way into the collection of `store`; no other run may write
    them meanwhile. By the bank of the model the search is calibrated. progress: told of what comes after the last
    write. between: ids of the points that `scan` yields."""

    def __init__(
        self,
        store: QdrantStore,
        version: QdrantVersion,
        found: Found,
        model: OffsetModel,
        progress: Progress | None = None,
        between: IdRange | None = None,
    ):
        self.store, self.found, self.version = store, found, version.with_map(model)
        self._schema, self._transport, self._model = (
            store.schemas[version.storage],
            store.transport,
            model,
        )
        self._progress, self._between = progress, between
        self._is_overtaken = False
        self._reader: PointReader | None = None  # that has read the points last

    def scan(self) -> Iterator[Batch]:
        """Every point, as it is once all is written that is under way."""
        self._transport.wait()
        self._reader = PointReader(
            self._schema, self._require_owner(), self.version, None
        )
        yield from self._reader.read(self._between)

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Starts to write `offsets` to the points of `batch`, and returns before it is done; what goes wrong is raised
        by a later call. `scan` and `activate` wait."""
        items = list(
            zip(batch.ids, values_of(self.version, batch.vectors, offsets), strict=True)
        )
        self._schema.write(self.version, items, batch.place)

    def wait(self) -> None:
        self._transport.wait()
        self._require_owner()
        if self._reader is not None:
            for (shard_key, keys), points in self._reader.left_over.items():
                self._schema.delete_keys(keys, points, shard_key)
        self._transport.wait()

    def share(self) -> Share:
        return QdrantShare(self.store.url, self.version.model_dump_json())

    def _require_owner(self) -> QdrantManifest:
        """The manifest as it is now. Raises StoreError if another run has taken this version's place."""
        try:
            return cast(QdrantManifest, self.store.require_owner(self.version))
        except StoreError:
            self._is_overtaken = True
            raise

    def activate(self) -> None:
        """The offsets of the version before are deleted once no client searches by them any more."""
        self.wait()
        with self._transport.one_line("activating"):
            queries = choose_queries(self._model, self.store.scan())
            version = self._schema.finish(self.version, queries, self._progress)
        self._require_owner()
        self.store.switch(version)
        if self.store.read_manifest().retired:
            self._wait_for_clients()
            self.store.clear(self._progress)

    def _wait_for_clients(self) -> None:
        """Until all of them have read the manifest again. To local mode there is one client."""
        end = time.monotonic() + (
            0.0 if self._transport.is_local else metadata.MANIFEST_SECONDS
        )
        later = "the next job deletes the offsets of the version before"
        self._transport.wait_until(
            lambda: time.monotonic() >= end,
            "waiting for clients",
            later,
            self._progress,
        )

    def close(self) -> None:
        """Ends what is under way. What another run has taken out is taken out once more, with what came later."""
        try:
            if self._is_overtaken:
                self._transport.wait()
                if all(
                    v.number != self.version.number
                    for v in self.store.read_manifest().everything
                ):
                    self.store.delete_offsets([self.version])
        finally:
            self._transport.give_up()


@dataclass
class PointReader:
    """Turns records into batches, with the vector of `schema` and the offsets of `version`.

    field: the payload key that is read as the values of the batches. `left_over` collects, by shard key and payload
    keys, the points that hold offsets of no version of `manifest` there.
    """

    schema: Schema
    manifest: QdrantManifest
    version: QdrantVersion | None
    field: str | None
    left_over: dict[tuple[Id | None, tuple[str, ...]], list[Id]] = field(
        default_factory=dict
    )

    def read(self, between: IdRange | None = None) -> Iterator[Batch]:
        """Every point that has the vector, or of those `between` two ids, in the order of ids."""
        vectors: list[str] | bool = True  # of an unnamed one, all are read
        if self.schema.using:
            vectors = [
                self.schema.using,
                *vectors_of([self.version] if self.version is not None else []),
            ]
        payload = [key for key in (self.manifest.offset_key or KEY, self.field) if key]
        for batches in self.schema.transport.pages(
            self.batches, vectors, payload, between=between
        ):
            yield from batches

    def batches(self, records: Sequence[models.Record]) -> list[Batch]:
        """One batch for each shard key, by which its points are written, where the user shards by key."""
        batches = [
            self.batch(part, shard_key) for shard_key, part in by_shard(records).items()
        ]
        return [batch for batch in batches if len(batch.ids)]

    def batch(self, records: Sequence[Any], shard_key: Id | None = None) -> Batch:
        """`records` as one batch, all with this `shard_key`."""
        ids: list[Id] = []
        vectors, values, payloads, augmented = [], [], [], []
        for record in records:
            keys = self.manifest.unknown_keys(record.payload)
            if keys:
                self.left_over.setdefault((shard_key, keys), []).append(
                    plain_id(record.id)
                )
            named = (
                record.vector
                if isinstance(record.vector, dict)
                else {self.schema.using: record.vector}
            )
            if named.get(self.schema.using) is None:
                continue
            ids.append(plain_id(record.id))
            vectors.append(named[self.schema.using])
            if self.field is not None:
                values.append(group_of(record.payload, self.field))
            payloads.append(record.payload)
            augmented.append(
                None
                if self.version is None
                else named.get(self.version.augmented_vector)
            )
        matrix = np.array(vectors, np.float32).reshape(len(ids), self.schema.dim)
        offsets = np.full(len(ids), np.nan, np.float32)
        return Batch(
            ids,
            matrix,
            offsets
            if self.version is None
            else read_offsets(self.version, matrix, payloads, augmented),
            place=shard_key,
            foreign=sum(self.manifest.is_foreign(record.payload) for record in records),
            values=values if self.field is not None else None,
            rounding=None
            if self.version is None
            else rounding(self.version, augmented),
        )
