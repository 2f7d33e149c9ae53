"""A small collection with hubs, in local mode, and its exact corrected ranking."""

import asyncio
import functools
import inspect
import pickle
import threading
import warnings
from dataclasses import dataclass, field, replace
from importlib.metadata import version as installed

import numpy as np
import pytest
from pydantic import BaseModel
from qdrant_client import AsyncQdrantClient, QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin import Compute
from hubplugin.jobs.write import write
from hubplugin.model import QueryMap
from hubplugin_qdrant import AsyncHubQdrantClient, HubQdrantClient
from hubplugin_qdrant.manifest import QdrantManifest
from tests.core.formulas import similarity

COSINE = models.Distance.COSINE
DOT = models.Distance.DOT
EUCLID = models.Distance.EUCLID

ROWS, DIM = 120, 8
IN_BOTH = pytest.mark.parametrize("storage", ["payload", "vector"])
DOCUMENT = models.Document(text="3", model="a model")
RRF = models.FusionQuery(fusion=models.Fusion.RRF)

ONLY_NEWER_LOCAL_MODE = pytest.mark.skipif(
    tuple(map(int, installed("qdrant-client").split(".")[:3])) < (1, 19, 1),
    reason="an older local mode: a prefetch takes no id, and no filter from above",
)


def ids(response):
    """Return the ids of the points in an answer."""
    return [point.id for point in getattr(response, "points", response)]


def names(client):
    """Return the names of all collections."""
    return [collection.name for collection in client.get_collections().collections]


def where(key, value):
    """Return the filter for points of which `key` has this value."""
    match = models.MatchValue(value=value)
    return models.Filter(must=[models.FieldCondition(key=key, match=match)])


RED = where("colour", "red")


def lead(client, alias, to):
    """Let an alias lead to the collection `to`."""
    create = models.CreateAlias(collection_name=to, alias_name=alias)
    operation = models.CreateAliasOperation(create_alias=create)
    client.update_collection_aliases([operation])


def named(using, value):
    """Return `value`, of the vector `using`, as a client takes it."""
    return {using: value} if using else value


def clustered(seed, count):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(6, DIM))
    places = centres[rng.integers(6, size=count)]
    return (places + 0.7 * rng.normal(size=(count, DIM))).astype(np.float32)


def similarities(distance, queries, targets, query_map=None):
    """Return similarities in float64, straight from the definition: [m, n]."""
    metric = "euclidean" if distance is EUCLID else distance.value.lower()
    return similarity(queries, targets, metric, query_map)


def as_scores(distance, similarities):
    """Return similarities as Qdrant shows them: sqrt(d^2 - 2 offset) for Euclid."""
    if distance is not EUCLID:
        return similarities
    return -np.sign(similarities) * np.sqrt(np.abs(2 * similarities))


def stopped(at):
    """Interrupt a run as soon as it tells that it does `at`."""

    def interrupt():
        raise KeyboardInterrupt

    return once(at, interrupt)


def once(at, do):
    """Call `do` once during a run, as soon as it tells that it does `at`."""
    left = [do]

    def told(what, done, total):
        if what == at and left:
            left.pop()()

    return Compute(progress=told)


def apply_to(
    client,
    collection,
    bank,
    method="blend",
    *,
    vector=None,
    storage="auto",
    **given,
):
    """Apply a correction to the store that `open_store` gives for a collection."""
    store = hubplugin_qdrant.open_store(client, collection, vector, storage=storage)
    return hubplugin.apply(store, bank, method, **given)


def set_constants(store, **constants):
    """Let searches use `constants`, whatever was calibrated."""
    manifest = store.read_manifest()
    active = {
        name: version.model_copy(update=constants)
        for name, version in manifest.active.items()
    }
    store.write_manifest(manifest.replace(active=active))


def widen(store, oversampling):
    """Let searches fetch so many candidates a result."""
    set_constants(store, oversampling=oversampling)


class Awaited:
    """An async client as a sync one: what it returns is awaited."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        found = getattr(self.client, name)
        if callable(found):
            return functools.partial(self._call, found)
        return found

    @staticmethod
    def _call(method, *given, **named):
        result = method(*given, **named)

        async def awaited():
            return await result

        return asyncio.run(awaited()) if inspect.isawaitable(result) else result


class Served:
    """A server's stand-in: local mode that takes one request at a time."""

    def __init__(self, local):
        self._local = local
        self._lock = threading.RLock()

    def __getattr__(self, name):
        found = getattr(self._local, name)
        return functools.partial(self._ask, found) if callable(found) else found

    def _ask(self, request, *given, **named):
        with self._lock:
            return request(*given, **named)


