"""Prepare a collection for offsets, by a payload index or an augmented vector.

This module also decides which vectors can have offsets, and where they are stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from qdrant_client import models

from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.metric import Metric
from hubplugin.vectors import Progress
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.calibration import Searches, calibrate
from hubplugin_qdrant.manifest import QdrantManifest, QdrantVersion
from hubplugin_qdrant.transport import QdrantTransport

VECTORS_IN_PLACE = (1, 18)
"""The first version of the server that adds a named vector to a collection."""

SMALL_INDEXES = (1, 17)
"""The first version of the server that can leave a float index out of the graph."""

INDEX_BYTES = 32
"""The estimated bytes per point in an index: a number and a point id, both ways."""

PAYLOAD_BYTES = 64
"""The estimated bytes per point on disk for a number in a payload, as JSON."""

METRICS = {
    models.Distance.COSINE: Metric.COSINE,
    models.Distance.DOT: Metric.DOT,
    models.Distance.EUCLID: Metric.EUCLIDEAN,
}

PRECISE_DATATYPES = (None, models.Datatype.FLOAT32, models.Datatype.FLOAT16)
"""The datatypes that are precise enough for offsets in an augmented vector."""

DISTANCES = {metric: distance for distance, metric in METRICS.items()}

Storage: TypeAlias = Literal["payload", "vector"]

PARTS = 10
"""The number of parts in which a collection is written by default. While one part is
written, searches still use the graph of the others."""

ENOUGH = 0.9
"""The share of points in the graph that is enough for fast searches. A server leaves
the last few points out."""


class Schema:
    """The base class of both storages for the offsets of one vector.

    Each storage also describes its cost (`cost`, `write_factor`) and its changes
    (`plan`: first what each point gets, then any side effects). It makes room for a
    version before anything is written (`prepare`), and deletes the indexes or vectors
    of versions (`delete`).

    using: The name of the vector; "" for the unnamed one.
    parameters: The parameters of the vector.
    write_factor: The time to write all points, as a multiple of the time to read them.
    """

    write_factor: float

    def __init__(
        self, transport: QdrantTransport, using: str, parameters: models.VectorParams
    ):
        self.transport = transport
        self.using = using
        self.parameters = parameters
        self.metric = METRICS[parameters.distance]
        self.dim = parameters.size
        self._written = 0

    def finish(
        self, version: QdrantVersion, queries: np.ndarray, progress: Progress | None
    ) -> QdrantVersion:
        """Return `version`, calibrated with `queries` [m, d].

        All offsets must have been written.
        """
        transport = self.transport
        if transport.is_local and version.storage == "vector":
            return version  # always exact: there is nothing to calibrate
        self.wait_for_graph(progress)
        if progress is not None:
            progress("calibrating", 0, 1)
        searches = Searches(transport, self.using, queries)
        return calibrate(version, transport.count(), searches)

    def keep_pace(self, points: int, progress: Progress | None) -> None:
        """Wait for the graph if enough points were written since the last wait.

        points: The number of points that will be written now.
        """
        pace = self.transport.pace or self.transport.count() / PARTS
        if self._written >= pace and self.expects_graph():
            self.transport.wait()
            self.wait_for_graph(progress)
            self._written = 0
        self._written += points

    def wait_for_graph(self, progress: Progress | None) -> None:
        """Wait until all points are in the graph again.

        A write removes its points from the graph.
        """
        transport = self.transport
        if transport.is_local:
            return
        transport.wait_until(
            self._is_indexed,
            "waiting for the graph",
            "searches are slower until it is complete; then run refresh, which "
            "calibrates them",
            progress,
            transport.count(),
        )

    def _is_indexed(self) -> bool:
        """Return True if the graph is nearly complete, or is not being built.

        The status alone is not enough: a collection may stay yellow long after the
        graph is complete, while the server works on other collections.
        """
        opened = self.transport.opened
        current = self.transport.describe()
        if current.status != models.CollectionStatus.YELLOW:
            return True
        # The server counts the indexed vectors of all names together.
        growth = len(dense_vectors(current)) / len(dense_vectors(opened))
        expected = (opened.indexed_vectors_count or 0) * growth
        if self.expects_graph():
            expected = max(expected, self.transport.count())
        return (current.indexed_vectors_count or 0) >= ENOUGH * expected

    def expects_graph(self) -> bool:
        """Return True if the collection is large enough for the server's graph."""
        info = self.transport.opened
        threshold = info.config.optimizer_config.indexing_threshold or 0
        kilobytes = 4 * self.dim * self.transport.count() / 1024
        # The threshold is in kilobytes per segment, and 0 turns the graph off.
        return kilobytes > max(info.segments_count, 1) * threshold > 0


