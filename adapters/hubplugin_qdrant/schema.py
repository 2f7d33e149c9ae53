"""What a collection gets so that it can keep offsets: a payload index, or an augmented vector; and which of its vectors
can have them."""

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
from hubplugin_qdrant.plain_client import ShardKey
from hubplugin_qdrant.transport import Items, QdrantTransport, by_shard, plain_id

VECTORS_IN_PLACE = (1, 18)
"""The first version of the server that adds a named vector to a collection."""

SMALL_INDEXES = (1, 17)
"""The first version of the server whose float index can do without links in the graph."""

INDEX_BYTES, PAYLOAD_BYTES = 32, 64
"""What a number in a payload takes per point, estimated: value and point id both ways in the index, and its JSON on
disk."""

METRICS = {
    models.Distance.COSINE: Metric.COSINE,
    models.Distance.DOT: Metric.DOT,
    models.Distance.EUCLID: Metric.EUCLIDEAN,
}

BITS = {"float16": 16, "uint8": 8, "turbo4": 4, "turbo8": 8, "turbo16": 16}
"""Of a number of a vector, by its datatype; all others have 32. qdrant-client 1.18 does not know all of them."""

Storage: TypeAlias = Literal["payload", "vector"]


class Schema(ABC):
    """How the collection behind `transport` keeps the offsets of its vector `using` ("" is the unnamed one).

    parameters: those of the vector.
    """

    def __init__(
        self, transport: QdrantTransport, using: str, parameters: models.VectorParams
    ):
        self.transport, self.using, self.parameters = transport, using, parameters
        self.metric, self.dim = METRICS[parameters.distance], parameters.size

    def require_room(  # noqa: B027
        self, manifest: QdrantManifest, version: QdrantVersion | None
    ) -> None:
        """Raises StoreError where strict mode leaves no room for `version`, or for a new one, beside those of
        `manifest`."""

    def hidden(self, version: QdrantVersion) -> str | None:
        """What keeps searches from the offsets of `version` that the points have, and what to do; None if nothing."""
        return None

    @abstractmethod
    def cost(self) -> str:
        """What the offsets of all points take of memory and disk, in words."""

    @abstractmethod
    def prepare(self, version: QdrantVersion) -> None:
        """Makes room for `version` before anything is written."""

    @abstractmethod
    def write(self, version: QdrantVersion, items: Items, shard_key: ShardKey) -> None:
        """Gives each point of `items` its value for `version`, one of `offsets.values_of`, in the way of
        `QdrantTransport.send`; all points have this `shard_key`."""

    def finish(
        self, version: QdrantVersion, queries: np.ndarray, progress: Progress | None
    ) -> QdrantVersion:
        """`version` ready to be searched, once it is written. It is calibrated with `queries` [m, d], and `progress` is
        told."""
        transport = self.transport
        slower = "searches are calibrated to the index as it is now; run refresh when it is whole"
        transport.wait_until(
            self._is_optimised,
            "waiting for the graph",
            slower,
            progress,
            transport.count(),
        )
        if (
            transport.is_local and version.storage == "vector"
        ):  # exact, however it is searched
            return version
        if progress is not None:
            progress("calibrating", 0, 1)
        version = calibrate(
            version, transport.count(), Searches(transport, self.using, queries)
        )
        if progress is not None:
            progress("calibrating", 1, 1)
        return version

    def _is_optimised(self) -> bool:
        """Whether searches use the graph again, which a server builds anew after so many writes."""
        return self.transport.describe().status != models.CollectionStatus.YELLOW

    def delete_keys(
        self, keys: Sequence[str], points: list[Id], shard_key: ShardKey
    ) -> None:
        """Deletes the payload `keys` of `points`, which have this `shard_key`. Returns before it is done, as `write`
        does."""
        client, collection = self.transport.client, self.transport.collection

        def request(items: Items) -> None:
            selector = models.PointIdsList(
                points=[point for point, _ in items], shard_key=shard_key
            )
            client.delete_payload(collection, list(keys), selector, wait=True)

        if keys:
            self.transport.send([(point, None) for point in points], request)

    @abstractmethod
    def delete(
        self,
        versions: Sequence[QdrantVersion],
        is_last: bool,
        progress: Progress | None,
    ) -> None:
        """Deletes from the points what `versions` have written, the last of all if `is_last`, and tells `progress`."""

    @abstractmethod
    def plan(self, number: int, key: str) -> list[str]:
        """What version `number`, with the payload `key`, would do; the first line is what each point would get."""


