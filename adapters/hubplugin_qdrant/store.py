"""A vector of a Qdrant collection as a `hubplugin.store.Store`."""

from __future__ import annotations

import copy
import itertools
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
from qdrant_client import QdrantClient, models

from hubplugin.calibration import chosen_queries
from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.recording import folder_within
from hubplugin.store import Batch, Correction, Explanation, Found, Hits, Id, Share, Store, Writing, now, require_room
from hubplugin.vectors import Progress
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata, plain_client, searches
from hubplugin_qdrant.calls import run
from hubplugin_qdrant.client import require_client
from hubplugin_qdrant.explanation import explanation
from hubplugin_qdrant.manifest import KEY, Manifest, Version, our_fields, written_fields
from hubplugin_qdrant.metadata import CollectionMetadata, CorrectionCache
from hubplugin_qdrant.offsets import written_values
from hubplugin_qdrant.places import Place, QdrantShard, QdrantShare, divided
from hubplugin_qdrant.points import PointReader, changed_ids
from hubplugin_qdrant.requests import having, lacking_offset
from hubplugin_qdrant.schema import Schema, Storage, chosen_storage, deleted, dense_vectors, schemas, vector_names
from hubplugin_qdrant.transport import (
    EVERY_ID,
    IdRange,
    NoAnswerError,
    Transport,
    chunks,
    one_line,
    plain_id,
    read_ahead,
)


