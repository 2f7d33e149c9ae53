"""Something to correct: real embeddings in a collection, with what a scenario asks of it."""

import json
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import Bank, OffsetModel, apply, inspect
from hubplugin.metric import normalise
from hubplugin.store import Store
from integration_tests.waiting import wait_until

K = 10

AGREED = 0.95
"""What a corrected search must reach where the raw one is exact: candidates are chosen for 0.99, by other queries."""

PAGE = 50
"""Points read or written at a time: what the strictest server of a scenario allows."""


Answer: TypeAlias = list[list[int | str]]
"""The ids found for each query, best first."""

Content: TypeAlias = dict[int | str, tuple[list[float], dict[str, Any]]]
"""The vector and the payload of every point."""

DATA = Path(__file__).parent.parent / "examples" / "data"
_example = {
    path.stem: normalise(np.load(path).astype(np.float32), path.stem)
    for path in DATA.glob("*.npy")
}
NAMES = json.loads((DATA / "names.json").read_text())["test"][:300]
TARGETS, LATER = _example["test_targets"][:300], _example["test_targets"][300:350]
QUERIES = _example["test_queries"][:40]
BANK, OTHER_BANK = _example["bank_queries"][:600], _example["bank_queries"][600:1200]
"""The gallery, targets that come later, the queries of the scenarios, and two banks: [rows, 384], unit length."""

PAIRS = Bank(_example["bank_queries"], _example["bank_targets"])
"""A bank that knows what its queries ask for."""

FIT: dict[str, Any] = {"method": "dbsn", "tau": 0.05}
EXACT = models.SearchParams(exact=True)
APPLY = FIT | {"force": True}
"""Scenarios that are not about the guard do without it: it costs more than the rest of them."""


def point_id(row: int) -> int | str:
    """Integers and UUIDs by turns."""
    return row if row % 2 else str(uuid.UUID(int=row))


def payload(row: int) -> dict[str, Any]:
    """One value of every type that a payload can hold."""
    return {
        "name": NAMES[row] if row < len(NAMES) else "later",
        "module": f"module {row % 40}",
        "row": row,
        "size": row / 7,
        "even": row % 2 == 0,
        "nothing": None,
        "when": "2024-05-06T07:08:09Z",
        "where": {"lon": 13.4, "lat": 52.5},
        "tags": ["a", "b", str(row)],
        "nested": {
            "deep": [{"er": row}, {}],
            "": "an empty key",
            "hub_offset": "not ours",
        },
        "uuid": str(uuid.UUID(int=row + 10_000)),
        "text": "Ünïcödé “text” 🙂",
    }


def exact_scores(
    queries: np.ndarray, vectors: np.ndarray, model: OffsetModel | None
) -> np.ndarray:
    """s(q, t) + offset(t) in double precision, with the map of `model`: [queries, targets]."""
    unit = normalise(vectors, "targets").astype(np.float64)
    offsets = 0.0 if model is None else model.offsets(vectors).astype(np.float64)
    mapped = normalise(queries, "queries").astype(np.float64)
    if model is not None and model.query_map is not None:
        mapped = mapped + np.einsum(
            "ed,qd->qe", model.query_map.step.astype(np.float64), mapped
        )
    return np.einsum("qd,td->qt", mapped, unit) + offsets


def assert_same(content: Content, expected: Content) -> None:
    """Every point with its payload, and its vectors up to roundings: local mode normalises anew when it is opened."""
    assert {key: payload for key, (_, payload) in content.items()} == {
        key: row[1] for key, row in expected.items()
    }
    for key, (vector, _) in content.items():
        named, wanted = (
            v if isinstance(v, dict) else {"": v} for v in (vector, expected[key][0])
        )
        assert named.keys() == wanted.keys()
        for name, values in named.items():
            np.testing.assert_allclose(values, wanted[name], rtol=0, atol=1e-6)


