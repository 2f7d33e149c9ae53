"""How fast vectors come and go between a server and `apply`: python -m benchmarks.qdrant_transfer URL

Prints, by REST and gRPC, how many points a second are read by one thread, and written by as many as `apply` uses: as
`apply` does it, and by the client's own `scroll` and `update_vectors`. All of them in turns, three times; the best and
the worst. Without a graph, so that the server does nothing else.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from qdrant_client import QdrantClient, models

from benchmarks.qdrant_scale import connected
from hubplugin_qdrant.plain_client import PointId, Scroll, scrolling, update_vectors
from hubplugin_qdrant.transport import BATCH, WRITERS

NAME, SECOND, TURNS = "hubplugin-transfer", "second", 3


def fill(client: QdrantClient, vectors: np.ndarray) -> None:
    dim = vectors.shape[1]
    client.create_collection(
        NAME,
        {
            NAME: models.VectorParams(size=dim, distance=models.Distance.COSINE),
            SECOND: models.VectorParams(size=dim, distance=models.Distance.DOT),
        },
        optimizers_config=models.OptimizersConfigDiff(indexing_threshold=0),
    )
    for first in range(0, len(vectors), BATCH):
        block = vectors[first : first + BATCH].tolist()
        ids: list[PointId] = list(range(first, first + len(block)))
        client.upsert(NAME, models.Batch(ids=ids, vectors={NAME: block}), wait=True)


def read(scroll: Scroll) -> None:
    following, more = None, True
    while more:
        _, following = scroll(NAME, None, limit=BATCH, offset=following, with_vectors=[NAME], with_payload=False)
        more = following is not None


Items = Sequence[tuple[PointId, list[float]]]


def write(items: Items, send: Callable[[Items], object]) -> None:
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(send, (items[first : first + BATCH] for first in range(0, len(items), BATCH))))


def by_client(client: QdrantClient, items: Items) -> None:
    points = [models.PointVectors(id=point, vector={SECOND: vector}) for point, vector in items]
    client.update_vectors(NAME, points, wait=True)


def rates(works: dict[str, Callable[[], None]], points: int) -> None:
    """Prints how many points a second each does at best and at worst."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(TURNS):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - started)
    for name, seconds in taken.items():
        print(f"{name:<24}{points / min(seconds):>10,.0f}{points / max(seconds):>10,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--grpc-port", type=int, default=6334)
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--dim", type=int, default=384)
    given = parser.parse_args()
    vectors = np.random.default_rng(0).normal(size=(given.points, given.dim)).astype(np.float32)
    items: Items = list(enumerate(vectors.tolist()))
    clients = {"REST": connected(given.url, None), "gRPC": connected(given.url, given.grpc_port)}
    print(f"{'points a second':<24}{'best':>10}{'worst':>10}")
    try:
        fill(clients["REST"], vectors)
        works: dict[str, Callable[[], None]] = {}
        for name, client in clients.items():
            works[f"{name}, read"] = partial(read, scrolling(client))
            works[f"{name}, client's scroll"] = partial(read, client.scroll)
            works[f"{name}, written"] = partial(write, items, partial(update_vectors, client, NAME, SECOND))
            works[f"{name}, client's update"] = partial(write, items, partial(by_client, client))
        rates(works, given.points)
    finally:
        clients["REST"].delete_collection(NAME)


if __name__ == "__main__":
    main()