class QdrantStore(Store):
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
        self._learned: Version | None = None  # whose model was read last
        with one_line(self.url, "opening", collection):
            self.collection = run(metadata.real_name(self.client, collection))
            self._transport = Transport(self.client, self.collection, self.url, collection)
            self.metadata = CollectionMetadata(self._transport)
            manifest = run(metadata.read_manifest(self.client, self.collection))
        self._schemas = schemas(self._transport, vector or "", manifest)
        self.using, self.metric, self.dim = (getattr(self._schemas["payload"], n) for n in ("using", "metric", "dim"))
        self.maps_queries = self.metric is not Metric.EUCLIDEAN
        self.storage, self._choice = chosen_storage(self._schemas, storage, manifest)
        self.record = None if record is None else folder_within(record, self.collection, self.using)

    how_to_record = (
        "search through HubQdrantClient(..., record=FOLDER), and name the folder behind this store: ?record=FOLDER"
    )

    def mapping(self, version: Version | None) -> Version | None:
        """`version` with the query map of its model, as searches and readers need them."""
        if version is None or not version.mapped:
            return version
        if self._learned is None or self._learned.model != version.model:
            self._learned = version.having(self.metadata.read_model(version))
        return version.having(self._learned)

    def correction(self) -> Correction | None:
        version, active = self.metadata.read_manifest().lying(self.using)
        return None if version is None else Correction(self.metadata.read_model(version), active, version.made)

    def previous(self) -> OffsetModel | None:
        version = self.metadata.read_manifest().previous.get(self.using)
        return None if version is None else self.metadata.read_model(version)

    def active_version(self) -> Version:
        """The version that searches use. Raises StoreError if there is none."""
        version = self.metadata.read_manifest().active.get(self.using)
        if version is None:
            raise StoreError(f"{self.url}: no correction is active; run `hubplugin apply` first")
        return version

    def count(self) -> int:
        return self._transport.count()

    def scan(self, group_by: str | None = None) -> Iterator[Batch]:
        """Every point that has the vector, in the order of ids."""
        return self.scan_between(EVERY_ID, group_by)

    def scan_between(self, between: IdRange, group_by: str | None = None) -> Iterator[Batch]:
        """`scan` of the points between two ids."""
        manifest = self.metadata.read_manifest()
        version = self.mapping(manifest.active.get(self.using))
        key = group_by or (version.group_by if version is not None else None)
        return PointReader(self._schemas["payload"], manifest, version, key).read(between=between)

    def shards(self, count: int | None) -> list[QdrantShard]:
        """Ranges of ids, of as many points each: all ids are read for it."""
        if not self.url.startswith(("qdrant:", "qdrant+https:")):
            raise StoreError(
                f"{self.url}: other machines cannot open it; open a server's by hubplugin.open_store('qdrant://...')"
            )
        pages = self._transport.pages(lambda records: [plain_id(record.id) for record in records])
        return divided(self.url, chain.from_iterable(pages), self.count(), count)

    def joined(self, version: Version, model: OffsetModel, between: IdRange) -> QdrantWriting:
        """The part between two ids of a writing of `model` that another process has begun."""
        return QdrantWriting(self, version, "half-written", self._schemas[version.storage], model, None, between)

    def begin(self, model: OffsetModel, progress: Progress | None = None) -> QdrantWriting:
        self.require_writable()
        schema = self._schemas[self.storage]
        with self._transport.one_line("preparing"):
            version, found = self._begun(model, progress)
            schema.prepare(version)  # an active one, too, may have lost its room: the collection may be made anew
        limit = self._transport.strict.max_query_limit  # as it is now
        searched = {"max_candidates": limit, "agreement": self._agreement or version.agreement}
        return QdrantWriting(self, version.model_copy(update=searched), found, schema, model, progress)

    def _begun(self, model: OffsetModel, progress: Progress | None) -> tuple[Version, Found]:
        """The version that a writing of `model` writes, and what of it was found."""
        manifest, schema = self.metadata.read_manifest(), self._schemas[self.storage]
        given = (self.using, model.fingerprint, self.storage)
        version = m.amended(manifest, *given)
        if version is not None:
            schema.require_room(manifest, version)
            return version, "active"
        version, owner = m.half_written(manifest, *given), uuid.uuid4().hex
        schema.require_room(manifest, version)
        self.metadata.create()
        found: Found = "nothing" if version is None else "half-written"
        if version is not None:
            version = version.model_copy(update={"owner": owner})
        else:
            manifest = self.clear(progress)
            parts, number = self.metadata.write_model(model), self.next_number(manifest)
            where: dict[str, str] = {"offset_key": self.key_for(manifest)} if self.storage == "payload" else {}
            where |= {"storage": self.storage, "owner": owner, "made": now()}
            version = Version.of(model, number, self.using, parts, **where)
        self.metadata.write_manifest(m.begun(manifest, version))
        return version, found

    def require_writable(self, *, dry_run: bool = False) -> None:
        """Raises StoreError where there is nothing to write to, writing would take for ever, the payload key of the
        offsets is not free, or the api key may not write."""
        if self.count() == 0:
            raise StoreError(f"{self.url}: the collection is empty; add points first")
        if self._transport.info.config.optimizer_config.prevent_unoptimized:
            raise StoreError(
                f"{self.url}: with prevent_unoptimized each write waits for the graph; switch it off for the time: "
                "update_collection(optimizers_config=OptimizersConfigDiff(prevent_unoptimized=False))"
            )
        self.metadata.exists()  # raises where the user has something in its place
        if self.storage == "payload":
            manifest = self.metadata.read_manifest()
            if self.using not in manifest.active:  # else that may be what is written, for which there is room
                self._schemas[self.storage].require_room(manifest, manifest.writing)
            is_first = manifest.offset_key is None  # else the manifest says that the key is ours
            key = self.key_for(manifest)
            if is_first:
                self._require_free(key)
        folder = plain_client.folder_of(self.client)
        if not dry_run and folder is not None:
            require_room(folder, (4 * self.dim if self.storage == "vector" else 20) * self.count())
        if not dry_run and not self._transport.is_local:
            names = [self.collection, m.metadata_collection(self.collection)]
            for name in names if self.metadata.exists() else names[:1]:
                self._transport.require_right_to_write(name)

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
        seen: set[str] = set()
        while True:
            with self._transport.one_line("looking for what lies under the payload key of offsets"):
                found = self._transport.holding(key, seen)
            if not found:
                return
            for point, payload in found.items():
                fields = written_fields(payload.get(key))
                if not fields:
                    raise StoreError(
                        f"{self.url}: the payload key {key!r} holds something of yours, in point {point!r}; "
                        "name another key for the offsets: ",
                        Parameter("offset_key", f"{key}_2"),
                    )
                seen |= fields

    def next_number(self, manifest: Manifest) -> int:
        """The first number behind those given so far whose augmented vector no vector of the user's is called."""
        first, taken = manifest.last_number + 1, vector_names(self._transport.described())
        return next(n for n in itertools.count(first) if f"hub_v{n}" not in taken)

    def notes(self) -> Sequence[str]:
        manifest = self.metadata.read_manifest()
        active = manifest.active.get(self.using)
        lines = []
        if active is not None:
            lines = [
                active.where(),
                *self._choice,
                f"they take {self._schemas[active.storage].cost()}",
            ]
        if active is not None and active.metric is Metric.EUCLIDEAN:
            lines.append(
                "a fusion by DBSF gets similarities here where it gets distances raw: other scores, other order"
            )
        if manifest.writing is not None and manifest.writing.vector == self.using:
            lines.append(f"half-written: {manifest.writing.where()}")
        return lines

    def attention(self) -> Sequence[str]:
        manifest = self.metadata.read_manifest()
        if not manifest.everything():
            return list(self._without_manifest())
        version = manifest.active.get(self.using)
        hidden = None if version is None else self._schemas[version.storage].hidden(version)
        return [] if hidden is None else [hidden]

    def _without_manifest(self) -> Iterator[str]:
        """What of a correction lies here without its manifest, as after a snapshot of the collection alone."""
        place = m.metadata_collection(self.collection)
        raw = f"whose metadata is not in {place!r}: searches are raw; restore its snapshot under that name, or"
        key = self.offset_key or KEY
        with self._transport.one_line("looking for offsets"):
            first, _ = self._transport.retry(
                self.client.scroll, self.collection, limit=self._transport.page, with_payload=[key]
            )
            there = dense_vectors(self._transport.described())
        if any(our_fields((record.payload or {}).get(key)) for record in first):
            yield f"points hold offsets under {key!r} of a correction {raw} run apply; remove takes them out"
        for name, each in there.items():
            if m.AUGMENTED_VECTOR.fullmatch(name) and each.size == self.dim + 1:
                yield f"{name!r} is the second vector of a correction {raw} delete that vector and run apply"

    def plan(self) -> Sequence[str]:
        manifest = self.metadata.read_manifest()
        each, *more = self._schemas[self.storage].plan(self.next_number(manifest), self.key_for(manifest))
        return [
            f"each point of {self.collection!r} would get {each}",
            *self._choice,
            f"offsets would take {self._schemas[self.storage].cost()}",
            f"manifest and model would lie in {m.metadata_collection(self.collection)!r}",
            *more,
        ]

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        requests = [
            models.QueryRequest(
                query=query, using=self.using or None, limit=k, filter=self._condition, with_payload=False
            )
            for query in np.asarray(queries, np.float32).tolist()
        ]
        with self._transport.one_line("searching"):
            found = self._transport.answers(requests, None if raw else self._corrected_batch)
        return Hits(
            [[cast(Id, point.id) for point in response.points] for response in found],
            [[point.score for point in response.points] for response in found],
        )

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        self.active_version()
        query = asked.astype(np.float32).tolist() if isinstance(asked, np.ndarray) else asked
        given = models.QueryRequest(query=query, using=self.using or None, limit=k, with_payload=True)
        with self._transport.one_line("explaining"):
            cache = self._cache()
            known = run(cache.lookup(self.collection))
            (rewritten,) = run(searches.rewritten_requests(cache, known, [given]))
        has_key = "QDRANT_API_KEY" in os.environ
        place = plain_client.address(self.client)
        version = (known.manifest or Manifest()).active[self.using]
        return explanation(version, rewritten.request, self.collection, place, has_key)

    def _corrected_batch(self, collection: str, requests: list[models.QueryRequest]) -> list[models.QueryResponse]:
        """`HubQdrantClient.query_batch_points`."""
        arguments = {"collection_name": collection, "requests": requests}
        answers: list[models.QueryResponse] = run(searches.query_batch_points(self._cache(), arguments))
        return answers

    def _cache(self) -> CorrectionCache:
        """What is known of the correction, of which nothing has been read yet."""
        return CorrectionCache(self.client)

    def filtered(self, condition: str) -> QdrantStore:
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
        if not self.metadata.exists():
            self.delete((), last=True, progress=progress)
            return
        manifest = self.metadata.read_manifest()
        with self._transport.one_line("looking for vectors"):
            no_longer_there = {version.vector for version in deleted(manifest, self._transport.described())}
        for vector in (self.using, *no_longer_there):
            manifest = m.retired(manifest, vector)
        self.metadata.write_manifest(manifest)
        if manifest.kept_up():
            self.clear(progress)
        else:
            self.delete(manifest.retired, last=True, progress=progress)
            self.metadata.delete()

    def clear(self, progress: Progress | None = None) -> Manifest:
        """Deletes what is retired from the points, and the models that nothing else needs. Returns the manifest as it
        is then: another run may have begun meanwhile."""
        gone = self.metadata.read_manifest().retired
        if gone:
            self.delete(gone, progress=progress)
        manifest = self.metadata.read_manifest()
        if gone:
            for version in m.unused_models(manifest):
                self.metadata.delete_model(version)
            manifest = m.cleared(manifest, gone)
            self.metadata.write_manifest(manifest)
        return manifest

    def delete(self, gone: Sequence[Version], last: bool = False, progress: Progress | None = None) -> None:
        """Deletes from the points what the versions `gone` have written. last: there are no others, so that the payload
        key goes, too, where nothing else lies under it."""
        try:
            with self._transport.one_line("removing"):
                self._transport.written()
                for schema in self._schemas.values():
                    schema.delete(gone, last, progress)
        finally:
            self._transport.give_up()


