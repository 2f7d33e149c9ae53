"""What a collection gets so that it can keep offsets: a payload index, or an augmented vector; and which of its vectors
can have them."""

from __future__ import annotations

import math
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
from hubplugin_qdrant.calibration import Searches, calibrated
from hubplugin_qdrant.manifest import Manifest, Version
from hubplugin_qdrant.offsets import set_offsets
from hubplugin_qdrant.plain_client import ShardKey
from hubplugin_qdrant.transport import Items, Transport, by_shard, plain_id

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

    def __init__(self, transport: Transport, using: str, parameters: models.VectorParams):
        self.transport, self.using, self.parameters = transport, using, parameters
        self.metric, self.dim = METRICS[parameters.distance], parameters.size

    def require_room(self, manifest: Manifest, version: Version | None) -> None:  # noqa: B027
        """Raises StoreError where strict mode leaves no room for `version`, or for a new one; asked before anything is
        written."""

    def hidden(self, version: Version) -> str | None:
        """What keeps searches from the offsets of `version` that the points have, and what to do; None if nothing."""
        return None

    @abstractmethod
    def cost(self) -> str:
        """What the offsets of all points take of memory and disk, in words."""

    def prepare(self, version: Version) -> None:  # noqa: B027
        """Makes room for `version` before anything is written."""

    @abstractmethod
    def write(self, version: Version, items: Items, shard_key: ShardKey) -> None:
        """Gives each point of `items` its value, as `offsets.Storage` makes it. Returns before it is written; what goes
        wrong is raised by a later call."""

    def finish(self, version: Version, queries: np.ndarray, progress: Progress | None) -> Version:
        """`version` ready to be searched, once it is written. queries: queries [m, d] that it is calibrated with."""
        transport = self.transport
        slower = "searches are calibrated to the index as it is now; run refresh when it is whole"
        transport.until(self._is_optimised, "waiting for the graph", slower, progress, transport.count())
        if transport.is_local and version.storage == "vector":  # exact, however it is searched
            return version
        if progress is not None:
            progress("calibrating", 0, 1)
        found = calibrated(version, transport.count(), Searches(transport, self.using, queries))
        if progress is not None:
            progress("calibrating", 1, 1)
        return found

    def _is_optimised(self) -> bool:
        """Whether searches use the graph again, which a server builds anew after so many writes."""
        return self.transport.described().status != models.CollectionStatus.YELLOW

    def delete_keys(self, keys: Sequence[str], points: list[Id], shard_key: ShardKey) -> None:
        """Deletes the payload `keys` of `points`. Returns before it is done, as `write` does."""

        def request(items: Items) -> None:
            selector = models.PointIdsList(points=[point for point, _ in items], shard_key=shard_key)
            self.transport.client.delete_payload(self.transport.collection, list(keys), selector, wait=True)

        if keys:
            self.transport.send([(point, None) for point in points], request)

    @abstractmethod
    def delete(self, versions: Sequence[Version], last: bool, progress: Progress | None) -> None:
        """Deletes from the points what `versions` have written; see `QdrantStore.delete`."""

    @abstractmethod
    def plan(self, number: int, key: str) -> list[str]:
        """What version `number` would do to the collection, a line each; the first is what each point would get. key:
        the payload key of offsets."""


