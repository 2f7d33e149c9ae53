"""Something to correct: real embeddings in a collection, with what a scenario asks of it."""

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import Bank, OffsetModel, inspect
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
_example = {path.stem: normalise(np.load(path).astype(np.float32), path.stem) for path in DATA.glob("*.npy")}
NAMES = json.loads((DATA / "names.json").read_text())["test"][:300]
TARGETS, LATER = _example["test_targets"][:300], _example["test_targets"][300:350]
QUERIES = _example["test_queries"][:40]
BANK, OTHER_BANK = _example["bank_queries"][:600], _example["bank_queries"][600:1200]
"""The gallery, targets that come later, the queries of the scenarios, and two banks: [rows, 384], unit length."""

PAIRS = Bank(_example["bank_queries"], _example["bank_targets"])
"""A bank that knows what its queries ask for."""

FIT: dict[str, Any] = {"method": "dbsn", "tau": 0.05}
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
        "nested": {"deep": [{"er": row}, {}], "": "an empty key", "hub_offset": "not ours"},
        "uuid": str(uuid.UUID(int=row + 10_000)),
        "text": "Ünïcödé “text” 🙂",
    }


def exact_scores(queries: np.ndarray, vectors: np.ndarray, model: OffsetModel | None) -> np.ndarray:
    """s(q, t) + offset(t) in double precision, with the map of `model`: [queries, targets]."""
    unit = normalise(vectors, "targets").astype(np.float64)
    offsets = 0.0 if model is None else model.offsets(vectors).astype(np.float64)
    asked = normalise(queries, "queries").astype(np.float64)
    if model is not None and model.query_map is not None:
        asked = asked + np.einsum("ed,qd->qe", model.query_map.step.astype(np.float64), asked)
    return np.einsum("qd,td->qt", asked, unit) + offsets


def assert_same(content: Content, before: Content) -> None:
    """Every point with its payload, and its vectors up to roundings: local mode normalises anew when it is opened."""
    assert {key: beside for key, (_, beside) in content.items()} == {key: beside for key, (_, beside) in before.items()}
    for key, (vector, _) in content.items():
        named, expected = (v if isinstance(v, dict) else {"": v} for v in (vector, before[key][0]))
        assert named.keys() == expected.keys()
        for name, values in named.items():
            np.testing.assert_allclose(values, expected[name], rtol=0, atol=1e-6)


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
        sparse: bool = False,
        vector: dict[str, Any] | None = None,
        **options: Any,
    ):
        self.backend, self.name, self.using = backend, name, using
        self.ids, self.vectors = [point_id(row) for row in range(rows)], TARGETS[:rows]
        self.client = backend.client()
        self.url = name
        if "processes" in backend.can:
            url = backend.url(name)
            self.url = f"{url}{'&' if '?' in url else '?'}using={using}" if using else url
        parameters = models.VectorParams(size=TARGETS.shape[1], distance=models.Distance.COSINE, **(vector or {}))
        if graph:  # thresholds in kB, below the size of the gallery
            options |= {
                "hnsw_config": models.HnswConfigDiff(m=16, ef_construct=100, full_scan_threshold=10),
                "optimizers_config": models.OptimizersConfigDiff(indexing_threshold=10),
            }
        if sparse:
            options |= {"sparse_vectors_config": {"words": models.SparseVectorParams()}}
        self.client.create_collection(name, {using: parameters} if using else parameters, **options)
        rows_of_points = [
            models.PointStruct(id=key, vector=self._vector(vector, sparse), payload=payload(row))
            for row, (key, vector) in enumerate(zip(self.ids, self.vectors, strict=True))
        ]
        self.client.upload_points(name, rows_of_points, batch_size=PAGE, wait=True)
        if graph:
            wait_until(self.indexed)

    def _vector(self, vector: np.ndarray, sparse: bool = False) -> Any:
        dense = vector.tolist()
        if not sparse:
            return {self.using: dense} if self.using else dense
        largest = np.sort(np.argsort(-np.abs(vector))[:8])
        values = np.abs(vector[largest]).tolist()  # so that no two targets score the same
        return {self.using: dense, "words": models.SparseVector(indices=largest.tolist(), values=values)}

    def indexed(self) -> bool:
        """Whether the server is done with its graphs. It makes none for a handful of points that lie by themselves."""
        info = self.client.get_collection(self.name)
        return info.status == models.CollectionStatus.GREEN and (info.indexed_vectors_count or 0) > len(self.ids) / 2

    def store(self, storage: Any = "auto") -> Store:
        """It, as hubplugin's own store, which keeps a new correction as `storage`."""
        return hubplugin_qdrant.open_store(self.client, self.name, vector=self.using, storage=storage)

    def insert(self, ids: list[int | str], vectors: np.ndarray) -> None:
        """Adds or replaces targets as another program would, past hubplugin."""
        points = [
            models.PointStruct(id=key, vector=self._vector(vector), payload={"row": -1})
            for key, vector in zip(ids, vectors, strict=True)
        ]
        self.client.upsert(self.name, points, wait=True)

    def content(self) -> Content:
        """Every point as it lies there: its vector and its whole payload."""
        found: Content = {}
        following = None
        while True:
            records, following = self.client.scroll(
                self.name, limit=PAGE, offset=following, with_payload=True, with_vectors=True
            )
            for record in records:
                key = record.id if isinstance(record.id, int) else str(record.id)
                found[key] = (record.vector, record.payload)
            if following is None:
                return found

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
        for found in client.get_collections().collections:  # with its companion
            if found.name == self.name or found.name.startswith(f"{self.name}--"):
                client.delete_collection(found.name)

    def found(self, client: QdrantClient, name: str = "", **given: Any) -> Answer:
        """What `client` finds for each of QUERIES, under the `name` of an alias or its own; `given` with each."""
        using = self.using or None
        answers = [client.query_points(name or self.name, query, using, limit=K, **given) for query in QUERIES]
        return [[point.id for point in answer.points] for answer in answers]

    def health(self) -> tuple[int, int, int]:
        """How many targets there are, and how many of their offsets are missing and stale."""
        store = hubplugin_qdrant.open_store(self.backend.client(), self.name, vector=self.using)
        report = inspect(store, queries=0)
        return report.count, report.missing, report.stale

    def agreement(
        self, found: list[list[int | str]], model: OffsetModel | None, queries: np.ndarray = QUERIES
    ) -> float:
        """The share of `found` that belongs to the exact first results of each query, corrected by `model`."""
        scores = exact_scores(queries, self.vectors, model)
        row = {key: number for number, key in enumerate(self.ids)}
        rows = np.array([[row[key] for key in line] for line in found])
        last = np.sort(scores, axis=1)[:, -rows.shape[1]][:, None] - 1e-5
        return float((np.take_along_axis(scores, rows, axis=1) >= last).mean())
