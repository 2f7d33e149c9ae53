"""A small collection with hubs, in local mode, and its exact corrected ranking."""

import asyncio
import functools
import inspect
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version as installed
from typing import Any

import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin import Compute, OffsetModel
from hubplugin.jobs.write import write
from hubplugin.model import QueryMap
from hubplugin_qdrant import AsyncHubQdrantClient, HubQdrantClient
from hubplugin_qdrant.manifest import QdrantManifest, QdrantVersion
from hubplugin_qdrant.metadata import CachedManifest

ROWS, DIM = 120, 8
RED = models.Filter(
    must=[models.FieldCondition(key="colour", match=models.MatchValue(value="red"))]
)
RRF = models.FusionQuery(fusion=models.Fusion.RRF)

ONLY_NEWER_LOCAL_MODE = pytest.mark.skipif(
    tuple(map(int, installed("qdrant-client").split(".")[:3])) < (1, 19, 1),
    reason="up to qdrant-client 1.19.0 a prefetch in local mode takes no id, and no filter from above, as on a server",
)


def ids(response: Any) -> list[Any]:
    """Of the points in an answer."""
    return [point.id for point in getattr(response, "points", response)]


def contents(client: QdrantClient) -> list[models.Record]:
    """Every point with payload and vectors, in the order of ids."""
    return sorted(
        client.scroll("photos", limit=10_000, with_vectors=True)[0],
        key=lambda point: point.id,
    )


def names(client: QdrantClient) -> list[str]:
    """Of the collections that there are."""
    return [collection.name for collection in client.get_collections().collections]


def clustered(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(6, DIM))
    return (
        centres[rng.integers(6, size=count)] + 0.7 * rng.normal(size=(count, DIM))
    ).astype(np.float32)


def stopped(at: str) -> Compute:
    """For a run that is interrupted as soon as it tells that it does `at`."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    return once(at, interrupt)


def once(at: str, do: Callable[[], object]) -> Compute:
    """For a run during which `do()` happens once, as soon as it tells that it does `at`."""
    left = [do]

    def told(what: str, done: int, total: int) -> None:
        if what == at and left:
            left.pop()()

    return Compute(progress=told)


def apply_to(
    client: QdrantClient,
    collection: str,
    bank: Any,
    method: str = "blend",
    *,
    vector: str | None = None,
    storage: Any = "auto",
    agreement: float | None = None,
    **given: Any,
) -> Any:
    """`hubplugin.apply` of the store that `open_store` gives for a collection."""
    store = hubplugin_qdrant.open_store(
        client,
        collection,
        vector,
        storage=storage,
        agreement=agreement,
    )
    return hubplugin.apply(store, bank, method, **given)


def set_constants(store: Any, **constants: Any) -> None:
    """Lets searches use `constants`, whatever was calibrated."""
    manifest = store.read_manifest()
    active = {
        name: version.model_copy(update=constants)
        for name, version in manifest.active.items()
    }
    store.write_manifest(manifest.replace(active=active))


def widen(store: Any, oversampling: float) -> None:
    """Lets searches fetch so many candidates a result."""
    set_constants(store, oversampling=oversampling)


def know(
    client: HubQdrantClient, collection: str, manifest: QdrantManifest | None
) -> None:
    """Lets `client` take `manifest` for that of `collection`, without reading it."""
    client._corrections.manifests[collection] = CachedManifest(
        collection, manifest, until=1e18
    )


class Awaited:
    """An async client as a sync one: what it returns is awaited."""

    def __init__(self, client: AsyncQdrantClient):
        self.client = client

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)
        return (
            (lambda *given, **named: self._done(found(*given, **named)))
            if callable(found)
            else found
        )

    @staticmethod
    def _done(result: Any) -> Any:
        async def awaited() -> Any:
            return await result

        return asyncio.run(awaited()) if inspect.isawaitable(result) else result


class Served:
    """A server's stand-in behind a client: local mode that is reached as a server is, by one request at a time."""

    def __init__(self, local: Any):
        self._local, self._lock = local, threading.RLock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._local, name)
        return functools.partial(self._asked, found) if callable(found) else found

    def _asked(self, request: Callable[..., Any], *given: Any, **named: Any) -> Any:
        with self._lock:
            return request(*given, **named)