class PayloadSchema(Schema):
    """A number under our payload key, with a float index on it."""

    def write(self, version: QdrantVersion, items: Items, shard_key: ShardKey) -> None:
        client, collection = self.transport.client, self.transport.collection

        def request(items: Items) -> None:
            operations = [
                set_offsets(key, {version.field: x}, version.offset_key, shard_key)
                for key, x in items
            ]
            client.batch_update_points(collection, operations, wait=True)

        self.transport.send(items, request)

    def require_room(
        self, manifest: QdrantManifest, version: QdrantVersion | None
    ) -> None:
        limit, indexes = (
            self.transport.strict.max_payload_index_count,
            set(self._indexes()),
        )
        if limit is None or (version is not None and version.key in indexes):
            return
        indexes -= set(
            m.payload_keys(manifest.give_up().retired)
        )  # which are deleted before a new one is made
        if len(indexes) >= limit:
            raise StoreError(
                f"{self.transport.url}: offsets in payloads need a payload index, of which strict mode allows {limit} "
                f"(max_payload_index_count) and there are {len(indexes)}: "
                f"{', '.join(map(repr, sorted(indexes))) or 'none'}; delete one, allow one more, or use ",
                Parameter("storage", "vector"),
            )

    def hidden(self, version: QdrantVersion) -> str | None:
        kind = self._indexes().get(version.key)
        if kind in (
            None,
            models.PayloadSchemaType.FLOAT,
            models.PayloadSchemaType.TEXT,
        ):  # a formula reads no texts
            return None
        return (
            f"the payload index on {version.key!r} is of the type {kind.value!r}, which hides offsets from searches: "
            "they are raw; run refresh, which makes it one of floats"
        )

    def finish(
        self, version: QdrantVersion, queries: np.ndarray, progress: Progress | None
    ) -> QdrantVersion:
        if self._ask_for_index(version):  # somebody may have deleted it meanwhile
            slower = "searches are slower without it, and strict mode may refuse them; look at the server's log"
            self.transport.wait_until(
                lambda: version.key in self._indexes(),
                "waiting for the index",
                slower,
                progress,
            )
        return super().finish(version, queries, progress)

    def prepare(self, version: QdrantVersion) -> None:
        """Asks for the index while no point has the key, so that it is not built when the graph is."""
        self._ask_for_index(version)

    def _ask_for_index(self, version: QdrantVersion) -> bool:
        """Asks for a float index on the offsets: faster formulas, and under strict mode the only ones allowed. One of
        another type goes: a formula finds no offset by it. Whether there is one to wait for."""
        client, collection, retry = (
            self.transport.client,
            self.transport.collection,
            self.transport.retry,
        )
        kind = self._indexes().get(version.key)
        if (
            self.transport.is_local or kind == models.PayloadSchemaType.FLOAT
        ):  # local mode has none, and warns of it
            return False
        if kind is not None:
            retry(client.delete_payload_index, collection, version.key, wait=True)
        schema: models.PayloadSchemaType | models.FloatIndexParams = (
            models.PayloadSchemaType.FLOAT
        )
        if self.transport.server >= SMALL_INDEXES:  # nobody filters by it
            schema = models.FloatIndexParams(
                type=models.FloatIndexType.FLOAT, enable_hnsw=False
            )
        retry(client.create_payload_index, collection, version.key, schema, wait=False)
        return True

    def _indexes(self) -> dict[str, models.PayloadSchemaType]:
        """The payload keys that have an index now, and of which type."""
        return {
            key: index.data_type
            for key, index in self.transport.describe().payload_schema.items()
        }

    def delete(
        self,
        versions: Sequence[QdrantVersion],
        is_last: bool,
        progress: Progress | None,
    ) -> None:
        versions = [version for version in versions if version.storage == "payload"]
        written = set(m.payload_keys(versions))
        if not written and not is_last:
            return
        transport, key = self.transport, versions[0].offset_key if versions else m.KEY

        def indexes() -> set[str]:
            ours = (
                rf"{key}\.v[1-9]\d*"  # that of a version which no manifest knows, too
            )
            return {
                path
                for path in self._indexes()
                if path in written or (is_last and re.fullmatch(ours, path))
            }

        for path in indexes():
            transport.retry(
                transport.client.delete_payload_index,
                transport.collection,
                path,
                wait=False,
            )
        otherwise = "the index on the offsets is left"
        transport.wait_until(
            lambda: not indexes(), "deleting the index", otherwise, progress
        )
        done, total = 0, transport.count()
        # Of no version, too, may be left what a client brought along that took the collection for another.
        for shards in transport.pages(
            by_shard, with_payload=[key] if is_last else False
        ):
            for shard_key, records in shards.items():
                points: dict[tuple[str, ...], list[Id]] = {}
                for record in records:
                    keys = (
                        m.keys_to_delete(record.payload, key, versions)
                        if is_last
                        else tuple(sorted(written))
                    )
                    points.setdefault(keys, []).append(plain_id(record.id))
                for keys, ids in points.items():
                    self.delete_keys(keys, ids, shard_key)
                done += len(records)
            if progress is not None:
                progress("removing offsets", min(done, total), total)
        transport.wait()

    def cost(self) -> str:
        points = self.transport.count()
        return f"about {_bytes(INDEX_BYTES * points)} of memory, and {_bytes(PAYLOAD_BYTES * points)} of disk"

    def plan(self, number: int, key: str) -> list[str]:
        return [
            f"a number 'v{number}' under the payload key {key!r}, with a float index"
        ]


