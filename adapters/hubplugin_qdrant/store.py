"""A vector of a Qdrant collection as a `hubplugin.store.Store`."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, cast
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from qdrant_client import QdrantClient, models

from hubplugin.abilities import Explanation
from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.recording import folder_within
from hubplugin.store import Batch, Hits, Id
from hubplugin.vectors import Progress
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant import metadata, plain_client, searches
from hubplugin_qdrant.calibration import chosen_queries
from hubplugin_qdrant.client import HubQdrantClient, require_client
from hubplugin_qdrant.errors import Fault, NoAnswerError, fault_of, one_line
from hubplugin_qdrant.explanation import explanation
from hubplugin_qdrant.manifest import Manifest, Payload, Version
from hubplugin_qdrant.metadata import CollectionMetadata
from hubplugin_qdrant.operations import run
from hubplugin_qdrant.points import PointReader, texts_at
from hubplugin_qdrant.schema import METRICS, Storage, chosen_storage, chosen_vector, deleted, schemas, vector_names
from hubplugin_qdrant.shards import QdrantShard, divided, require_url
from hubplugin_qdrant.transport import EVERY_ID, IdRange, Transport, plain_id
from hubplugin_qdrant.versioned_store import VersionedStore, usable_key
from hubplugin_qdrant.writing import QdrantWriting

FORMULAS = (1, 14)
"""The oldest version of the server supported: the first whose formulas add offsets to scores."""


NO_QUERIES = np.empty((0, 0), np.float32)


class QdrantStore(VersionedStore):
    """The vector `using` of a collection ("" is the unnamed one), with its offsets as `storage`, searched as exactly as
    `agreement` and `offset_key` say; see `apply`.

    Raises StoreError for a collection or vector that is not there or cannot carry offsets, and for a server that
    cannot be reached. `collection` may be an alias: the correction belongs to what it stands for now. record: the
    folder that `HubQdrantClient(record=...)` was given, where `recorded` finds the queries.
    """

    shared = True

    def __init__(
        self,
        client: QdrantClient,
        collection: str,
        using: str = "",
        storage: Storage | Literal["auto"] = "auto",
        *,
        agreement: float | None = None,
        offset_key: str | None = None,
        url: str = "",
        record: str | os.PathLike[str] | None = None,
    ):
        self.client = require_client(client, QdrantClient)
        if not isinstance(collection, str):
            raise InputError(f"collection must be a name, not {type(collection).__name__}; the client comes before it")
        self.url = url or f"qdrant collection {collection!r}"
        with one_line(self.url, "opening", collection):
            self.collection = metadata.real_name(self.client, collection)
            info = self._described(collection)
            server = _supported_version(self.url, self.client.info().version)
            manifest = metadata.read_manifest(self.client, self.collection) or Manifest()
        self.using, parameters = chosen_vector(self.url, info, using, manifest)
        self.metric, self.dim = METRICS[parameters.distance], parameters.size
        self.record = None if record is None else folder_within(record, self.collection, self.using)
        self._transport = Transport(self.client, self.collection, self.url, info, self.dim)
        if agreement is not None and not 0 < agreement <= 1:
            raise InputError(f"agreement={agreement!r}: it is a share of the raw recall, above 0 and at most 1")
        self._agreement = agreement
        self._condition: models.Filter | None = None
        self._schemas = schemas(self._transport, self.using, parameters, server)
        lying, _ = manifest.lying(self.using)
        self.storage, self._choice = chosen_storage(self._schemas, storage, lying)
        self.offset_key = usable_key(offset_key)
        if offset_key is not None and storage == "vector":
            raise InputError(
                Parameter("offset_key", offset_key),
                " is for offsets in payloads; ",
                Parameter("storage", "vector"),
                " has none",
            )
        self.metadata = CollectionMetadata(self._transport)

    def _described(self, collection: str) -> models.CollectionInfo:
        try:
            return self.client.get_collection(self.collection)
        except Exception as error:
            if fault_of(error) is not Fault.MISSING:
                raise
            names = [c.name for c in self.client.get_collections().collections if not c.name.endswith("--hub")]
            listed = ", ".join(sorted(names)) or "none"
            raise StoreError(f"{self.url}: there is no collection {collection!r}; there are: {listed}") from None

    how_to_record = (
        "search through HubQdrantClient(..., record=FOLDER), and name the folder behind this store: ?record=FOLDER"
    )

    def count(self) -> int:
        return self._transport.count()

    def scan(self, group_by: str | None = None) -> Iterator[Batch]:
        """Every point that has the vector, in the order of ids. A vector of length 0 has no cosine and is left out."""
        return self.scan_between(EVERY_ID, group_by)

    def scan_between(self, between: IdRange, group_by: str | None = None) -> Iterator[Batch]:
        """`scan` of the points between two ids."""
        manifest = self.metadata.read_manifest()
        version = manifest.active.get(self.using)
        key = group_by or (version.group_by if version is not None else None)
        return PointReader(self, manifest, version, key).read(self._transport, between=between)

    def shards(self, count: int | None) -> list[QdrantShard]:
        """Ranges of ids, of as many points each: all ids are read for it."""
        require_url(self.url)
        pages = self._transport.pages(lambda records: [plain_id(record.id) for record in records])
        return divided(self.url, chain.from_iterable(pages), self.count(), count)

    def joined(self, version: Version, between: IdRange) -> QdrantWriting:
        """The part between two ids of a writing that another process has begun."""
        schema = self._schemas[version.storage]
        writing = QdrantWriting(self, version, "half-written", schema, NO_QUERIES, None)
        writing.between = between
        return writing

    def sample(self, count: int) -> Iterator[Batch]:
        manifest = self.metadata.read_manifest()
        version = manifest.active.get(self.using)
        reader = PointReader(self, manifest, version, version.group_by if version is not None else None)
        for records in self._transport.sampled(count, reader.vectors, reader.payload):
            yield from reader.batches(records)

    def begin(self, model: OffsetModel, progress: Progress | None = None) -> QdrantWriting:
        self.require_writable()
        queries = chosen_queries(model, self.scan())
        schema = self._schemas[self.storage]
        with self._transport.one_line("preparing"):
            version, found = self.version_of(model, progress)
            if found != "active":
                schema.prepare(version)
        limit = self._transport.strict.max_query_limit  # as it is now
        searched = {"max_candidates": limit, "agreement": self._agreement or version.agreement}
        return QdrantWriting(self, version.model_copy(update=searched), found, schema, queries, progress)

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
        super().require_writable(dry_run=dry_run)
        if not dry_run and not self._transport.is_local:
            names = [self.collection, m.metadata_collection(self.collection)]
            for name in names if self.metadata.exists() else names[:1]:
                self._transport.require_right_to_write(name)

    def holding(self, key: str, without: Collection[str]) -> Mapping[Id, Payload]:
        with self._transport.one_line("looking for what lies under the payload key of offsets"):
            return self._transport.holding(key, without)

    def next_number(self, manifest: Manifest) -> int:
        """The first number behind those given so far whose augmented vector no vector of the user's is called."""
        taken = vector_names(self._transport.described())
        return next(n for n in itertools.count(super().next_number(manifest)) if f"hub_v{n}" not in taken)

    def notes(self) -> Sequence[str]:
        manifest = self.metadata.read_manifest()
        active = manifest.active.get(self.using)
        lines = []
        if active is not None:
            lines = [
                *self.switched(),
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
        client = self.client if raw else self._corrected_client()
        requests = [
            models.QueryRequest(
                query=query, using=self.using or None, limit=k, filter=self._condition, with_payload=False
            )
            for query in np.asarray(queries, np.float32).tolist()
        ]
        with self._transport.one_line("searching"):
            found = self._transport.answers(client, requests)
        return Hits(
            [[cast(Id, point.id) for point in response.points] for response in found],
            [[point.score for point in response.points] for response in found],
        )

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        self.active_version()
        query = asked.astype(np.float32).tolist() if isinstance(asked, np.ndarray) else asked
        given = models.QueryRequest(query=query, using=self.using or None, limit=k, with_payload=True)
        corrections = self._corrected_client()._corrections
        with self._transport.one_line("explaining"):
            request, manifest = run(searches.corrected_request(corrections, self.collection, given))
        has_key = "QDRANT_API_KEY" in os.environ
        place = plain_client.address(self.client)
        return explanation(manifest.active[self.using], request, self.collection, place, has_key)

    def _corrected_client(self) -> HubQdrantClient:
        """A client that searches corrected, also while the correction is switched off."""
        client = HubQdrantClient.wrap(self.client)
        client._corrections.heeds_switch = False
        return client

    def filtered(self, condition: str) -> QdrantStore:
        """condition: a filter as Qdrant has it in JSON, {"must": [{"key": ..., "match": ...}]}."""
        found = copy.copy(self)
        try:
            found._condition = models.Filter.model_validate_json(condition)
        except ValueError as error:
            raise InputError(f"{condition!r} is no Qdrant filter in JSON: {' '.join(str(error).split())}") from None
        return found

    def named(self, ids: Sequence[Id], key: str) -> list[str | None]:
        return texts_at(key, ids, lambda part: self._transport.retrieved(part, key))

    def deleted_vectors(self, manifest: Manifest) -> set[str]:
        with self._transport.one_line("looking for vectors"):
            return {version.vector for version in deleted(manifest, self._transport.described())}

    def delete(self, gone: Sequence[Version], last: bool = False, progress: Progress | None = None) -> None:
        try:
            with self._transport.one_line("removing"):
                for schema in self._schemas.values():
                    schema.delete(gone, last, progress)
        finally:
            self._transport.give_up()


def _supported_version(url: str, text: str) -> tuple[int, int]:
    """The version of a server, such as (1, 18). Raises StoreError if it has no formulas."""
    major, minor = (int(part) for part in text.split(".")[:2])
    if (major, minor) < FORMULAS:
        raise StoreError(
            f"{url}: the server is Qdrant {major}.{minor}, which has no formulas; upgrade it to 1.14 or newer"
        )
    return major, minor


def open_url(url: str) -> QdrantStore:
    """The store behind qdrant://HOST:6333/COLLECTION, qdrant+https://HOST:6333/COLLECTION or
    qdrant-local:PATH/COLLECTION, each with ?using=VECTOR where the collection has named vectors, and with
    &storage=vector or &storage=payload where offsets shall lie elsewhere than "auto" puts them,
    with &offset_key=KEY where another payload key than hub_offset shall hold them,
    with &grpc=6334, the server's port for gRPC, by which vectors come and go two to three times as fast, and
    with &record=FOLDER where `HubQdrantClient(record=FOLDER)` records queries.

    The api key is read from the environment variable QDRANT_API_KEY and is never part of a URL.
    """
    scheme, _, rest = url.partition(":")
    parts = urlsplit(f"{'local:' if scheme == 'qdrant-local' else '//'}{rest.removeprefix('//')}")
    options = dict(parse_qsl(parts.query))
    using, storage = options.pop("using", ""), options.pop("storage", "auto")
    offset_key = options.pop("offset_key", None)
    record, grpc = options.pop("record", None), options.pop("grpc", "")
    place, _, collection = parts.path.rpartition("/")
    expected = "qdrant-local:PATH/COLLECTION" if scheme == "qdrant-local" else f"{scheme}://HOST:6333/COLLECTION"
    if parts.username or parts.password or options:
        raise InputError(
            f"expected {expected}, and no more than "
            "?using=VECTOR&storage=STORAGE&offset_key=KEY&grpc=PORT&record=FOLDER behind it; "
            "an api key is read from the environment variable QDRANT_API_KEY"
        )
    if grpc and (scheme == "qdrant-local" or place.strip("/")):
        raise InputError(
            f"grpc={grpc}: it goes with HOST:6333/COLLECTION; neither a folder nor a path is known to gRPC"
        )
    if grpc and not (grpc.isascii() and grpc.isdigit() and 0 < int(grpc) < 65536):
        raise InputError(f"grpc={grpc}: expected the server's port for gRPC, usually 6334")
    if not collection or not (place if scheme == "qdrant-local" else parts.hostname):
        raise InputError(f"{url!r} names no collection; expected {expected}")
    try:
        with one_line(url, "opening", collection):
            client = _connect(scheme, parts, place, int(grpc or 0))
            return QdrantStore(
                client, collection, using, cast(Storage, storage), offset_key=offset_key, url=url, record=record
            )
    except NoAnswerError as error:
        if grpc:
            raise StoreError(*error.args, f"; grpc={grpc} must be its port for gRPC, usually 6334") from None
        if parts.netloc.endswith(":6334"):
            raise StoreError(*error.args, "; 6334 is usually the port of gRPC, a URL has that of HTTP, 6333") from None
        raise


def _connect(scheme: str, parts: Any, place: str, grpc_port: int) -> QdrantClient:
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
        grpc_port=grpc_port or 6334,
        prefer_grpc=grpc_port > 0,
        https=scheme == "qdrant+https",
        prefix=place.strip("/") or None,
        api_key=os.environ.get("QDRANT_API_KEY"),
        timeout=60,
        check_compatibility=False,  # the store asks for the version itself
    )