class PayloadSchema(Schema):
    """A number under our payload key, with a float index on it."""

    def write(self, version: Version, items: Items, shard_key: ShardKey) -> None:
        def request(items: Items) -> None:
            operations: list[models.UpdateOperation] = [
                set_offsets(k, {version.field: v}, version.offset_key, shard_key) for k, v in items
            ]
            self.transport.client.batch_update_points(self.transport.collection, operations, wait=True)

        self.transport.send(items, request)

    def prepare(self, version: Version) -> None:
        """Asks for the index while no point has the key, so that it is built as they come, and not over all of them
        while the graph is built."""
        self._ask_for_index(version)

    def require_room(self, manifest: Manifest, version: Version | None) -> None:
        limit, there = self.transport.strict.max_payload_index_count, set(self._indexes())
        if limit is None or (version is not None and version.key in there):
            return
        given_up = [*manifest.retired, *([manifest.writing] if manifest.writing else [])]
        there -= set(m.payload_keys(given_up))  # which are deleted before a new one is made
        if len(there) >= limit:
            listed = ", ".join(map(repr, sorted(there))) or "none"
            raise StoreError(
                f"{self.transport.url}: offsets in payloads need a payload index, of which strict mode allows {limit} "
                f"(max_payload_index_count) and there are {len(there)}: {listed}; delete one, allow one more, or use ",
                Parameter("storage", "vector"),
            )

    def hidden(self, version: Version) -> str | None:
        kind = self._indexes().get(version.key)
        if kind in (None, models.PayloadSchemaType.FLOAT, models.PayloadSchemaType.TEXT):  # a formula reads no texts
            return None
        return (
            f"the payload index on {version.key!r} is of the type {kind.value!r}, which hides offsets from searches: "
            "they are raw; run refresh, which makes it one of floats"
        )

    def finish(self, version: Version, queries: np.ndarray, progress: Progress | None) -> Version:
        if self._ask_for_index(version):  # somebody may have deleted it meanwhile
            slower = "searches are slower without it, and strict mode may refuse them; look at the server's log"
            self.transport.until(lambda: version.key in self._indexes(), "waiting for the index", slower, progress)
        return super().finish(version, queries, progress)

    def _ask_for_index(self, version: Version) -> bool:
        """Asks for a float index on the offsets: faster formulas, and under strict mode the only ones allowed. One of
        another type goes: a formula finds no offset by it. Whether there is one to wait for."""
        client, collection = self.transport.client, self.transport.collection
        kind = self._indexes().get(version.key)
        if self.transport.is_local or kind == models.PayloadSchemaType.FLOAT:  # local mode has none, and warns of it
            return False
        if kind is not None:
            self.transport.retry(client.delete_payload_index, collection, version.key, wait=True)
        schema: models.PayloadSchemaType | models.FloatIndexParams = models.PayloadSchemaType.FLOAT
        if self.transport.server >= SMALL_INDEXES:  # nobody filters by it
            schema = models.FloatIndexParams(type=models.FloatIndexType.FLOAT, enable_hnsw=False)
        self.transport.retry(client.create_payload_index, collection, version.key, schema, wait=False)
        return True

    def _indexes(self) -> dict[str, models.PayloadSchemaType]:
        """The payload keys that have an index now, and of which type."""
        return {key: index.data_type for key, index in self.transport.described().payload_schema.items()}

    def delete(self, versions: Sequence[Version], last: bool, progress: Progress | None) -> None:
        versions = [version for version in versions if version.storage == "payload"]
        written = set(m.payload_keys(versions))
        if not written and not last:
            return
        transport, key = self.transport, versions[0].offset_key if versions else m.KEY

        def indexed() -> set[str]:
            return {path for path in self._indexes() if path in written or (last and m.holds_offsets(path, key))}

        for path in indexed():
            transport.retry(transport.client.delete_payload_index, transport.collection, path, wait=False)
        left = "the index on the offsets is left"
        transport.until(lambda: not indexed(), "deleting the index", left, progress)
        done, total = 0, transport.count()
        # Of no version, too, may be left what a client brought along that took the collection for another.
        for shards in transport.pages(by_shard, with_payload=[key] if last else False):
            for shard_key, records in shards.items():
                points: dict[tuple[str, ...], list[Id]] = {}
                for record in records:
                    keys = m.to_delete(record.payload, key, versions) if last else tuple(sorted(written))
                    points.setdefault(keys, []).append(plain_id(record.id))
                for keys, some in points.items():
                    self.delete_keys(keys, some, shard_key)
                done += len(records)
            if progress is not None:
                progress("removing offsets", min(done, total), total)
        transport.settle()

    def cost(self) -> str:
        points = self.transport.count()
        return f"about {_bytes(INDEX_BYTES * points)} of memory, and {_bytes(PAYLOAD_BYTES * points)} of disk"

    def plan(self, number: int, key: str) -> list[str]:
        return [f"a number 'v{number}' under the payload key {key!r}, with a float index"]