class VectorSchema(Schema):
    """An augmented vector of d + 1 dimensions beside the vector, with the memory and graph settings of that."""

    def __init__(
        self, transport: QdrantTransport, using: str, parameters: models.VectorParams
    ):
        super().__init__(transport, using, parameters)
        datatype = parameters.datatype
        bits = 32 if datatype is None else BITS.get(datatype.value, 32)
        self._is_short, self._bytes = bits <= 16, parameters.size * bits / 8
        # 16 bits each beside smaller ones, too, since a coarser type would leave nothing of the offset.
        self._augmented_bytes = (parameters.size + 1) * (2 if self._is_short else 4)

    def obstacle(self) -> str | None:
        """Why no vector can be added; None if one can."""
        server = ".".join(map(str, self.transport.server))
        if self.transport.server < VECTORS_IN_PLACE:
            return f"the server (this one is {server}) can add vectors to a collection from 1.18 on"
        if self.transport.is_local and not self.using:
            return "a collection of qdrant-client's local mode takes no unnamed vectors beside a named one"
        return None

    def doubt(self) -> str | None:
        """Why a second vector should not be added if nobody asks for it; None if nothing speaks against it."""
        if obstacle := self.obstacle():
            return obstacle
        if not self.using:
            return "a second vector beside an unnamed one leaves a trace, so it is added on request only"
        if (
            self.parameters.quantization_config
            or self.transport.info.config.quantization_config
        ):
            return f"the collection is quantised to save memory, and a second vector has no codes; {self.sizes()}"
        if self._augmented_bytes > 2 * self._bytes:
            return f"a second vector would take more than twice the room of the first; {self.sizes()}"
        return None

    def sizes(self) -> str:
        """What the numbers of a second vector take beside those of the first, in words."""
        points = self.transport.count()
        first, second = (
            _bytes(self._bytes * points),
            _bytes(self._augmented_bytes * points),
        )
        return (
            f"the numbers of the vectors take {first}, those of a second one {second}"
        )

    def cost(self) -> str:
        hnsw = self.parameters.hnsw_config
        m_links = (
            hnsw.m if hnsw is not None else None
        ) or self.transport.info.config.hnsw_config.m
        where = "disk" if self.parameters.on_disk else "memory, and as much of disk"
        return f"about {_bytes((self._augmented_bytes + 2 * m_links * 4) * self.transport.count())} of {where}"

    def prepare(self, version: QdrantVersion) -> None:
        transport, name = self.transport, version.augmented_vector
        dense = models.DenseVectorConfig(
            size=version.dim + 1,
            distance=models.Distance.EUCLID
            if version.metric is Metric.EUCLIDEAN
            else models.Distance.DOT,
            datatype=models.VectorStorageDatatype.FLOAT16 if self._is_short else None,
        )
        if name not in vector_names(transport.describe()):
            config = models.DenseVectorNameConfig(dense=dense)
            transport.retry(
                transport.client.create_vector_name,
                transport.collection,
                name,
                config,
                wait=True,
            )
            transport.wait_until(
                lambda: name in vector_names(transport.describe()),
                "adding a vector",
                "writes to it may fail",
            )
        # No quantisation: it would clip the query's last component to the range of the others.
        settings = self.parameters.model_dump(
            include={"hnsw_config", "on_disk", "memory"}, exclude_none=True
        )
        if settings:
            changes = {name: models.VectorParamsDiff.model_validate(settings)}
            transport.retry(
                transport.client.update_collection,
                transport.collection,
                vectors_config=changes,
            )

    def write(self, version: QdrantVersion, items: Items, shard_key: ShardKey) -> None:
        client, collection, name = (
            self.transport.client,
            self.transport.collection,
            version.augmented_vector,
        )

        def request(items: Items) -> None:
            points = [
                models.PointVectors.model_construct(id=key, vector={name: vector})
                for key, vector in items
            ]
            client.update_vectors(
                collection, points, wait=True, shard_key_selector=shard_key
            )

        self.transport.send(items, request)

    def delete(
        self,
        versions: Sequence[QdrantVersion],
        is_last: bool,
        progress: Progress | None,
    ) -> None:
        transport, names = self.transport, set(m.vectors_of(versions))
        for name in names & vector_names(transport.describe()) if names else ():
            transport.retry(
                transport.client.delete_vector_name,
                transport.collection,
                name,
                wait=True,
            )

    def plan(self, number: int, key: str) -> list[str]:
        beside = repr(self.using) if self.using else "the unnamed one"
        lines = [
            f"a vector 'hub_v{number}' of {self.parameters.size + 1} dimensions beside {beside}"
        ]
        if not self.using:
            lines.append(
                'after a removal get_collection would show {"": VectorParams(...)} for VectorParams(...)'
            )
        return lines