def served(client):
    """Let `client`, in local mode, be taken for one of a server.

    Threads read and write, and it is asked for indexes, of which local mode has none.
    """
    warnings.filterwarnings("ignore", "Payload indexes have no effect")
    client._client = Served(client._client)
    return client


_CORRECTED: dict[tuple[str, bytes], bytes] = {}
"""Collections in local mode after `Photos.apply`, by storage and by what they were
before."""


@dataclass
class Photos:
    """The collection "photos": 120 points of payload {"n": id, "colour": ...}.

    using: The name of their vector; None for an unnamed one.
    awaited: True if the clients of `wrapped` are async.
    """

    using: str | None = "image"
    distance: models.Distance = COSINE
    storage: str = "payload"
    awaited: bool = False
    plain: QdrantClient = field(default_factory=lambda: QdrantClient(":memory:"))

    gallery = clustered(1, ROWS)
    queries = clustered(2, 20)
    bank = clustered(3, 150)

    def __post_init__(self):
        parameters = models.VectorParams(size=DIM, distance=self.distance)
        self.plain.create_collection("photos", named(self.using, parameters))
        points = [self.point(row, vector) for row, vector in enumerate(self.gallery)]
        self.plain.upload_points("photos", points)

    def struct(self, vector):
        """Return `vector`, or an array of them, as a client takes it."""
        return named(self.using, vector.tolist())

    def point(self, key, vector, **payload):
        colour = {"n": key, "colour": ["red", "green", "blue"][key % 3]}
        return models.PointStruct(
            id=key, vector=self.struct(vector), payload=colour | payload
        )

    def move(self, vectors):
        """Give points other vectors, past the wrapper."""
        points = [
            models.PointVectors(id=key, vector=self.struct(vector))
            for key, vector in vectors.items()
        ]
        self.plain.update_vectors("photos", points)

    def search(self, client, query, **options):
        return client.query_points("photos", query, self.using, **options)

    def found(self, client, query, **options):
        """Return the ids that a search finds."""
        return ids(self.search(client, query, **options))

    def apply(self, **given):
        given = {"method": "is", "force": True, "storage": self.storage} | given
        apply_to(self.plain, "photos", self.bank, vector=self.using, **given)
        widen(self.store(), ROWS / 10)  # every point is a candidate
        return self.wrapped()

    def corrected(self):
        """Do as `apply`, by what it made of the same points for an earlier test."""
        local = self.plain._client
        before = self.storage, pickle.dumps((local.collections, local.aliases))
        if before not in _CORRECTED:
            self.apply()
            _CORRECTED[before] = pickle.dumps(local.collections)
        local.collections.update(pickle.loads(_CORRECTED[before]))
        return self.wrapped()

    def wrapped(self, **options):
        """Return a corrected client on the collection."""
        if not self.awaited:
            return HubQdrantClient.wrap(self.plain, **options)
        plain = AsyncQdrantClient(":memory:")
        plain._client.collections = self.plain._client.collections
        plain._client.aliases = self.plain._client.aliases
        return Awaited(AsyncHubQdrantClient.wrap(plain, **options))

    def knowing(self, remote):
        """Return a corrected client that has read everything here, and speaks to the
        server of the client `remote` from now on."""
        client = self.wrapped()
        self.search(client, self.queries[0])
        client.upsert("photos", [self.point(0, self.gallery[0])])
        plain = client.raw
        plain._client, remote._client = remote._client, plain._client
        return client

    def apply_mapped(self):
        """Write a model with a query map, and return a corrected client.

        The map turns and stretches, so that its transpose, or a forgotten length, ranks
        otherwise.
        """
        step = 0.6 * np.random.default_rng(9).normal(size=(DIM, DIM)).astype(np.float32)
        metric = self.distance.value.lower()
        model = hubplugin.fit(self.gallery, self.bank, "is", metric=metric)
        model = replace(model, query_map=QueryMap(step, 1.0, 200))
        write(self.store(), model.centre_on(self.gallery))
        widen(self.store(), ROWS / 10)
        return self.wrapped()

    def store(self, **options):
        options = {"storage": self.storage} | options
        return hubplugin_qdrant.open_store(
            self.plain, "photos", vector=self.using, **options
        )

    def add_vector(self, name, vectors):
        """Add one more vector: `vectors` [n, d] of the first n points."""
        config = models.DenseVectorConfig(size=vectors.shape[1], distance=DOT)
        self.plain.create_vector_name(
            "photos", name, models.DenseVectorNameConfig(dense=config)
        )
        rows = [
            models.PointVectors(id=row, vector={name: vector.tolist()})
            for row, vector in enumerate(vectors)
        ]
        self.plain.update_vectors("photos", rows)

    def contents(self):
        """Return every point with payload and vectors, in the order of ids."""
        points = self.plain.scroll("photos", limit=10_000, with_vectors=True)[0]
        return sorted(points, key=lambda point: point.id)

    def wrong(self):
        """Return how many offsets are missing, and how many are stale."""
        report = hubplugin.inspect(self.store(), queries=0)
        return report.missing, report.stale

    @property
    def model(self):
        found = self.store().correction()
        assert found is not None
        return found.model

    @property
    def version(self):
        payload = self.plain.retrieve("photos--hub", [0])[0].payload
        return QdrantManifest.model_validate(payload).active[self.using or ""]

    def stored(self, key):
        """Return what a point holds of ours: numbers, or second vectors."""
        (point,) = self.plain.retrieve("photos", [key], with_vectors=True)
        if self.storage == "payload":
            return (point.payload or {}).get("hub_offset", {})
        return {
            name: vector
            for name, vector in point.vector.items()
            if name.startswith("hub_")
        }

    def raw(self, queries):
        """Return raw similarities of the gallery in float64: [m, n]."""
        return similarities(self.distance, queries, self.gallery)

    def similarities(self, queries):
        """Return corrected similarities of the gallery in float64: [m, n]."""
        model = self.model
        mapped = similarities(self.distance, queries, self.gallery, model.query_map)
        return mapped + model.offsets(self.gallery)

    def best(self, query, count=10, rows=None):
        scores = self.similarities([query])[0]
        keep = np.arange(ROWS) if rows is None else np.asarray(rows)
        return keep[np.argsort(-scores[keep], kind="stable")][:count].tolist()