def served(client: QdrantClient) -> QdrantClient:
    """`client` in local mode, from now on taken for one of a server: threads read and write, and it is asked for
    indexes, of which local mode has none."""
    client._client = Served(client._client)
    return client


_CORRECTED: dict[tuple[str, bytes], bytes] = {}
"""Collections in local mode after `Photos.apply`, by storage and by what they were before."""


@dataclass
class Photos:
    """The collection "photos": the vector `using` of 120 points, payload {"n": id, "colour": ...}. `awaited`: what
    `wrapped` gives is async."""

    plain: QdrantClient
    using: str
    distance: models.Distance
    storage: str = "payload"
    awaited: bool = False

    gallery = clustered(1, ROWS)
    queries = clustered(2, 20)
    bank = clustered(3, 150)

    def __post_init__(self) -> None:
        parameters = models.VectorParams(size=DIM, distance=self.distance)
        self.plain.create_collection(
            "photos", {self.using: parameters} if self.using else parameters
        )
        self.plain.upload_points(
            "photos",
            [self.point(row, vector) for row, vector in enumerate(self.gallery)],
        )

    def struct(self, vector) -> Any:
        """`vector`, or an array of them, as the client takes it."""
        return {self.using: vector.tolist()} if self.using else vector.tolist()

    def point(self, key, vector, **payload):
        colour = {"n": key, "colour": ["red", "green", "blue"][key % 3]}
        return models.PointStruct(
            id=key, vector=self.struct(vector), payload=colour | payload
        )

    def search(self, client, query, **options) -> Any:
        return client.query_points("photos", query, self.using or None, **options)

    def apply(self, **given) -> HubQdrantClient:
        apply_to(
            self.plain,
            "photos",
            self.bank,
            vector=self.using,
            **self.settings() | given,
        )
        widen(self.store(), ROWS / 10)  # every point is a candidate
        return self.wrapped()

    def corrected(self) -> Any:
        """What `apply` returns, on a copy of the collection that it made of the same points for an earlier test."""
        local = self.plain._client
        before = self.storage, pickle.dumps((local.collections, local.aliases))
        if before not in _CORRECTED:
            self.apply()
            _CORRECTED[before] = pickle.dumps(local.collections)
        local.collections.update(pickle.loads(_CORRECTED[before]))
        return self.wrapped()

    def wrapped(self, **options) -> Any:
        """A corrected client on the collection."""
        if not self.awaited:
            return HubQdrantClient.wrap(self.plain, **options)
        plain = AsyncQdrantClient(":memory:")
        plain._client.collections = self.plain._client.collections
        plain._client.aliases = self.plain._client.aliases
        return Awaited(AsyncHubQdrantClient.wrap(plain, **options))

    def apply_mapped(self) -> Any:
        """Writes a model with a query map, and returns a corrected client. The map turns and stretches, so that its
        transpose, or a forgotten length, ranks otherwise."""
        step = 0.6 * np.random.default_rng(9).normal(size=(DIM, DIM)).astype(np.float32)
        metric = {models.Distance.COSINE: "cosine", models.Distance.DOT: "dot"}[
            self.distance
        ]
        model = hubplugin.fit(self.gallery, self.bank, "is", metric=metric)
        write(
            self.store(),
            replace(model, query_map=QueryMap(step, 1.0, 200)).centre_on(self.gallery),
        )
        widen(self.store(), ROWS / 10)
        return self.wrapped()

    def without_map(self) -> OffsetModel:
        """The model that is stored, without its query map."""
        return replace(self.model, query_map=None).centre_on(self.gallery)

    def store(self) -> Any:
        return hubplugin_qdrant.open_store(
            self.plain, "photos", vector=self.using, storage=self.storage
        )

    def add_vector(self, name: str, vectors: np.ndarray) -> None:
        """One more vector, `vectors` [n, d] of the first n points."""
        config = models.DenseVectorConfig(
            size=vectors.shape[1], distance=models.Distance.DOT
        )
        self.plain.create_vector_name(
            "photos", name, models.DenseVectorNameConfig(dense=config)
        )
        rows = [
            models.PointVectors(id=row, vector={name: vector.tolist()})
            for row, vector in enumerate(vectors)
        ]
        self.plain.update_vectors("photos", rows)

    def wrong(self) -> tuple[int, int]:
        """How many offsets are missing, and how many are stale."""
        report = hubplugin.inspect(self.store(), queries=0)
        return report.missing, report.stale

    def settings(self):
        return {"method": "is", "force": True, "storage": self.storage}

    @property
    def model(self) -> OffsetModel:
        found = hubplugin_qdrant.open_store(
            self.plain, "photos", vector=self.using
        ).correction()
        assert found is not None
        return found.model

    @property
    def version(self) -> QdrantVersion:
        payload = self.plain.retrieve("photos--hub", [0])[0].payload
        return QdrantManifest.model_validate(payload).active[self.using]

    def stored(self, key) -> dict:
        """What a point holds of ours: payload under our key, or second vectors."""
        point = self.plain.retrieve("photos", [key], with_vectors=True)[0]
        if self.storage == "payload":
            return (point.payload or {}).get("hub_offset", {})
        return {
            name: vector
            for name, vector in point.vector.items()
            if name.startswith("hub_")
        }

    def similarities(self, queries) -> np.ndarray:
        """Corrected similarities of the gallery, in float64 and straight from the definition: [m, n]."""
        return self.raw(queries, self.model.query_map) + self.model.offsets(
            self.gallery
        )

    def raw(self, queries, query_map: QueryMap | None = None) -> np.ndarray:
        """The same without offsets, and without a map where none is given."""
        q, t = np.asarray(queries, np.float64), self.gallery.astype(np.float64)
        if self.distance is models.Distance.COSINE:
            q, t = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, t))
        if query_map is not None:
            q = q + q @ query_map.step.T.astype(np.float64)
        if self.distance is models.Distance.EUCLID:
            return -((q[:, None, :] - t[None, :, :]) ** 2).sum(axis=2) / 2
        return q @ t.T

    def best(self, query, count=10, rows=None) -> list[int]:
        scores = self.similarities([query])[0]
        keep = np.arange(ROWS) if rows is None else np.asarray(rows)
        return [
            int(row) for row in keep[np.argsort(-scores[keep], kind="stable")][:count]
        ]


