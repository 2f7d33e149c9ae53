"""What a corrected search costs in Python above the raw one: python -m benchmarks.qdrant_overhead

The server is taken out: each request is built, encoded and answered with ten points in memory, by REST and by gRPC.
Times are processor times of short turns, raw and corrected one after the other, so that a busy machine changes both.
The goal is at most 40 microseconds above the raw call, at 384 dimensions; and of recording (`record=`), at most 20
microseconds more, where the sample has seen many queries and keeps few of those to come.
"""

from __future__ import annotations

import functools
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np
from qdrant_client import QdrantClient, grpc, models
from qdrant_client.qdrant_remote import QdrantRemote

import hubplugin
import hubplugin_qdrant
from hubplugin.metric import Metric
from hubplugin.model import QueryMap
from hubplugin_qdrant.manifest import QdrantVersion
from hubplugin_qdrant.metadata import CachedManifest
from hubplugin_qdrant.requests import as_unit, map_query

DIM, TURNS, CALLS = 384, 60, 50
"""CALLS: searches of a turn, one by one or all at once."""


def rest_client() -> QdrantClient:
    """A client whose every request is answered at once with ten points."""
    points = [
        {"id": row, "version": 0, "score": 0.5, "payload": {}} for row in range(10)
    ]
    found = {"query": {"points": points}, "batch": [{"points": points}] * CALLS}

    def answer(request: httpx.Request) -> httpx.Response:
        result = found[request.url.path.rpartition("/")[2]]
        return httpx.Response(200, json={"result": result, "status": "ok", "time": 0.0})

    client = QdrantClient(url="http://localhost", check_compatibility=False)
    client.http.client._client = httpx.Client(
        transport=httpx.MockTransport(answer), base_url="http://localhost"
    )
    return client


class Answering:
    """A gRPC stub that encodes each request and answers it with ten points."""

    points = tuple(
        grpc.ScoredPoint(id=grpc.PointId(num=row), score=0.5) for row in range(10)
    )
    answer = grpc.QueryResponse(result=points)
    answers = grpc.QueryBatchResponse(result=[grpc.BatchResult(result=points)] * CALLS)

    def Query(  # noqa: N802
        self, request: grpc.QueryPoints, timeout: float | None
    ) -> grpc.QueryResponse:
        request.SerializeToString()
        return self.answer

    def QueryBatch(  # noqa: N802
        self, request: grpc.QueryBatchPoints, timeout: float | None
    ) -> grpc.QueryBatchResponse:
        request.SerializeToString()
        return self.answers


class GrpcRemote(QdrantRemote):
    grpc_points = Answering()


def grpc_client() -> QdrantClient:
    client = QdrantClient(
        url="http://localhost", prefer_grpc=True, check_compatibility=False
    )
    client._client.__class__ = GrpcRemote
    return client


def corrected_collection(rng: np.random.Generator) -> QdrantClient:
    client = QdrantClient(":memory:")
    client.create_collection(
        "photos", models.VectorParams(size=DIM, distance=models.Distance.COSINE)
    )
    client.upload_collection("photos", rng.normal(size=(100, DIM)))
    hubplugin.apply(
        hubplugin_qdrant.open_store(client, "photos"),
        rng.normal(size=(50, DIM)),
        "is",
        force=True,
    )
    return client


def one_by_one(client: QdrantClient, collection: str, queries: Sequence[Any]) -> None:
    for query in queries:
        client.query_points(collection, query=query, limit=10)


def at_once(client: QdrantClient, collection: str, queries: Sequence[Any]) -> None:
    client.query_batch_points(
        collection,
        [
            models.QueryRequest(query=query, limit=10, with_payload=True)
            for query in queries
        ],
    )


def microseconds(
    clients: Sequence[QdrantClient],
    collection: str,
    queries: Sequence[object],
    searched: Callable[[QdrantClient, str, Sequence[object]], None],
) -> np.ndarray:
    """Processor times of one search by each client: [TURNS, clients]."""
    times = np.empty((TURNS, len(clients)))
    for row in times:
        for column, client in enumerate(clients):
            started = time.process_time()
            searched(client, collection, queries)
            row[column] = 1e6 * (time.process_time() - started) / CALLS
    return times


def recording_alone(
    recorder: hubplugin.Recorder, queries: Sequence[object]
) -> np.ndarray:
    """Processor times of what a recorded search does besides, in many turns: a difference of two calls is noisier."""
    into = recorder.within("photos", "")
    times = np.empty(10 * TURNS)
    for turn in range(len(times)):
        started = time.process_time()
        for query in queries:
            into.add(query)  # type: ignore[arg-type]
        times[turn] = 1e6 * (time.process_time() - started) / len(queries)
    return times