def choose_storage(
    vector: VectorSchema, storage: Storage | Literal["auto"], manifest: QdrantManifest
) -> tuple[Storage, list[str]]:
    """Chooses where offsets go.

    Args:
        vector: the vector that is corrected.
        storage: what the user asks for.
        manifest: that of the collection.

    Returns:
        The storage, and why, in a line, if nobody has said it.

    Raises:
        StoreError: the collection cannot keep them there.
        InputError: `storage` is unknown.
    """
    if storage not in ("auto", "payload", "vector"):
        raise InputError(f"storage={storage!r}: use 'auto', 'payload' or 'vector'")
    if storage == "vector" and (obstacle := vector.obstacle()):
        this, other = Parameter("storage", "vector"), Parameter("storage", "payload")
        raise StoreError(
            f"{vector.transport.url}: ",
            this,
            f" adds a second vector, and {obstacle}; use ",
            other,
        )
    if storage != "auto":
        return storage, []
    version, _ = manifest.find_current(vector.using)
    if version is not None:
        return version.storage, []
    if doubt := vector.doubt():
        return "payload", [f"storage='payload': {doubt}"]
    merit = "a search by a second vector is as fast as a raw one, and the server adds it in place"
    return "vector", [f"storage='vector': {merit}; {vector.sizes()}"]


def _bytes(count: float) -> str:
    """A number of bytes for people."""
    thousands = min(max(int(math.log10(count or 1)) // 3, 0), 4)
    return (
        f"{count / 1000**thousands:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[thousands]}"
    )


def dense_vectors(info: models.CollectionInfo) -> dict[str, models.VectorParams]:
    """The dense vectors of a collection by name; "" is the unnamed one."""
    vectors = info.config.params.vectors or {}
    return {"": vectors} if isinstance(vectors, models.VectorParams) else vectors


def vector_names(info: models.CollectionInfo) -> set[str]:
    """The names of the vectors of a collection, dense and sparse."""
    return {*dense_vectors(info), *(info.config.params.sparse_vectors or {})}


def find_vector(
    url: str, info: models.CollectionInfo, using: str, manifest: QdrantManifest
) -> tuple[str, models.VectorParams]:
    """Finds the vector that is corrected. For a vector that was deleted and whose correction is left, it is what it
    was, so that the correction can be removed.

    Args:
        url: of the store, for errors.
        info: of the collection.
        using: the name of the vector; "" is the only one that hubplugin has not added.
        manifest: that of the collection.

    Returns:
        Its name and its parameters.

    Raises:
        StoreError: the vector is not there or cannot carry offsets.
    """
    ours = m.vectors_of(manifest.everything)
    dense = {
        name: parameters
        for name, parameters in dense_vectors(info).items()
        if name not in ours
    }
    for version in manifest.everything:
        is_it = version.vector == using if using else not dense
        if is_it and version.vector not in dense_vectors(info):
            distance = next(
                distance
                for distance, metric in METRICS.items()
                if metric is version.metric
            )
            return version.vector, models.VectorParams(
                size=version.dim, distance=distance
            )
    names = ", ".join(repr(name) for name in dense) or "none"
    if using in (info.config.params.sparse_vectors or {}) or not dense:
        raise StoreError(
            f"{url}: sparse vectors have no offsets; dense vectors there: {names}"
        )
    if using not in dense:
        if using:
            raise StoreError(
                f"{url}: there is no vector {using!r}; dense vectors there: {names}"
            )
        if len(dense) > 1:
            which = Parameter("vector")
            raise StoreError(
                f"{url}: name one of its vectors with ",
                which,
                f"; dense vectors there: {names}",
            )
        using = next(iter(dense))
    vector = dense[using]
    name = f"vector {using!r}" if using else "the vector"
    if vector.multivector_config is not None:
        raise StoreError(
            f"{url}: {name} is a multi-vector, whose MaxSim has no single offset; use a dense vector"
        )
    if vector.datatype == models.Datatype.UINT8:
        raise StoreError(
            f"{url}: {name} is of uint8, which no query bank of floats compares with; use float16 or float32"
        )
    if vector.distance not in METRICS:
        distances = ", ".join(distance.value for distance in METRICS)
        raise StoreError(
            f"{url}: {name} ranks by {vector.distance.value}; offsets are for {distances}: re-create it as one"
        )
    return using, vector