class PayloadSchema(Schema):
    """Offsets as numbers under our payload key, with a float index."""

    write_factor = 4.0

    def require_room(self, manifest: QdrantManifest) -> None:
        """Raise StoreError if strict mode allows no further payload index.

        A half-written version of `manifest` may already have the index that it needs.
        """
        limit = self.transport.strict.max_payload_index_count
        indexes = set(self.transport.opened.payload_schema)
        writing = manifest.writing
        if limit is None or (writing is not None and writing.key in indexes):
            return
        # Indexes of retired versions are deleted before a new one is made.
        indexes -= m.payload_keys(manifest.give_up().retired)
        if len(indexes) >= limit:
            names = ", ".join(map(repr, sorted(indexes))) or "none"
            raise StoreError(
                f"{self.transport.url}: offsets in payloads need a payload index, but "
                f"strict mode allows {limit} (max_payload_index_count) and there are "
                f"{len(indexes)}: {names}; delete one, allow one more, or use ",
                Parameter("storage", "vector"),
            )

    def prepare(self, version: QdrantVersion) -> None:
        """Create a float index on the offsets, unless there is one.

        Formulas are faster with the index, and strict mode requires it. The index is
        created before any offset is written, so that the graph is built without extra
        links for it. There is no need to wait: the server does a later write after the
        index.
        """
        transport = self.transport
        if transport.is_local:  # local mode has no indexes, and warns about them
            return
        if version.key in transport.describe().payload_schema:
            return
        schema = models.FloatIndexParams(type=models.FloatIndexType.FLOAT)
        if transport.server >= SMALL_INDEXES:
            # Links in the graph only help to filter, and nobody filters by offsets.
            schema.enable_hnsw = False
        transport.ask("create_payload_index", version.key, schema, wait=False)

    def delete(self, versions: Sequence[QdrantVersion], is_last: bool) -> None:
        """Delete the indexes of `versions`, or all of our indexes if `is_last`.

        The numbers in the payloads of points are kept.
        """
        if self.transport.is_local:
            return
        written = m.payload_keys(versions)
        any_key = rf"{m.KEY}\.v[1-9]\d*"  # also of versions that no manifest knows
        for path in self.transport.describe().payload_schema:
            if path in written or (is_last and re.fullmatch(any_key, path)):
                self.transport.ask("delete_payload_index", path, wait=True)

    def cost(self) -> str:
        """Return the estimated memory and disk of the offsets and their index."""
        points = self.transport.count()
        memory, disk = _bytes(INDEX_BYTES * points), _bytes(PAYLOAD_BYTES * points)
        return f"about {memory} of memory, and {disk} of disk"

    def plan(self, number: int) -> list[str]:
        key = f"'v{number}' under the payload key {m.KEY!r}"
        return [f"a number {key}, with a float index"]


class VectorSchema(Schema):
    """Offsets in an augmented vector of d + 1 dimensions.

    The augmented vector has the same settings as the corrected vector.
    """

    write_factor = 1.3

    @property
    def _stores_16_bits(self) -> bool:
        """True if the augmented vector stores 16-bit numbers.

        It does so if the corrected vector is not float32: 8 bits are too few for an
        offset.
        """
        return self.parameters.datatype not in (None, models.Datatype.FLOAT32)

    def obstacle(self) -> str | None:
        """Return the reason why no augmented vector can be added; None if one can."""
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
        """Return the reason not to add an augmented vector by default, or None."""
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
        if self.parameters.datatype not in PRECISE_DATATYPES:
            return (
                f"the vector is of {self.parameters.datatype.value}, and a second one "
                "would be of float16"
            )
        return None

    def cost(self) -> str:
        """Return the estimated size of the augmented vectors and their graph."""
        links = self.transport.opened.config.hnsw_config.m
        bytes_per_number = 2 if self._stores_16_bits else 4
        bytes_per_vector = bytes_per_number * (self.dim + 1)
        # In the lowest layer of the graph, a point has up to 2 m links of 4 bytes.
        bytes_per_point = bytes_per_vector + 2 * links * 4
        medium = "disk" if self.parameters.on_disk else "memory, and as much of disk"
        return f"about {_bytes(bytes_per_point * self.transport.count())} of {medium}"

    def prepare(self, version: QdrantVersion) -> None:
        """Add the augmented vector of `version`, unless it exists, and configure it."""
        transport = self.transport
        name = version.augmented_vector
        is_euclidean = version.metric is Metric.EUCLIDEAN
        dense = models.DenseVectorConfig(
            size=version.dim + 1,
            distance=models.Distance.EUCLID if is_euclidean else models.Distance.DOT,
            datatype=models.VectorStorageDatatype.FLOAT16
            if self._stores_16_bits
            else None,
        )
        if name not in vector_names(transport.describe()):
            config = models.DenseVectorNameConfig(dense=dense)
            transport.ask("create_vector_name", name, config, wait=True)
            transport.wait_until(
                lambda: name in vector_names(transport.describe()),
                "adding a vector",
                "writes to it may fail",
            )
        # Copy all settings but quantisation, which would clip the query's last
        # component to the range of the other components.
        settings = self.parameters.model_dump(
            include={"hnsw_config", "on_disk", "memory"}, exclude_none=True
        )
        if settings:
            changes = {name: models.VectorParamsDiff.model_validate(settings)}
            transport.ask("update_collection", vectors_config=changes)

    def delete(self, versions: Sequence[QdrantVersion], is_last: bool) -> None:
        names = m.vectors_of(versions)
        if names:
            names &= vector_names(self.transport.describe())
        for name in names:
            self.transport.ask("delete_vector_name", name, wait=True)

    def plan(self, number: int) -> list[str]:
        vector = f"a vector 'hub_v{number}' of {self.dim + 1} dimensions"
        if self.using:
            return [f"{vector} beside {self.using!r}"]
        return [
            f"{vector} beside the unnamed one",
            'after a removal get_collection would show {"": VectorParams(...)} for '
            "VectorParams(...)",
        ]