def print_parts_of_map(rng: np.random.Generator) -> None:
    """What `map_query` takes for a list, and its parts: none of them is Python that could go."""
    print(
        f"{'a query map by cosine':<34}"
        + "".join(f"{part:>18}" for part in ("all", *PARTS))
    )
    for dim in (384, 768):
        step = (0.5 * rng.normal(size=(dim, dim)) / dim**0.5).astype(np.float32)
        query_map = QueryMap(step, 1.0, 200)
        version = QdrantVersion(
            number=1,
            model="",
            metric=Metric.COSINE,
            dim=dim,
            parts=1,
            mapped=True,
            query_map=query_map,
        )
        array = rng.normal(size=dim).astype(np.float32)
        row = array.tolist()
        calls = (
            functools.partial(map_query, row, version),
            *(
                functools.partial(part, row, array, query_map)
                for part in PARTS.values()
            ),
        )
        medians = []
        for call in calls:
            times = []
            for _ in range(TURNS):
                started = time.process_time()
                for _ in range(10 * CALLS):
                    call()
                times.append(1e6 * (time.process_time() - started) / (10 * CALLS))
            medians.append(np.median(times))
        print(
            f"{f'{dim} dimensions':<34}"
            + "".join(f"{median:>18.1f}" for median in medians)
        )


PARTS: dict[str, Callable[[list[float], np.ndarray, QueryMap], object]] = {
    "unit length": lambda row, array, query_map: as_unit(row),
    "list to float32": lambda row, array, query_map: np.array(row, np.float32),
    "product": lambda row, array, query_map: query_map(array),
    "float32 to list": lambda row, array, query_map: array.tolist(),
    "length": lambda row, array, query_map: np.linalg.norm(array),
}


def main() -> None:
    rng = np.random.default_rng(0)
    manifest = hubplugin_qdrant.open_store(
        corrected_collection(rng), "photos"
    ).read_manifest()
    second = manifest.active[""].model_copy(
        update={"storage": "vector", "everywhere": True}
    )
    step = (0.5 * rng.normal(size=(DIM, DIM)) / DIM**0.5).astype(np.float32)
    mapped = manifest.active[""].model_copy(
        update={"mapped": True, "query_map": QueryMap(step, 1.0, 200)}
    )
    vectors = list(rng.normal(size=(CALLS, DIM)).astype(np.float32))
    lists = [vector.tolist() for vector in vectors]
    folder = tempfile.TemporaryDirectory()
    recorder = hubplugin.Recorder(folder.name, 1_000)
    recorder.within("photos", "").add(
        rng.normal(size=(100_000, DIM)).astype(np.float32)
    )
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}; microseconds a call"
    )
    columns = ["raw: median", "above it: median", "quickest tenth"]
    print(f"{'query':<34}" + "".join(f"{column:>18}" for column in columns))
    for transport, raw in (("REST", rest_client()), ("gRPC", grpc_client())):
        corrected = hubplugin_qdrant.HubQdrantClient.wrap(raw)
        known = {
            "photos": manifest,
            "second vector": manifest.replace(active={"": second}),
            "mapped": manifest.replace(active={"": mapped}),
            "other": None,
        }
        for collection, each in known.items():
            corrected._corrections.manifests[collection] = CachedManifest(
                collection, each, until=1e18
            )
        for name, collection, queries, searched in (
            ("list", "photos", lists, one_by_one),
            ("numpy array", "photos", vectors, one_by_one),
            (
                "NearestQuery",
                "photos",
                [models.NearestQuery(nearest=vector) for vector in lists],
                one_by_one,
            ),
            ("list, a second vector", "second vector", lists, one_by_one),
            ("list, a query map", "mapped", lists, one_by_one),
            ("numpy array, a query map", "mapped", vectors, one_by_one),
            (f"{CALLS} lists at once", "photos", lists, at_once),
            ("the same, a second vector", "second vector", lists, at_once),
            ("collection not corrected", "other", vectors, one_by_one),
        ):
            times = microseconds((raw, corrected), collection, queries, searched)
            median, quick = (np.quantile(times, q, axis=0) for q in (0.5, 0.1))
            line = f"{transport}, {name}"
            found = (median[0], median[1] - median[0], quick[1] - quick[0])
            print(f"{line:<34}" + "".join(f"{each:>18.1f}" for each in found))
    for name, queries in (("list", lists), ("numpy array", vectors)):
        quick, median = np.quantile(recording_alone(recorder, queries), (0.1, 0.5))
        print(
            f"recording alone, {name}: quickest tenth {quick:.1f}, median {median:.1f}"
        )
    recorder.close()
    folder.cleanup()
    print_parts_of_map(rng)


if __name__ == "__main__":
    main()