class VectorSchema(Schema):
    """An augmented vector of d + 1 dimensions beside the vector, with the memory and graph settings of that."""

    def require(self) -> None:
        why = self._obstacle()
        if why is not None:
            raise StoreError(
                f"{self.transport.url}: ",
                Parameter("storage", "vector"),
                f" adds a second vector, and {why}; use ",
                Parameter("storage", "payload"),
            )

    def _obstacle(self) -> str | None:
        """Why no vector can be added; None if one can."""
        found = ".".join(map(str, self.transport.server))
        if self.transport.server < VECTORS_IN_PLACE:
            return f"the server (this one is {found}) can add vectors to a collection from 1.18 on"
        if self.transport.is_local and not self.using:
            return "a collection of qdrant-client's local mode takes no unnamed vectors beside a named one"
        return None

    def doubt(self) -> str | None:
        """Why a second vector should not be added if nobody asks for it; None if nothing speaks against it."""
        if obstacle := self._obstacle():
            return obstacle
        if not self.using:
            return "a second vector beside an unnamed one leaves a trace, so it is added on request only"
        if self.parameters.quantization_config or self.transport.info.config.quantization_config:
            return f"the collection is quantised to save memory, and a second vector has no codes; {self.compared()}"
        if self._numbers > 2 * self.parameters.size * self._bits / 8:
            return f"a second vector would take more than twice the room of the first; {self.compared()}"
        return None

    def compared(self) -> str:
        """What the numbers of a second vector take beside those of the first, in words."""
        points = self.transport.count()
        first, second = (_bytes(each * points) for each in (self.parameters.size * self._bits / 8, self._numbers))
        return f"the numbers of the vectors take {first}, those of a second one {second}"

    @property
    def _bits(self) -> int:
        """Of each number of the vector."""
        datatype = self.parameters.datatype
        return 32 if datatype is None else BITS.get(datatype.value, 32)

    @property
    def _numbers(self) -> int:
        """What the numbers of one augmented vector take, in bytes: of 16 bits each beside smaller ones, too, since a
        coarser type would leave nothing of the offset."""
        return (self.parameters.size + 1) * (4 if self._bits > 16 else 2)

    def cost(self) -> str:
        hnsw = self.parameters.hnsw_config
        m_links = (hnsw.m if hnsw is not None else None) or self.transport.info.config.hnsw_config.m
        where = "disk" if self.parameters.on_disk else "memory, and as much of disk"
        return f"about {_bytes((self._numbers + 2 * m_links * 4) * self.transport.count())} of {where}"

    def prepare(self, version: Version) -> None:
        transport, name = self.transport, version.augmented_vector
        dense = models.DenseVectorConfig(
            size=version.dim + 1,
            distance=models.Distance.EUCLID if version.metric is Metric.EUCLIDEAN else models.Distance.DOT,
            datatype=models.VectorStorageDatatype.FLOAT16 if self._bits <= 16 else None,
        )
        if name not in self._names():
            config = models.DenseVectorNameConfig(dense=dense)
            transport.retry(transport.client.create_vector_name, transport.collection, name, config, wait=True)
            transport.until(lambda: name in self._names(), "adding a vector", "writes to it may fail")
        # No quantisation: it would clip the query's last component to the range of the others.
        settings = self.parameters.model_dump(include={"hnsw_config", "on_disk", "memory"}, exclude_none=True)
        if settings:
            changes = {name: models.VectorParamsDiff.model_validate(settings)}
            transport.retry(transport.client.update_collection, transport.collection, vectors_config=changes)

    def _names(self) -> set[str]:
        """The names of the vectors that there are now."""
        return vector_names(self.transport.described())

    def write(self, version: Version, items: Items, shard_key: ShardKey) -> None:
        name = version.augmented_vector

        def request(items: Items) -> None:
            points = [models.PointVectors.model_construct(id=key, vector={name: vector}) for key, vector in items]
            collection = self.transport.collection
            self.transport.client.update_vectors(collection, points, wait=True, shard_key_selector=shard_key)

        self.transport.send(items, request)

    def delete(self, versions: Sequence[Version], last: bool, progress: Progress | None) -> None:
        names = set(m.augmented_vectors(versions))
        for name in names & self._names() if names else ():
            self.transport.retry(self.transport.client.delete_vector_name, self.transport.collection, name, wait=True)

    def plan(self, number: int, key: str) -> list[str]:
        beside = repr(self.using) if self.using else "the unnamed one"
        lines = [f"a vector 'hub_v{number}' of {self.parameters.size + 1} dimensions beside {beside}"]
        if not self.using:
            lines.append('after a removal get_collection would show {"": VectorParams(...)} for VectorParams(...)')
        return lines