COLLECTIONS = [
    (None, COSINE, "payload"),
    ("image", EUCLID, "vector"),
    ("image", DOT, "payload", True),
    ("image", DOT, "payload"),
    (None, EUCLID, "payload"),
    ("image", COSINE, "vector"),
    ("image", DOT, "vector", True),
]
FEW = COLLECTIONS[:3]
"""Those of `make check`, which have each distance, storage and client among them; `make
test` has all."""


def _name(of):
    using, distance, storage, *awaited = of
    name = f"{using or 'unnamed'}-{distance.value}-{storage}"
    return f"{name}-async" if awaited else name


@pytest.fixture(
    params=[
        pytest.param(of, id=_name(of), marks=() if of in FEW else pytest.mark.slow)
        for of in COLLECTIONS
    ]
)
def photos(request):
    """A collection of each distance, storage and client, named or unnamed."""
    return Photos(*request.param)


@pytest.fixture
def cosine():
    return Photos(None)


@pytest.fixture
def in_vector():
    return Photos(storage="vector")


@pytest.fixture
def embedding(monkeypatch):
    """Documents are embedded as the query, or where they are stored as the bank query,
    whose number they are, as fastembed would do it in the client."""

    def embedded(value, vectors):
        if isinstance(value, models.Document):
            return vectors[int(value.text)].tolist()
        if isinstance(value, list):
            return [embedded(part, vectors) for part in value]
        if isinstance(value, BaseModel):
            fields = {name: part for name, part in value if part is not None}
            return value.model_copy(update=embedded(fields, vectors))
        if isinstance(value, dict):
            return {name: embedded(part, vectors) for name, part in value.items()}
        return value

    def embed(self, raw_models, is_query=False, **options):
        for each in [raw_models] if isinstance(raw_models, BaseModel) else raw_models:
            yield embedded(each, Photos.queries if is_query else Photos.bank)

    for name in ("embed_models", "embed_models_strict"):
        monkeypatch.setattr(
            f"qdrant_client.embed.model_embedder.ModelEmbedder.{name}", embed
        )
