"""What a collection gets so that it can keep offsets, and which vectors can have them.

That is a payload index, or an augmented vector.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from qdrant_client import models

from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.metric import Metric
from hubplugin.store import Id
from hubplugin.vectors import Progress
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.calibration import Searches, calibrate
from hubplugin_qdrant.manifest import QdrantManifest, QdrantVersion
from hubplugin_qdrant.offsets import set_offsets
from hubplugin_qdrant.plain_client import PointId, ShardKey
from hubplugin_qdrant.transport import (
    Items,
    QdrantTransport,
    chunks,
)

VECTORS_IN_PLACE = (1, 18)
"""The first version of the server that adds a named vector to a collection."""

SMALL_INDEXES = (1, 17)
"""The first version of the server whose float index can do without links in the
graph."""

INDEX_BYTES, PAYLOAD_BYTES = 32, 64
"""Estimated bytes a point for a number in a payload: in the index, its value and point
id both ways; on disk, its JSON."""

METRICS = {
    models.Distance.COSINE: Metric.COSINE,
    models.Distance.DOT: Metric.DOT,
    models.Distance.EUCLID: Metric.EUCLIDEAN,
}

FLOATS = (None, models.Datatype.FLOAT32, models.Datatype.FLOAT16)
"""Datatypes of vectors beside which a second vector of the same datatype can hold the
offset."""

DISTANCES = {metric: distance for distance, metric in METRICS.items()}

Storage: TypeAlias = Literal["payload", "vector"]

VECTORS_AT_ONCE = 500
"""Vectors in a request. With small requests a server reads some while it stores
others: it took 6,100 vectors of 384 dimensions a second, but 4,200 in requests of
2,000."""

NEARLY = 0.9
"""The share of points in the graph from which on searches are as fast as with all of
them. A server leaves the last few points out."""


class Schema(ABC):
    """How the collection behind `transport` keeps the offsets of its vector `using`.

    using: "" is the unnamed vector. parameters: those of the vector.
    """

    def __init__(
        self, transport: QdrantTransport, using: str, parameters: models.VectorParams
    ):
        self.transport = transport
        self.using = using
        self.parameters = parameters
        self.metric = METRICS[parameters.distance]
        self.dim = parameters.size

    def require_room(  # noqa: B027
        self, manifest: QdrantManifest, version: QdrantVersion | None
    ) -> None:
        """Raise StoreError if strict mode leaves no room for `version`.

        version: None for a new version, beside those of `manifest`.
        """

    writing: float
    """The time to write all points, as a multiple of the time to read them."""

    @abstractmethod
    def cost(self) -> str:
        """Say what the offsets of all points take of memory and disk."""

    @abstractmethod
    def prepare(self, version: QdrantVersion) -> None:
        """Make room for `version` before anything is written."""

    @abstractmethod
    def write(self, version: QdrantVersion, items: Items, shard_key: ShardKey) -> None:
        """Start to give each point of `items`, of this shard key, its value.

        The values are those of `offsets.values_of`; see `QdrantTransport.send`.
        """

    def finish(
        self, version: QdrantVersion, queries: np.ndarray, progress: Progress | None
    ) -> QdrantVersion:
        """Return `version` ready to be searched, once it is written.

        It is calibrated with `queries` [m, d].
        """
        transport = self.transport
        if transport.is_local and version.storage == "vector":
            return version  # exact, however it is searched
        self.wait_for_graph(progress)
        if progress is not None:
            progress("calibrating", 0, 1)
        searches = Searches(transport, self.using, queries)
        version = calibrate(version, transport.count(), searches)
        if progress is not None:
            progress("calibrating", 1, 1)
        return version

    def wait_for_graph(self, progress: Progress | None) -> None:
        """Wait until searches use the graph as before: writes take points out of it."""
        transport = self.transport
        if transport.is_local:
            return
        transport.wait_until(
            self._is_indexed,
            "waiting for the graph",
            "searches are slower until it is whole; run refresh then, which calibrates "
            "them",
            progress,
            transport.count(),
        )

    def _is_indexed(self) -> bool:
        """Return True if the graph is whole, or nearly, or the server is not building
        it.

        The status alone does not tell: a collection may stay yellow for long after
        that, while the server works on other collections.
        """
        before = self.transport.opened
        now = self.transport.describe()
        if now.status != models.CollectionStatus.YELLOW:
            return True
        vectors = len(dense_vectors(now)) / len(dense_vectors(before))
        indexed = (before.indexed_vectors_count or 0) * vectors
        if self.expects_graph():
            indexed = max(indexed, self.transport.count())
        return (now.indexed_vectors_count or 0) >= NEARLY * indexed

    def expects_graph(self) -> bool:
        """Return True if the collection is so large that a server builds a graph."""
        info = self.transport.opened
        threshold = info.config.optimizer_config.indexing_threshold or 0
        kilobytes = 4 * self.dim * self.transport.count() / 1024
        return kilobytes > max(info.segments_count, 1) * threshold > 0

    def delete_keys(
        self, keys: Sequence[str], points: list[Id], shard_key: ShardKey
    ) -> None:
        """Start to delete the payload `keys` of `points`, of this shard key."""
        client, collection = self.transport.client, self.transport.collection

        def request(items: Items) -> None:
            ids: list[PointId] = [point for point, _ in items]
            selector = models.PointIdsList(points=ids, shard_key=shard_key)
            client.delete_payload(collection, list(keys), selector, wait=True)

        for part in chunks(points if keys else (), self.transport.page_size):
            self.transport.send([(point, None) for point in part], request)

    @abstractmethod
    def delete(
        self,
        versions: Sequence[QdrantVersion],
        is_last: bool,
        progress: Progress | None,
    ) -> None:
        """Delete the indexes or vectors of `versions`.

        is_last: True if no other version is left.
        """

    @abstractmethod
    def plan(self, number: int) -> list[str]:
        """Say in lines what version `number` would do; the first says what each point
        would get."""


class PayloadSchema(Schema):
    """A number under our payload key, with a float index on it."""

    writing = 4.0

    def write(self, version: QdrantVersion, items: Items, shard_key: ShardKey) -> None:
        client, collection = self.transport.client, self.transport.collection

        def request(items: Items) -> None:
            operations = [
                set_offsets(key, {version.field: offset}, shard_key)
                for key, offset in items
            ]
            # With wait=True a server waits after every operation, so send all without
            # waiting and flush once. Local mode has nothing to flush.
            client.batch_update_points(
                collection, operations, wait=self.transport.is_local
            )
            if not self.transport.is_local:
                self.transport.flush(shard_key)

        self.transport.send(items, request)

    def require_room(
        self, manifest: QdrantManifest, version: QdrantVersion | None
    ) -> None:
        limit = self.transport.strict.max_payload_index_count
        indexes = _indexes(self.transport.info)
        if limit is None or (version is not None and version.key in indexes):
            return
        # Indexes of retired versions are deleted before a new one is made.
        indexes -= set(m.payload_keys(manifest.give_up().retired))
        if len(indexes) >= limit:
            names = ", ".join(map(repr, sorted(indexes))) or "none"
            raise StoreError(
                f"{self.transport.url}: offsets in payloads need a payload index, of "
                f"which strict mode allows {limit} (max_payload_index_count) and there "
                f"are {len(indexes)}: {names}; delete one, allow one more, or use ",
                Parameter("storage", "vector"),
            )

    def finish(
        self, version: QdrantVersion, queries: np.ndarray, progress: Progress | None
    ) -> QdrantVersion:
        transport = self.transport
        # Somebody may have deleted the index meanwhile.
        if not transport.is_local and self._ask_for_index(version):
            transport.wait_until(
                lambda: version.key in _indexes(transport.describe()),
                "waiting for the index",
                "searches are slower without it, and strict mode may refuse them; look "
                "at the server's log",
                progress,
            )
        return super().finish(version, queries, progress)

    def prepare(self, version: QdrantVersion) -> None:
        """Ask for the index while no point has the key, so that the graph is
        built without links for it."""
        if not self.transport.is_local:  # local mode has no indexes, and warns of it
            self._ask_for_index(version)

    def _ask_for_index(self, version: QdrantVersion) -> bool:
        """Ask for a float index on the offsets, and return True; False if there is one.

        Formulas are faster with an index, and strict mode allows no others.
        """
        transport = self.transport
        client, collection = transport.client, transport.collection
        if version.key in _indexes(transport.describe()):
            return False
        schema: models.PayloadSchemaType | models.FloatIndexParams = (
            models.PayloadSchemaType.FLOAT
        )
        if transport.server >= SMALL_INDEXES:  # nobody filters by it
            schema = models.FloatIndexParams(
                type=models.FloatIndexType.FLOAT, enable_hnsw=False
            )
        create = client.create_payload_index
        transport.retry(create, collection, version.key, schema, wait=False)
        return True

    def delete(
        self,
        versions: Sequence[QdrantVersion],
        is_last: bool,
        progress: Progress | None,
    ) -> None:
        """Delete the indexes of `versions`; all of ours if `is_last`. The numbers in
        the payloads of points stay."""
        transport = self.transport
        written = set(m.payload_keys(versions))

        def indexes() -> set[str]:
            """Return the keys of the indexes that are still to be deleted."""
            ours = rf"{m.KEY}\.v[1-9]\d*"  # also those that no manifest knows
            paths = _indexes(transport.describe())
            return {
                path
                for path in paths
                if path in written or (is_last and re.fullmatch(ours, path))
            }

        if transport.is_local:
            return
        for path in indexes():
            delete = transport.client.delete_payload_index
            transport.retry(delete, transport.collection, path, wait=False)
        transport.wait_until(
            lambda: not indexes(),
            "deleting the index",
            "the index on the offsets is left",
            progress,
        )

    def cost(self) -> str:
        points = self.transport.count()
        memory, disk = _bytes(INDEX_BYTES * points), _bytes(PAYLOAD_BYTES * points)
        return f"about {memory} of memory, and {disk} of disk"

    def plan(self, number: int) -> list[str]:
        key = f"'v{number}' under the payload key {m.KEY!r}"
        return [f"a number {key}, with a float index"]


class VectorSchema(Schema):
    """An augmented vector of d + 1 dimensions, with the settings of the vector."""

    writing = 1.3

    @property
    def _is_short(self) -> bool:
        """True if the second vector has numbers of 16 bits, as it also has beside
        smaller numbers: those would hold no offset."""
        return self.parameters.datatype not in (None, models.Datatype.FLOAT32)

    def obstacle(self) -> str | None:
        """Say why no vector can be added; None if one can."""
        server = ".".join(map(str, self.transport.server))
        if self.transport.server < VECTORS_IN_PLACE:
            return (
                f"the server (this one is {server}) can add vectors to a collection "
                "from 1.18 on"
            )
        if self.transport.is_local and not self.using:
            return (
                "a collection of qdrant-client's local mode takes no unnamed vectors "
                "beside a named one"
            )
        return None

    def objection(self) -> str | None:
        """Say why a second vector is not added unless somebody asks for it."""
        if obstacle := self.obstacle():
            return obstacle
        if not self.using:
            return (
                "a second vector beside an unnamed one leaves a trace, so it is added "
                "on request only"
            )
        config = self.transport.opened.config
        if self.parameters.quantization_config or config.quantization_config:
            return (
                "the collection is quantised to save memory, and a second vector has "
                "no codes"
            )
        if self.parameters.datatype not in FLOATS:
            return (
                f"the vector is of {self.parameters.datatype.value}, and a second one "
                "would be of float16"
            )
        return None

    def cost(self) -> str:
        hnsw = self.parameters.hnsw_config
        links = self.transport.opened.config.hnsw_config.m
        if hnsw is not None and hnsw.m:
            links = hnsw.m
        bytes_a_number = 2 if self._is_short else 4
        each = bytes_a_number * (self.dim + 1) + 2 * links * 4
        where = "disk" if self.parameters.on_disk else "memory, and as much of disk"
        return f"about {_bytes(each * self.transport.count())} of {where}"

    def prepare(self, version: QdrantVersion) -> None:
        transport = self.transport
        client, collection = transport.client, transport.collection
        name = version.augmented_vector
        is_distance = version.metric is Metric.EUCLIDEAN
        dense = models.DenseVectorConfig(
            size=version.dim + 1,
            distance=models.Distance.EUCLID if is_distance else models.Distance.DOT,
            datatype=models.VectorStorageDatatype.FLOAT16 if self._is_short else None,
        )
        if name not in vector_names(transport.describe()):
            config = models.DenseVectorNameConfig(dense=dense)
            create = client.create_vector_name
            transport.retry(create, collection, name, config, wait=True)
            transport.wait_until(
                lambda: name in vector_names(transport.describe()),
                "adding a vector",
                "writes to it may fail",
            )
        # No quantisation: it would clip the query's last component to the range of the
        # others.
        settings = self.parameters.model_dump(
            include={"hnsw_config", "on_disk", "memory"}, exclude_none=True
        )
        if settings:
            changes = {name: models.VectorParamsDiff.model_validate(settings)}
            update = client.update_collection
            transport.retry(update, collection, vectors_config=changes)

    def write(self, version: QdrantVersion, items: Items, shard_key: ShardKey) -> None:
        client, collection = self.transport.client, self.transport.collection
        name = version.augmented_vector

        def request(items: Items) -> None:
            points = [
                models.PointVectors.model_construct(id=key, vector={name: vector})
                for key, vector in items
            ]
            client.update_vectors(
                collection, points, wait=True, shard_key_selector=shard_key
            )

        for part in chunks(items, VECTORS_AT_ONCE):
            self.transport.send(part, request)

    def delete(
        self,
        versions: Sequence[QdrantVersion],
        is_last: bool,
        progress: Progress | None,
    ) -> None:
        transport = self.transport
        names = set(m.vectors_of(versions))
        if names:
            names &= vector_names(transport.describe())
        for name in names:
            delete = transport.client.delete_vector_name
            transport.retry(delete, transport.collection, name, wait=True)

    def plan(self, number: int) -> list[str]:
        beside = repr(self.using) if self.using else "the unnamed one"
        lines = [
            f"a vector 'hub_v{number}' of {self.dim + 1} dimensions beside {beside}"
        ]
        if not self.using:
            lines.append(
                'after a removal get_collection would show {"": VectorParams(...)} for '
                "VectorParams(...)"
            )
        return lines


def choose_storage(
    vector: VectorSchema, storage: Storage | Literal["auto"], manifest: QdrantManifest
) -> tuple[Storage, list[str]]:
    """Return where offsets go, and a line that says why, if the user has not said it.

    Args:
        vector: The vector that is corrected.
        storage: The storage that the user asks for; "auto" chooses.
        manifest: The manifest of the collection.

    Raises:
        StoreError: The collection cannot keep them there.
        InputError: `storage` is unknown.
    """
    if storage not in ("auto", "payload", "vector"):
        raise InputError(f"storage={storage!r}: use 'auto', 'payload' or 'vector'")
    if storage == "vector" and (obstacle := vector.obstacle()):
        raise StoreError(
            f"{vector.transport.url}: ",
            Parameter("storage", "vector"),
            f" adds a second vector, and {obstacle}; use ",
            Parameter("storage", "payload"),
        )
    if storage != "auto":
        return storage, []
    version, _ = manifest.find_current(vector.using)
    if version is not None:
        return version.storage, []
    if reason := vector.objection():
        return "payload", [f"storage='payload': {reason}"]
    return "vector", [
        "storage='vector': a search by a second vector is as fast as a raw one, and "
        "the server adds it in place"
    ]


def _bytes(count: float) -> str:
    """Return a number of bytes for people, such as "1.2 GB"."""
    thousands = min(max(int(math.log10(count or 1)) // 3, 0), 4)
    unit = ("bytes", "kB", "MB", "GB", "TB")[thousands]
    return f"{count / 1000**thousands:.3g} {unit}"


def _indexes(info: models.CollectionInfo) -> set[str]:
    """Return the payload keys that have an index."""
    return set(info.payload_schema)


def dense_vectors(info: models.CollectionInfo) -> dict[str, models.VectorParams]:
    """Return the dense vectors of a collection by name; "" is the unnamed one."""
    vectors = info.config.params.vectors or {}
    if isinstance(vectors, models.VectorParams):
        return {"": vectors}
    return vectors


def vector_names(info: models.CollectionInfo) -> set[str]:
    """Return the names of the vectors of a collection, dense and sparse."""
    return {*dense_vectors(info), *(info.config.params.sparse_vectors or {})}


def find_vector(
    url: str, info: models.CollectionInfo, using: str, manifest: QdrantManifest
) -> tuple[str, models.VectorParams]:
    """Return the vector that is corrected, and its parameters.

    If the user has deleted the vector but its correction is left, the parameters are
    those of the correction, so that it can be removed.

    Args:
        url: The URL of the store, for errors.
        info: The description of the collection.
        using: The name of the vector; "" stands for the only vector that is not ours.
        manifest: The manifest of the collection.

    Raises:
        StoreError: The vector is not there or cannot carry offsets.
    """
    every = dense_vectors(info)
    ours = m.vectors_of(manifest.everything)
    dense = {name: vector for name, vector in every.items() if name not in ours}
    for version in manifest.everything:
        is_wanted = version.vector == using if using else not dense
        if is_wanted and version.vector not in every:
            return version.vector, models.VectorParams(
                size=version.dim, distance=DISTANCES[version.metric]
            )
    there = f"dense vectors there: {', '.join(map(repr, dense)) or 'none'}"
    if using in (info.config.params.sparse_vectors or {}) or not dense:
        raise StoreError(f"{url}: sparse vectors have no offsets; {there}")
    if using and using not in dense:
        raise StoreError(f"{url}: there is no vector {using!r}; {there}")
    if using not in dense:
        if len(dense) > 1:
            which = Parameter("vector")
            raise StoreError(
                f"{url}: name one of its vectors with ", which, f"; {there}"
            )
        using = next(iter(dense))
    vector = dense[using]
    name = f"vector {using!r}" if using else "the vector"
    if vector.multivector_config is not None:
        raise StoreError(
            f"{url}: {name} is a multi-vector, whose MaxSim has no single offset; use "
            "a dense vector"
        )
    if vector.datatype == models.Datatype.UINT8:
        raise StoreError(
            f"{url}: {name} is of uint8, which no query bank of floats compares with; "
            "use float16 or float32"
        )
    if vector.distance not in METRICS:
        distances = ", ".join(distance.value for distance in METRICS)
        raise StoreError(
            f"{url}: {name} ranks by {vector.distance.value}; offsets are for "
            f"{distances}: re-create it as one"
        )
    return using, vector