class Gallery:
    """A collection with one dense vector, `using`, beside what `options` of `create_collection` bring: rows 0, 1, ...
    of TARGETS with `point_id` and `payload`."""

    def __init__(
        self,
        backend: Any,
        name: str,
        *,
        using: str = "",
        rows: int = len(TARGETS),
        graph: bool = False,
        vector: dict[str, Any] | None = None,
        **options: Any,
    ):
        self.backend, self.name, self.using = backend, name, using
        self.ids, self.vectors = [point_id(row) for row in range(rows)], TARGETS[:rows]
        self.client, self.url = backend.client(), backend.url(name)
        if using:
            self.url += f"{'&' if '?' in self.url else '?'}using={using}"
        parameters = models.VectorParams(
            size=TARGETS.shape[1], distance=models.Distance.COSINE, **(vector or {})
        )
        if graph:  # thresholds in kB, below the size of the gallery
            options |= {
                "hnsw_config": models.HnswConfigDiff(
                    m=16, ef_construct=100, full_scan_threshold=10
                ),
                "optimizers_config": models.OptimizersConfigDiff(indexing_threshold=10),
            }
        self.client.create_collection(
            name, {using: parameters} if using else parameters, **options
        )
        points = [
            self.point(key, self.vectors[row], payload(row))
            for row, key in enumerate(self.ids)
        ]
        self.client.upload_points(name, points, batch_size=PAGE, wait=True)
        if graph:
            wait_until(self.is_indexed)

    def point(
        self, key: int | str, vector: np.ndarray, payload: dict[str, Any] | None = None
    ) -> models.PointStruct:
        return models.PointStruct(id=key, vector=self.vector(vector), payload=payload)

    def vector(self, vector: np.ndarray) -> Any:
        """`vector` [d] as requests have it."""
        dense = vector.tolist()
        return {self.using: dense} if self.using else dense

    def is_indexed(self) -> bool:
        """Whether the server is done with its graphs. It makes none for a handful of points that lie by themselves."""
        info = self.client.get_collection(self.name)
        return (
            info.status == models.CollectionStatus.GREEN
            and (info.indexed_vectors_count or 0) > len(self.ids) / 2
        )

    def store(
        self, storage: Any = "auto", client: QdrantClient | None = None, **options: Any
    ) -> Store:
        """It, as hubplugin's own store, which keeps a new correction as `storage`, with `options` of `open_store`."""
        return hubplugin_qdrant.open_store(
            client or self.client,
            self.name,
            vector=self.using,
            storage=storage,
            **options,
        )

    def correct(
        self,
        storage: Any = "auto",
        bank: Any = BANK,
        **options: Any,
    ) -> OffsetModel:
        """The model of a correction that is applied to it, with `options` of `apply`."""
        return apply(self.store(storage), bank, **(APPLY | options)).model

    def insert(self, ids: list[int | str], vectors: np.ndarray) -> None:
        """Adds or replaces targets as another program would, past hubplugin."""
        points = [
            self.point(key, vector, {"row": -1})
            for key, vector in zip(ids, vectors, strict=True)
        ]
        self.client.upsert(self.name, points, wait=True)

    def content(self) -> Content:
        """Every point as it lies there: its vector and its whole payload."""
        content: Content = {}
        following = None
        while True:
            records, following = self.client.scroll(
                self.name,
                limit=PAGE,
                offset=following,
                with_payload=True,
                with_vectors=True,
            )
            for record in records:
                key = record.id if isinstance(record.id, int) else str(record.id)
                content[key] = (record.vector, record.payload)
            if following is None:
                return content

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """In here another process may open it; afterwards it is opened anew."""
        if hasattr(self.backend, "close"):
            self.backend.close()
        yield
        self.client = self.backend.client()

    def drop(self) -> None:
        """Leaves nothing behind."""
        client = self.backend.client()
        for name in (self.name, f"{self.name}--hub"):
            client.delete_collection(name)

    def search(
        self,
        client: QdrantClient,
        name: str = "",
        queries: np.ndarray = QUERIES,
        **options: Any,
    ) -> Any:
        """The points that `client` finds for each query, under the `name` of an alias or its own."""
        using = self.using or None
        return [
            client.query_points(
                name or self.name, query, using, **({"limit": K} | options)
            ).points
            for query in queries
        ]

    def health(self) -> tuple[int, int, int]:
        """How many targets there are, and how many of their offsets are missing and stale."""
        report = inspect(self.store(client=self.backend.client()), queries=0)
        return report.count, report.missing, report.stale

    def agreement(
        self,
        client: QdrantClient | Answer,
        model: OffsetModel | None,
        name: str = "",
        **options: Any,
    ) -> float:
        """The share of what `client` finds, or of these ids, that belongs to the exact first results of each query,
        corrected by `model`. options: of `search`."""
        answer = (
            client
            if isinstance(client, list)
            else ids_of(self.search(client, name, **options))
        )
        scores = exact_scores(options.get("queries", QUERIES), self.vectors, model)
        row = {key: number for number, key in enumerate(self.ids)}
        rows = np.array([[row[key] for key in line] for line in answer])
        last = np.sort(scores, axis=1)[:, -rows.shape[1]][:, None] - 1e-5
        return float((np.take_along_axis(scores, rows, axis=1) >= last).mean())


def ids_of(found: Iterable[Iterable[Any]]) -> Answer:
    """The ids of the points that were found for each query."""
    return [[point.id for point in points] for points in found]