COLLECTIONS = [
    ("", models.Distance.COSINE, "payload"),
    ("image", models.Distance.EUCLID, "vector"),
    ("image", models.Distance.DOT, "payload", True),
    ("image", models.Distance.DOT, "payload"),
    ("", models.Distance.EUCLID, "payload"),
    ("image", models.Distance.COSINE, "vector"),
    ("image", models.Distance.DOT, "vector", True),
]
FEW = COLLECTIONS[:3]
"""Those of `make check`, which have each distance, storage and client among them; `make test` has all."""


def _collections(
    storages: tuple[str, ...], among: list[Any] = COLLECTIONS
) -> list[Any]:
    return [
        pytest.param(
            of,
            id=f"{of[0] or 'unnamed'}-{of[1].value}-{of[2]}{'-async' if of[3:] else ''}",
            marks=() if of in FEW else pytest.mark.slow,
        )
        for of in among
        if of[2] in storages
    ]


@pytest.fixture(params=_collections(("payload", "vector")))
def photos(request) -> Photos:
    """Unnamed and named vectors, each distance, both storages, sync and async clients."""
    return Photos(QdrantClient(":memory:"), *request.param)


@pytest.fixture(params=_collections(("payload",)))
def in_payload(request) -> Photos:
    """The same with offsets as payload only."""
    return Photos(QdrantClient(":memory:"), *request.param)


@pytest.fixture(
    params=_collections(("payload", "vector"), [of for of in COLLECTIONS if not of[3:]])
)
def by_sync_client(request) -> Photos:
    """Those of `photos` whose client is sync."""
    return Photos(QdrantClient(":memory:"), *request.param)


@pytest.fixture
def cosine() -> Photos:
    return Photos(QdrantClient(":memory:"), "", models.Distance.COSINE)
