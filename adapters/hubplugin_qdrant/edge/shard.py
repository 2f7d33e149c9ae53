"""A vector of a shard as the engine knows it: its points in batches, and what is written to them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import qdrant_edge as edge

from hubplugin.errors import Parameter, StoreError
from hubplugin.metric import Metric
from hubplugin.store import Batch, Id
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.manifest import Version
from hubplugin_qdrant.transport import plain_id

BATCH = 2000
"""Points read and written at a time; each batch is flushed to disk, which takes about a tenth of a second."""

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

    def scan(self, turned: Callable[[list[Any]], Batch], after: Id | None = None) -> Iterator[Batch]:
        """The points behind the point `after`, in the order of ids, page by page as `turned` makes them."""
        following: Any = after
        more = True
        while more:
            request = edge.ScrollRequest(
                following, BATCH, with_payload=[m.KEY], with_vector=[self.using] if self.using else True
            )
            with one_line(self.url):
                records, following = self.engine.scroll(request)
            batch = turned([record for record in records if plain_id(record.id) != after])
            if len(batch.ids):
                yield batch
            more = following is not None

    def retrieved(self, ids: Sequence[Id]) -> list[Any]:
        """The points `ids`, with payloads and without vectors."""
        with one_line(self.url):
            found: list[Any] = self.engine.retrieve(list(ids), with_payload=True, with_vector=False)
        return found

    def sampled(self, count: int) -> list[Any]:
        """`count` points drawn at random."""
        vectors = [self.using] if self.using else True
        request = edge.QueryRequest(count, 0, edge.Sample.Random, with_payload=[m.KEY], with_vector=vectors)
        with one_line(self.url):
            points: list[Any] = self.engine.query(request)
        return points

    def write(self, version: Version, ids: Sequence[Id], offsets: np.ndarray) -> None:
        """Gives each point its offset, for good when this returns."""
        with one_line(self.url):
            for point, offset in zip(ids, offsets.tolist(), strict=True):
                self.engine.update(edge.UpdateOperation.set_payload([point], {version.field: offset}, m.KEY))
            self.engine.flush()

    def index(self, version: Version) -> None:
        """Makes an index on the offsets, with which the formula takes half the time."""
        with one_line(self.url):
            if version.key not in self.engine.info().payload_schema:
                self.engine.update(edge.UpdateOperation.create_field_index(version.key, edge.PayloadSchemaType.Float))
            self.engine.flush()

    def delete(self, versions: Sequence[Version], everything: bool) -> None:
        """Deletes the offsets of `versions`, and `everything` else under our key."""
        with one_line(self.url):
            for version in versions:
                if version.key in self.engine.info().payload_schema:
                    self.engine.update(edge.UpdateOperation.delete_field_index(version.key))
            keys = [m.KEY] if everything else [version.key for version in versions]
            if keys:
                ours = edge.Filter(must_not=[edge.IsEmptyCondition(m.KEY)])
                self.engine.update(edge.UpdateOperation.delete_payload_by_filter(ours, keys))
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