def open_url(url: str) -> QdrantStore:
    """The store behind qdrant://HOST:6333/COLLECTION, qdrant+https://HOST:6333/COLLECTION or
    qdrant-local:PATH/COLLECTION. Options follow: ?using=VECTOR where the collection has named vectors.
    &storage=vector or &storage=payload where offsets shall lie elsewhere than "auto" puts them, and &offset_key=KEY
    where another payload key than hub_offset shall hold them. &grpc=6334 is the server's port for gRPC, by which
    vectors come and go two to three times as fast. &record=FOLDER is where `HubQdrantClient(record=FOLDER)` records
    queries.

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
    """The offsets of `version`, those of `model`, on their way into the collection of `schema`; no other run may write
    them meanwhile. By the bank of the model the search is calibrated. progress: told of what comes after the last
    write. between: ids of the points that `scan` yields."""

    def __init__(
        self,
        store: QdrantStore,
        version: Version,
        found: Found,
        schema: Schema,
        model: OffsetModel,
        progress: Progress | None,
        between: IdRange = EVERY_ID,
    ):
        self.store, self.version, self.found = store, version, found
        if version.mapped:
            self.version = version.having(model)
        self._schema, self._transport, self._model = schema, schema.transport, model
        self._progress, self._between = progress, between
        self._is_taken_out = False  # what another run has taken out is taken out once more, with what came later
        self._read: PointReader | None = None  # what has read the points last
        self._others: set[Id] = set()  # points that others have written since they were read

    def scan(self) -> Iterator[Batch]:
        """Every point: one that came meanwhile may stand before those that are written."""
        yield from self._reader().read(between=self._between)

    def changed(self, read: Iterable[Batch]) -> Iterator[Batch]:
        """What others have written since `read`: once seen, a point is read each time. All, where a point may have
        moved to another group, and where the server is not fast at exact searches, or allows no such searches and
        filters by as many ids or on what may have no index yet."""
        allowed = self._transport.strict.search_allow_exact is not False and self._transport.may_filter
        if self.version.group_by is not None or not allowed or self._transport.is_local:
            yield from self.scan()
            return
        reader, using, metric = self._reader(), self.store.using, self.version.metric
        done, total = 0, self._transport.count()
        for seen, ids in read_ahead((len(b.ids), changed_ids(self._transport, using, metric, b)) for b in read):
            self._others.update(ids)
            done += seen
            if self._progress is not None:
                self._progress("closing", min(done, total), total)
        for part in chunks(list(self._others), self._transport.page):
            yield from reader.read(having(part))
        for batch in reader.read(lacking_offset(self.version)):
            self._others.update(batch.ids)
            yield batch

    def _reader(self) -> PointReader:
        """What reads the points as they are once all is written that is under way."""
        self._transport.settle()
        self._read = PointReader(self._schema, self._undisturbed(), self.version, self.version.group_by)
        return self._read

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        """Returns before it is written; what goes wrong is raised by a later call. `scan` and `activate` wait."""
        items = list(zip(batch.ids, written_values(self.version, batch.vectors, offsets), strict=True))
        self._schema.write(self.version, items, batch.place)

    def settle(self) -> None:
        self._transport.settle()
        self._undisturbed()
        if self._read is not None:
            for (shard_key, keys), points in self._read.left_over.items():
                self._schema.delete_keys(keys, points, shard_key)
        self._transport.settle()

    def share(self) -> Share:
        return QdrantShare(self.store.url, self.version.model_dump_json())

    def _undisturbed(self) -> Manifest:
        """The manifest as it is now. Raises StoreError if it no longer names this version as written by this run."""
        manifest = self.store.metadata.read_manifest()
        if m.is_undisturbed(manifest, self.version):
            return manifest
        self._is_taken_out = self.version.number not in {version.number for version in manifest.everything()}
        raise StoreError(
            f"{self.store.url}: another run has begun since, and this one stops; searches use nothing that it wrote"
        )

    def activate(self) -> None:
        """The offsets of the version before are deleted once no client searches by them any more."""
        self.settle()
        with self._transport.one_line("activating"):
            queries = chosen_queries(self._model, self.store.scan())
            version = self._schema.finish(self.version, queries, self._progress)
        manifest = m.activated(self._undisturbed(), version)
        self.store.metadata.write_manifest(manifest)
        if manifest.retired:
            self._wait_for_clients()
            self.store.clear(self._progress)

    def _wait_for_clients(self) -> None:
        """Until all of them have read the manifest again. To local mode there is one client."""
        end = time.monotonic() + (0.0 if self._transport.is_local else metadata.MANIFEST_SECONDS)
        later = "the next job deletes the offsets of the version before"
        self._transport.until(lambda: time.monotonic() >= end, "waiting for clients", later, self._progress)

    def close(self) -> None:
        """Ends what is under way."""
        try:
            if self._is_taken_out:
                self._transport.settle()
                self.store.delete([self.version])
        finally:
            self._transport.give_up()
