"""A vector of a shard as the engine knows it: its points in batches, and what is written to them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import qdrant_edge as edge

from hubplugin.errors import Parameter, StoreError
from hubplugin.metric import Metric
from hubplugin.store import Batch, Id
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.manifest import Payload, Version
from hubplugin_qdrant.points import PointReader
from hubplugin_qdrant.transport import plain_id

BATCH = 2000
"""Points read and written at a time; each batch is flushed to disk, which takes about a tenth of a second."""

LARGEST = sys.float_info.max

METRICS = {"Cosine": Metric.COSINE, "Dot": Metric.DOT, "Euclid": Metric.EUCLIDEAN}


class Shard:
    """The vector `using` of the open shard `engine`, whose folder is `path`.

    Raises StoreError for a vector that is not there or cannot carry offsets.
    """

    def __init__(self, engine: edge.EdgeShard, path: str | os.PathLike[str], using: str):
        self.engine, self.path = engine, Path(path)
        self.url = f"qdrant-edge:{self.path}"
        self.using, (self.metric, self.dim) = _chosen_vector(self.url, self.path, using)

    def count(self) -> int:
        with one_line(self.url):
            has_vector = edge.Filter(must=[edge.HasVectorCondition(self.using)])
            count: int = self.engine.count(edge.CountRequest(exact=True, filter=has_vector))
            return count

    def scan(self, reader: PointReader, after: Id | None = None) -> Iterator[Batch]:
        """The points behind the point `after`, in the order of ids, in batches as `reader` makes them."""
        vectors = [self.using] if self.using else True
        for records in self._pages(after, with_payload=reader.payload, with_vector=vectors):
            batch = reader.batch([record for record in records if plain_id(record.id) != after])
            if len(batch.ids):
                yield batch

    def _pages(self, following: Any = None, **asked: Any) -> Iterator[list[Any]]:
        """The points from the point `following` on, in the order of ids, page by page."""
        more = True
        while more:
            with one_line(self.url):
                records, following = self.engine.scroll(edge.ScrollRequest(following, BATCH, **asked))
            yield records
            more = following is not None

    def holding(self, key: str, without: Collection[str]) -> dict[Id, Payload]:
        """Some of the points that hold anything under the payload key `key`; see `VersionedStore.holding`."""
        anything = edge.Filter(must_not=[edge.IsEmptyCondition(key)])
        numbers: list[Any] = [
            edge.FieldCondition(f"{key}.{each}", range=edge.RangeFloat(gte=-LARGEST)) for each in without
        ]
        chosen = edge.Filter(should=[edge.IsNullCondition(key), anything], must_not=numbers)
        records = next(self._pages(filter=chosen, with_payload=[key], with_vector=False))
        return {plain_id(record.id): record.payload for record in records}

    def retrieved(self, ids: Sequence[Id]) -> list[Any]:
        """The points `ids`, with payloads and without vectors."""
        with one_line(self.url):
            found: list[Any] = self.engine.retrieve(list(ids), with_payload=True, with_vector=False)
        return found

    def sampled(self, count: int, reader: PointReader) -> Batch:
        """`count` points drawn at random."""
        vectors = [self.using] if self.using else True
        request = edge.QueryRequest(count, 0, edge.Sample.Random, with_payload=reader.payload, with_vector=vectors)
        with one_line(self.url):
            points: list[Any] = self.engine.query(request)
        return reader.batch(points)

    def write(self, version: Version, ids: Sequence[Id], offsets: np.ndarray) -> None:
        """Gives each point its offset, for good when this returns."""
        with one_line(self.url):
            for point, offset in zip(ids, offsets.tolist(), strict=True):
                self.engine.update(
                    edge.UpdateOperation.set_payload([point], {version.field: offset}, version.offset_key)
                )
            self.engine.flush()

    def index(self, version: Version) -> None:
        """Makes an index on the offsets, with which the formula takes half the time."""
        with one_line(self.url):
            if version.key not in self.engine.info().payload_schema:
                self.engine.update(edge.UpdateOperation.create_field_index(version.key, edge.PayloadSchemaType.Float))
            self.engine.flush()

    def delete(self, versions: Sequence[Version], last: bool) -> None:
        """Deletes the offsets of `versions`; see `VersionedStore.delete`."""
        if not versions:
            return
        key = versions[0].offset_key
        with one_line(self.url):
            for version in versions:
                if version.key in self.engine.info().payload_schema:
                    self.engine.update(edge.UpdateOperation.delete_field_index(version.key))
        for records in self._pages(with_payload=[key], with_vector=False):
            points: dict[tuple[str, ...], list[Any]] = {}
            for record in records:
                keys = m.to_delete(record.payload, versions) if last else m.payload_keys(versions)
                points.setdefault(keys, []).append(plain_id(record.id))
            with one_line(self.url):
                for keys, some in points.items():
                    if keys:
                        self.engine.update(edge.UpdateOperation.delete_payload(some, list(keys)))
        with one_line(self.url):
            self.engine.flush()


def _chosen_vector(url: str, path: Path, using: str) -> tuple[str, tuple[Metric, int]]:
    """The vector called `using`, or the only one. Raises StoreError if it is not there or cannot carry offsets."""
    try:
        dense = json.loads((path / "edge_config.json").read_text())["vectors"]
    except FileNotFoundError:
        raise StoreError(f"{url}: there is no shard in that folder") from None
    listed = ", ".join(repr(name) for name in sorted(dense)) or "none"
    if using not in dense:
        if using or len(dense) != 1:
            none_such = (f"there is no dense vector {using!r}",)
            wanted = none_such if using else ("name one of its dense vectors with ", Parameter("using"))
            raise StoreError(f"{url}: ", *wanted, f"; there are: {listed}")
        using = next(iter(dense))
    found, name = dense[using], f"vector {using!r}" if using else "the vector"
    if found.get("multivector_config"):
        raise StoreError(f"{url}: {name} is a multi-vector, whose MaxSim has no single offset; use a dense vector")
    if found["distance"] not in METRICS:
        raise StoreError(f"{url}: {name} ranks by {found['distance']}; offsets are for {', '.join(METRICS)}")
    return using, (METRICS[found["distance"]], int(found["size"]))


@contextmanager
def one_line(url: str) -> Iterator[None]:
    """Turns what the engine raises, a bare Exception, into a StoreError."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        text = " ".join(str(error).split())
        held = "; another process has the shard open" if "WouldBlock" in text else ""
        raise StoreError(f"{url}: {text}{held}") from None
