"""A vector of a Qdrant collection as a `hubplugin.store.Store`."""

from __future__ import annotations

import copy
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
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
from hubplugin.store import Batch, Explanation, Found, Hits, Id, Share, Writing, require_room
from hubplugin.vectors import Progress
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata, plain_client, searches
from hubplugin_qdrant.calls import Operation, run
from hubplugin_qdrant.client import require_client
from hubplugin_qdrant.explanation import explanation
from hubplugin_qdrant.manifest import KEY, Manifest, Version, our_fields, written_fields
from hubplugin_qdrant.metadata import CorrectionCache
from hubplugin_qdrant.offsets import written_values
from hubplugin_qdrant.places import Place, QdrantShard, QdrantShare, divided
from hubplugin_qdrant.points import PointReader
from hubplugin_qdrant.schema import Storage, chosen_storage, deleted, dense_vectors, schemas, vector_names
from hubplugin_qdrant.transport import (
    EVERY_ID,
    Answer,
    IdRange,
    NoAnswerError,
    Transport,
    one_line,
    plain_id,
)


class QdrantStore(ManifestStore[Version]):
    """The vector `vector` of a collection, with its offsets as `storage`; see `open_store`, which makes it."""

    shared = True

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
        is_name = isinstance(offset_key, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", offset_key)
        if offset_key is not None and not is_name:
            raise InputError(Parameter("offset_key", offset_key), ": expected a name of letters, digits and _")
        self._agreement, self.offset_key = agreement, offset_key
        self.client = require_client(client, QdrantClient)
        if not isinstance(collection, str):
            raise InputError(f"collection must be a name, not {type(collection).__name__}; the client comes before it")
        if agreement is not None and not 0 < agreement <= 1:
            raise InputError(f"agreement={agreement!r}: it is a share of the raw recall, above 0 and at most 1")
        if offset_key is not None and storage == "vector":
            raise InputError(
                Parameter("offset_key", offset_key),
                " is for offsets in payloads; ",
                Parameter("storage", "vector"),
                " has none",
            )
        self.url = url or f"qdrant collection {collection!r}"
        self._condition: models.Filter | None = None
        with one_line(self.url, "opening", collection):
            self.collection = run(metadata.real_name(self.client, collection))
            self.transport = Transport(self.client, self.collection, self.url, collection)
            manifest = run(metadata.read_manifest(self.client, self.collection))
        self.schemas = schemas(self.transport, vector or "", manifest)
        schema = self.schemas["payload"]
        self.vector, self.metric, self.dim = schema.using, schema.metric, schema.dim
        self.maps_queries = self.metric is not Metric.EUCLIDEAN
        self.storage, self._choice = chosen_storage(self.schemas, storage, manifest)
        self.record = None if record is None else folder_within(record, self.collection, self.vector)

    how_to_record = (
        "search through HubQdrantClient(..., record=FOLDER), and name the folder behind this store: ?record=FOLDER"
    )

    def _done(self, doing: str, operation: Callable[..., Operation[Answer]], *given: object) -> Answer:
        """What `operation` returns; made again while the server is away."""
        with self.transport.one_line(doing):
            return self.transport.retry(lambda: run(operation(self.client, self.collection, *given)))

    def read_manifest(self) -> Manifest:
        return self._done("reading the manifest", metadata.read_manifest)

    def write_manifest(self, manifest: corrections.Manifest[Version]) -> None:
        self._done("writing the manifest", metadata.write_manifest, manifest)

    def delete_manifest(self) -> None:
        with self.transport.one_line("removing"):
            self.client.delete_collection(m.metadata_collection(self.collection))

    def has_manifest(self) -> bool:
        """Raises StoreError where the user has a collection in its place."""
        return self._done("looking for the manifest", metadata.exists)

    def new_version(self, model: OffsetModel, number: int) -> Version:
        where = {"offset_key": self.key_for(self.read_manifest())} if self.storage == "payload" else {}
        return Version.of(model, number, self.vector, storage=self.storage, parts=len(model.to_texts()), **where)

    def read_model(self, version: Version) -> OffsetModel:
        return self._done("reading the model", metadata.read_model, version)

    def write_model(self, version: Version, model: OffsetModel) -> None:
        self._done("writing the model", metadata.write_model, version, model)

    def delete_model(self, version: Version) -> None:
        self._done("deleting a model", metadata.delete_model, version)

    def make_room(self, version: Version) -> None:
        self.schemas[version.storage].prepare(version)

    def delete_offsets(self, versions: Sequence[Version], progress: Progress | None = None) -> None:
        try:
            with self.transport.one_line("removing"):
                self.transport.written()
                last = not self.read_manifest().maintained
                for schema in self.schemas.values():
                    schema.delete(versions, last, progress)
        finally:
            self.transport.give_up()

    def find(self, manifest: corrections.Manifest[Version], model: OffsetModel) -> tuple[Version | None, Found]:
        return manifest.find(self.vector, model.fingerprint, storage=self.storage)

    def next_number(self, manifest: corrections.Manifest[Version]) -> int:
        """The first number behind those given so far whose augmented vector no vector of the user's is called."""
        first, taken = manifest.last_number + 1, vector_names(self.transport.described())
        return next(n for n in itertools.count(first) if f"hub_v{n}" not in taken)

    def count(self) -> int:
        return self.transport.count()

    def scan(self, group_by: str | None = None) -> Iterator[Batch]:
        """Every point that has the vector; see `Transport.pages`."""
        return self.scan_between(None, group_by)

    def scan_between(self, between: IdRange | None, group_by: str | None = None) -> Iterator[Batch]:
        """`scan` of the points between two ids."""
        manifest = self.read_manifest()
        version = manifest.active.get(self.vector)
        if version is not None and version.mapped:
            version = version.having(self.model(version))
        key = group_by or (version.group_by if version is not None else None)
        return PointReader(self.schemas["payload"], manifest, version, key).read(between=between)

    def shards(self, count: int | None) -> list[QdrantShard]:
        """Ranges of ids, of as many points each: all ids are read for it."""
        if not self.url.startswith(("qdrant:", "qdrant+https:")):
            raise StoreError(
                f"{self.url}: other machines cannot open it; open a server's by hubplugin.open_store('qdrant://...')"
            )
        pages = self.transport.pages(lambda records: [plain_id(each.id) for each in records], between=EVERY_ID)
        return divided(self.url, chain.from_iterable(pages), self.count(), count)

    def joined(self, version: Version, model: OffsetModel, between: IdRange) -> QdrantWriting:
        """The part between two ids of a writing of `model` that another process has begun."""
        return QdrantWriting(self, version, "half-written", model, between=between)

    def begin(self, model: OffsetModel, progress: Progress | None = None) -> QdrantWriting:
        with self.transport.one_line("preparing"):
            manifest = self.read_manifest()
            self.schemas[self.storage].require_room(manifest, self.find(manifest, model)[0])
            self._done("preparing", metadata.create, self.transport.info.config.params.replication_factor)
            version, found = self.start_version(model, progress)
        limit = self.transport.strict.max_query_limit  # as it is now
        version = version.replace(max_candidates=limit, agreement=self._agreement or version.agreement)
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
        there = self.has_manifest()
        if self.storage == "payload":
            manifest = self.read_manifest()
            if self.vector not in manifest.active:  # else that may be what is written, for which there is room
                self.schemas[self.storage].require_room(manifest, manifest.writing)
            key = self.key_for(manifest)
            if manifest.offset_key is None:  # else the manifest says that the key is ours
                self._require_free(key)
        folder = plain_client.folder_of(self.client)
        if not dry_run and folder is not None:
            require_room(folder, (4 * self.dim if self.storage == "vector" else 20) * self.count())
        if not dry_run and not self.transport.is_local:
            names = [self.collection, m.metadata_collection(self.collection)]
            for name in names if there else names[:1]:
                self.transport.require_right_to_write(name)

    def key_for(self, manifest: Manifest) -> str:
        """The payload key under which a new version has its offsets: one for all versions. Raises StoreError if
        another one was named than that of the correction in place."""
        lying = manifest.offset_key
        if lying is not None and self.offset_key not in (None, lying):
            raise StoreError(
                f"{self.url}: the offsets of the correction in place lie under the payload key {lying!r}; remove it "
                "before you name another: ",
                Parameter("offset_key", self.offset_key),
            )
        return lying or self.offset_key or KEY

    def _require_free(self, key: str) -> None:
        """Offsets of a correction whose manifest was lost are ours, too, and written over."""
        for page in self.transport.pages(list, with_payload=[key]):
            for record in page:
                if key in (record.payload or ()) and not written_fields((record.payload or {})[key]):
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
        if active is not None and active.metric is Metric.EUCLIDEAN:
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
        hidden = None if version is None else self.schemas[version.storage].hidden(version)
        return [] if hidden is None else [hidden]

    def _without_manifest(self) -> Iterator[str]:
        """What of a correction lies here without its manifest, as after a snapshot of the collection alone."""
        place = m.metadata_collection(self.collection)
        raw = f"whose metadata is not in {place!r}: searches are raw; restore its snapshot under that name, or"
        key = self.offset_key or KEY
        with self.transport.one_line("looking for offsets"):
            first, _ = self.transport.retry(
                self.client.scroll, self.collection, limit=self.transport.page, with_payload=[key]
            )
            there = dense_vectors(self.transport.described())
        if any(our_fields((record.payload or {}).get(key)) for record in first):
            yield f"points hold offsets under {key!r} of a correction {raw} run apply; remove takes them out"
        for name, each in there.items():
            if m.AUGMENTED_VECTOR.fullmatch(name) and each.size == self.dim + 1:
                yield f"{name!r} is the second vector of a correction {raw} delete that vector and run apply"

    def plan(self) -> Sequence[str]:
        manifest = self.read_manifest()
        each, *more = self.schemas[self.storage].plan(self.next_number(manifest), self.key_for(manifest))
        return [
            f"each point of {self.collection!r} would get {each}",
            *self._choice,
            f"offsets would take {self.schemas[self.storage].cost()}",
            f"manifest and model would lie in {m.metadata_collection(self.collection)!r}",
            *more,
        ]

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        requests = [
            models.QueryRequest(
                query=query, using=self.vector or None, limit=k, filter=self._condition, with_payload=False
            )
            for query in np.asarray(queries, np.float32).tolist()
        ]
        with self.transport.one_line("searching"):
            found = self.transport.answers(requests, None if raw else self._corrected_batch)
        return Hits(
            [[cast(Id, point.id) for point in response.points] for response in found],
            [[point.score for point in response.points] for response in found],
        )

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        self.require_active()
        query = asked.astype(np.float32).tolist() if isinstance(asked, np.ndarray) else asked
        given = models.QueryRequest(query=query, using=self.vector or None, limit=k, with_payload=True)
        with self.transport.one_line("explaining"):
            cache = self._cache()
            known = run(cache.lookup(self.collection))
            (rewritten,) = run(searches.rewritten_requests(cache, known, [given]))
        has_key = "QDRANT_API_KEY" in os.environ
        place = plain_client.address(self.client)
        version = (known.manifest or Manifest()).active[self.vector]
        return explanation(version, rewritten.request, self.collection, place, has_key)

    def _corrected_batch(self, collection: str, requests: list[models.QueryRequest]) -> list[models.QueryResponse]:
        """`HubQdrantClient.query_batch_points`."""
        arguments = {"collection_name": collection, "requests": requests}
        answers: list[models.QueryResponse] = run(searches.query_batch_points(self._cache(), arguments))
        return answers

    def _cache(self) -> CorrectionCache:
        """What is known of the correction, of which nothing has been read yet."""
        return CorrectionCache(self.client)

    def with_filter(self, condition: str) -> QdrantStore:
        """condition: a filter as Qdrant has it in JSON, {"must": [{"key": ..., "match": ...}]}."""
        found = copy.copy(self)
        try:
            found._condition = models.Filter.model_validate_json(condition)
        except ValueError as error:
            raise InputError(f"{condition!r} is no Qdrant filter in JSON: {' '.join(str(error).split())}") from None
        return found

    def remove(self, progress: Progress | None = None) -> None:
        """Deletes the offsets, indexes and vectors of which the manifest tells, the metadata, offsets that a client
        brought along from elsewhere, and nothing else; goes on where it was cut off. What is left of the correction of
        a vector that is no longer there goes, too."""
        if not self.has_manifest():
            self.delete_offsets((), progress)
            return
        manifest = self.read_manifest()
        with self.transport.one_line("looking for vectors"):
            no_longer_there = {version.vector for version in deleted(manifest, self.transport.described())}
        for vector in no_longer_there:
            manifest = manifest.withdraw(vector)
        if no_longer_there:
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
    options = {name: place.options[name] for name in ("storage", "offset_key", "record") if name in place.options}
    try:
        with one_line(url, "opening", place.collection):
            client = place.connect()
            return QdrantStore(client, place.collection, place.options.get("using"), url=url, **cast(Any, options))
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
        version: Version,
        found: Found,
        model: OffsetModel,
        progress: Progress | None = None,
        between: IdRange | None = None,
    ):
        self.store, self.found = store, found
        self.version = version.having(model) if version.mapped else version
        self._schema, self._transport, self._model = store.schemas[version.storage], store.transport, model
        self._progress, self._between = progress, between
        self._is_overtaken = False
        self._read: PointReader | None = None  # what has read the points last

    def scan(self) -> Iterator[Batch]:
        """Every point, as it is once all is written that is under way: one that came meanwhile may stand before those
        that are written."""
        self._transport.settle()
        self._read = PointReader(self._schema, self._held(), self.version, self.version.group_by)
        yield from self._read.read(between=self._between)

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Returns before it is written; what goes wrong is raised by a later call. `scan` and `activate` wait."""
        items = list(zip(batch.ids, written_values(self.version, batch.vectors, offsets), strict=True))
        self._schema.write(self.version, items, batch.place)

    def wait(self) -> None:
        self._transport.settle()
        self._held()
        if self._read is not None:
            for (shard_key, keys), points in self._read.left_over.items():
                self._schema.delete_keys(keys, points, shard_key)
        self._transport.settle()

    def share(self) -> Share:
        return QdrantShare(self.store.url, self.version.model_dump_json())

    def _held(self) -> Manifest:
        """The manifest as it is now. Raises StoreError if another run has taken this version's place."""
        try:
            return cast(Manifest, self.store.require_owner(self.version))
        except StoreError:
            self._is_overtaken = True
            raise

    def activate(self) -> None:
        """The offsets of the version before are deleted once no client searches by them any more."""
        self.wait()
        with self._transport.one_line("activating"):
            queries = choose_queries(self._model, self.store.scan())
            version = self._schema.finish(self.version, queries, self._progress)
        self._held()
        self.store.switch(version)
        if self.store.read_manifest().retired:
            self._wait_for_clients()
            self.store.clear(self._progress)

    def _wait_for_clients(self) -> None:
        """Until all of them have read the manifest again. To local mode there is one client."""
        end = time.monotonic() + (0.0 if self._transport.is_local else metadata.MANIFEST_SECONDS)
        later = "the next job deletes the offsets of the version before"
        self._transport.until(lambda: time.monotonic() >= end, "waiting for clients", later, self._progress)

    def close(self) -> None:
        """Ends what is under way. What another run has taken out is taken out once more, with what came later."""
        try:
            if self._is_overtaken:
                self._transport.settle()
                if all(each.number != self.version.number for each in self.store.read_manifest().everything):
                    self.store.delete_offsets([self.version])
        finally:
            self._transport.give_up()