def schemas(transport: Transport, using: str, manifest: Manifest) -> dict[Storage, Schema]:
    """Both ways to keep the offsets of a vector; see `chosen_vector` and `Schema`."""
    given = (transport, *chosen_vector(transport.url, transport.info, using, manifest))
    transport.dim = given[2].size
    return {"vector": VectorSchema(*given), "payload": PayloadSchema(*given)}


def chosen_storage(
    schemas: dict[Storage, Schema], asked: Storage | Literal["auto"], manifest: Manifest
) -> tuple[Storage, list[str]]:
    """Where offsets go, and why, in a line, if nobody has said it.

    Raises StoreError where the collection cannot keep them there, InputError for what is no storage.
    """
    if asked not in ("auto", "payload", "vector"):
        raise InputError(f"storage={asked!r}: use 'auto', 'payload' or 'vector'")
    vector = schemas["vector"]
    assert isinstance(vector, VectorSchema)
    if asked == "vector":
        vector.require()
    if asked != "auto":
        return asked, []
    lying, _ = manifest.find_current(vector.using)
    if lying is not None:
        return lying.storage, []
    if against := vector.doubt():
        return "payload", [f"storage='payload': {against}"]
    merit = "a search by a second vector is as fast as a raw one, and the server adds it in place"
    return "vector", [f"storage='vector': {merit}; {vector.compared()}"]


def _bytes(count: float) -> str:
    """A number of bytes for people."""
    thousands = min(max(int(math.log10(count or 1)) // 3, 0), 4)
    return f"{count / 1000**thousands:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[thousands]}"


def dense_vectors(info: models.CollectionInfo) -> dict[str, models.VectorParams]:
    """The dense vectors of a collection by name; "" is the unnamed one."""
    given = info.config.params.vectors or {}
    return {"": given} if isinstance(given, models.VectorParams) else given


def vector_names(info: models.CollectionInfo) -> set[str]:
    """The names of the vectors of a collection, dense and sparse."""
    return {*dense_vectors(info), *(info.config.params.sparse_vectors or {})}


def deleted(manifest: Manifest, info: models.CollectionInfo) -> list[Version]:
    """The versions whose vector is no longer there."""
    return [version for version in manifest.everything if version.vector not in dense_vectors(info)]


def chosen_vector(
    url: str, info: models.CollectionInfo, using: str, manifest: Manifest
) -> tuple[str, models.VectorParams]:
    """The vector called `using`, or the only one that hubplugin has not added. For a vector that was deleted and whose
    correction is left: what it was, so that the correction can be removed.

    Raises StoreError if it is not there or cannot carry offsets.
    """
    dense = {name: each for name, each in dense_vectors(info).items() if name not in manifest.augmented_vectors()}
    for version in deleted(manifest, info):
        if version.vector == using if using else not dense:
            distance = next(known for known, metric in METRICS.items() if metric is version.metric)
            return version.vector, models.VectorParams(size=version.dim, distance=distance)
    sparse = info.config.params.sparse_vectors or {}
    listed = ", ".join(repr(name) for name in dense) or "none"
    if using in sparse or not dense:
        raise StoreError(f"{url}: sparse vectors have no offsets; dense vectors there: {listed}")
    if using not in dense:
        if using or len(dense) > 1:
            none_such = (f"there is no vector {using!r}",)
            wanted = none_such if using else ("name one of its vectors with ", Parameter("vector"))
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