SCHEMAS: dict[Storage, type[PayloadSchema] | type[VectorSchema]] = {
    "vector": VectorSchema,
    "payload": PayloadSchema,
}


def choose_storage(
    vector: VectorSchema, storage: Storage | Literal["auto"], manifest: QdrantManifest
) -> tuple[Storage, list[str]]:
    """Choose the storage for offsets.

    Args:
        vector: The schema of the vector to correct.
        storage: The storage that the user asks for; "auto" to choose one.
        manifest: The manifest of the collection.

    Returns:
        The storage, and the reason as a list of at most one line. The list is empty if
        the user or an earlier correction has chosen the storage.

    Raises:
        StoreError: If the collection does not support the storage.
        InputError: If `storage` is unknown.
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
        "storage='vector': a search by a second vector is as fast as a raw search, and "
        "the server can add it in place"
    ]


def _bytes(count: float) -> str:
    """Return a number of bytes as readable text, such as "1.2 GB"."""
    power = min(max(int(math.log10(count or 1)) // 3, 0), 4)
    unit = ("bytes", "kB", "MB", "GB", "TB")[power]
    return f"{count / 1000**power:.3g} {unit}"


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
    """Return the name and the parameters of the vector to correct.

    If the user has deleted the vector but not its correction, the parameters are
    derived from the correction, so that it can still be removed.

    Args:
        url: The URL of the store, for error messages.
        info: The description of the collection.
        using: The name of the vector; "" for the only vector of the user.
        manifest: The manifest of the collection.

    Raises:
        StoreError: If the vector does not exist or cannot have offsets.
    """
    existing = dense_vectors(info)
    augmented = m.vectors_of(manifest.stored_versions)
    dense = {name: v for name, v in existing.items() if name not in augmented}
    for version in manifest.stored_versions:
        if using:
            is_wanted = version.vector == using
        else:
            # The only vector of the user is wanted. If there is none, it was deleted.
            is_wanted = not dense
        if is_wanted and version.vector not in existing:
            return version.vector, models.VectorParams(
                size=version.dim, distance=DISTANCES[version.metric]
            )
    if not using and len(dense) == 1:
        (using,) = dense
    if using not in dense:
        raise StoreError(
            f"{url}: there is no dense vector {using!r}, and other kinds cannot have "
            "offsets; name one with ",
            Parameter("vector"),
            f"; dense vectors there: {', '.join(map(repr, dense)) or 'none'}",
        )
    vector = dense[using]
    is_usable = (
        vector.distance in METRICS
        and vector.multivector_config is None
        and vector.datatype != models.Datatype.UINT8
    )
    if not is_usable:
        kind = "multi-vector" if vector.multivector_config else "vector"
        numbers = (vector.datatype or models.Datatype.FLOAT32).value
        distances = ", ".join(distance.value for distance in METRICS)
        raise StoreError(
            f"{url}: vector {using!r} is a {kind} of {numbers} that ranks by "
            f"{vector.distance.value}; offsets need one vector per point, so use a "
            f"dense vector of float16 or float32, with one of {distances}"
        )
    return using, vector
