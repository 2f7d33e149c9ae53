"""The gallery `photos` in each store, as a user changes it who knows nothing of hubplugin."""

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

import hubplugin
from hubplugin.metric import Metric

DIM = 8


class Keeper(ABC):
    """A gallery, in the folder or the database `place`.

    Attributes:
        keeps: a vector that is overwritten keeps the offset that it had.
        remembers: so does one that is deleted and comes back.
        checks: but not for other numbers than those that it was made for.
        maps_all: a target without an offset is compared with the mapped query, too.
        has_zeros: vectors of length 0 may be there, of the similarity `zero` by cosine,
            raw and corrected; NaN where they are not found.
        holds: the type of the numbers.
        recall: the share of the best targets that a search must find.
        room: how far a score may lie from the exact one, relative to the largest.
    """

    metrics = tuple(Metric)
    keeps = False
    remembers = False
    checks = False
    maps_all = True
    has_zeros = True
    zero = (0.0, 0.0)
    holds = np.float32
    recall = 1.0
    room = 1e-4

    def __init__(self, place, metric, number=0):
        self.place = place
        self.metric = metric
        self.number = number

    def key(self, number):
        """Return the id of a target."""
        return number

    @abstractmethod
    def create(self, name="photos"):
        """Make the gallery, which is empty, or one of another name."""

    @abstractmethod
    def put(self, ids, vectors):
        """Add targets, or overwrite them."""

    @abstractmethod
    def delete(self, ids):
        """Delete targets."""

    def entitle(self, key, title):  # noqa: B027
        """Give a target a title, which changes nothing of its vector."""

    def put_by_hubplugin(self, ids, vectors):
        """Do as `put`, with offsets. Return False where hubplugin has nothing for it."""
        return False

    url: str

    def open(self):
        """Return the store as another program opens it."""
        return hubplugin.open_store(self.url)

    def restart(self):  # noqa: B027
        """Let go of everything, as a program that ends."""

    @abstractmethod
    def left(self):
        """Return the names of what lies there beside the gallery."""

    def gains(self, scores):
        """Return scores as similarities, up to one number for all."""
        return np.array(scores, np.float64)


class InChroma(Keeper):
    keeps = remembers = True
    recall = 0.9  # its graph is an approximation

    @property
    def url(self):
        return f"chroma:{self.place}/photos"

    def key(self, number):
        return f"k{number}"

    def _connect(self):
        import chromadb

        return chromadb.PersistentClient(self.place)

    def photos(self):
        return self._connect().get_collection("photos", embedding_function=None)

    def create(self, name="photos"):
        space = {"cosine": "cosine", "dot": "ip", "euclidean": "l2"}[self.metric.value]
        # Wide enough that its graph, which is random, links all of a few hundred vectors.
        wide = {"ef_search": 1000, "ef_construction": 1000, "max_neighbors": 1000}
        hnsw = {"space": space, **wide}
        self._connect().create_collection(
            name, configuration={"hnsw": hnsw}, embedding_function=None
        )

    def put(self, ids, vectors):
        self.photos().upsert(ids=list(ids), embeddings=vectors)

    def delete(self, ids):
        self.photos().delete(ids=list(ids))

    def entitle(self, key, title):
        self.photos().update(ids=key, metadatas={"title": title})

    def put_by_hubplugin(self, ids, vectors):
        from hubplugin_chroma import HubCollection

        hub = HubCollection(self._connect(), self.photos())
        hub.upsert(ids=list(ids), embeddings=vectors)
        return True

    def left(self):
        names = [each.name for each in self._connect().list_collections()]
        return [name for name in names if name != "photos"]

    def gains(self, scores):
        return -super().gains(scores) / (2 if self.metric is Metric.EUCLIDEAN else 1)


class InLanceDB(Keeper):
    metrics = (Metric.COSINE,)
    keeps = remembers = checks = True
    zero = (np.nan, np.nan)

    @property
    def url(self):
        return f"lancedb:{self.place}/photos"

    def key(self, number):
        return f"it's {number}"

    def _connect(self):
        import lancedb

        return lancedb.connect(self.place)

    def photos(self):
        return self._connect().open_table("photos")

    def _rows(self, ids, vectors):
        import pyarrow as pa

        flat = np.asarray(vectors, np.float32).ravel()
        columns = {
            "id": pa.array(ids, pa.string()),
            "vector": pa.FixedSizeListArray.from_arrays(flat, DIM),
            "title": pa.nulls(len(ids), pa.string()),
        }
        return pa.table(columns)

    def create(self, name="photos"):
        rows = self._rows([], np.empty((0, DIM)))
        self._connect().create_table(name, rows)

    def put(self, ids, vectors):
        merge = self.photos().merge_insert("id").when_matched_update_all()
        merge.when_not_matched_insert_all().execute(self._rows(ids, vectors))

    def _among(self, *ids):
        doubled = [str(key).replace("'", "''") for key in ids]
        return f"""id IN ('{"', '".join(doubled)}')"""

    def delete(self, ids):
        self.photos().delete(self._among(*ids))

    def entitle(self, key, title):
        self.photos().update(self._among(key), {"title": title})

    def left(self):
        names = [path.name for path in Path(self.place).glob("*.lance")]
        return [name for name in names if name != "photos.lance"]

    def gains(self, scores):
        return -super().gains(scores)


class InPostgres(Keeper):
    """A table; every fifth of halfvec, every third without an index of ours."""

    keeps = True
    zero = (-np.inf, 0.0)
    holds = np.float16  # as in halfvec

    def _run(self, statement, rows=()):
        import psycopg

        with psycopg.connect(self.place, autocommit=True) as connection:
            cursor = connection.cursor()
            if rows:
                cursor.executemany(statement, rows)
                return []
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def __init__(self, place, metric, number=0):
        super().__init__(place, metric, number)
        self.kind = "vector"
        self.options = ""
        if number % 5 == 4:
            self.kind = "halfvec"
            self.room = 2e-3
        if number % 3 == 2:
            self.options = "&index=none"

    def create(self, name="photos"):
        columns = f"id int PRIMARY KEY, embedding {self.kind}({DIM}), title text"
        self._run(f"CREATE TABLE {name} ({columns})")

    def put(self, ids, vectors):
        self._run(
            "INSERT INTO photos (id, embedding) VALUES (%s, %s)"
            " ON CONFLICT (id) DO UPDATE SET embedding = excluded.embedding",
            [(key, str(row.tolist())) for key, row in zip(ids, vectors, strict=True)],
        )

    def delete(self, ids):
        self._run("DELETE FROM photos WHERE id = %s", [(key,) for key in ids])

    def entitle(self, key, title):
        self._run("UPDATE photos SET title = %s WHERE id = %s", [(title, key)])

    def put_by_hubplugin(self, ids, vectors):
        import hubplugin_pgvector

        store = self.open()
        if store.active() is None:
            return False
        self.put(ids, vectors)
        # A model can judge no vector of length 0, which keeps the offset 0.
        judged = np.flatnonzero(vectors.any(axis=1))
        offsets = np.zeros(len(ids))
        if len(judged):
            offsets[judged] = hubplugin_pgvector.offsets(store, vectors[judged])
        self._run(
            "UPDATE photos SET hub_offset = %s WHERE id = %s",
            list(zip(offsets.tolist(), ids, strict=True)),
        )
        return True

    @property
    def url(self):
        options = f"table=photos&metric={self.metric.value}{self.options}"
        return f"{self.place}&{options}"

    def left(self):
        found = self._run(
            "SELECT attname::text FROM pg_attribute WHERE attname LIKE '%hub_%'"
            " AND NOT attisdropped UNION SELECT relname::text FROM pg_class"
            " WHERE relname LIKE '%hub_%' UNION SELECT nspname::text"
            " FROM pg_namespace WHERE nspname = 'hubplugin'"
        )
        return [name for (name,) in found]


class InQdrant(Keeper):
    """A collection in local mode; every other one with second vectors."""

    client = None

    @property
    def maps_all(self):
        return self.storage == "payload"

    def _connect(self):
        from qdrant_client import QdrantClient

        if self.client is None:
            self.client = QdrantClient(path=self.place)
        return self.client

    @property
    def storage(self):
        return ("payload", "vector")[self.number % 2]

    def create(self, name="photos"):
        from qdrant_client import models

        distance = {"cosine": "Cosine", "dot": "Dot", "euclidean": "Euclid"}
        parameters = models.VectorParams(
            size=DIM, distance=models.Distance(distance[self.metric.value])
        )
        self._connect().create_collection(name, {"image": parameters})

    def _points(self, ids, vectors):
        from qdrant_client import models

        return [
            models.PointStruct(id=key, vector={"image": row.tolist()}, payload={"n": 1})
            for key, row in zip(ids, vectors, strict=True)
        ]

    def put(self, ids, vectors):
        self._connect().upsert("photos", self._points(ids, vectors))

    def delete(self, ids):
        self._connect().delete("photos", list(ids))

    def entitle(self, key, title):
        self._connect().set_payload("photos", {"title": title}, [key])

    def put_by_hubplugin(self, ids, vectors):
        from hubplugin_qdrant import HubQdrantClient

        hub = HubQdrantClient.wrap(self._connect())
        hub.upsert("photos", self._points(ids, vectors))
        return True

    @property
    def url(self):
        return f"qdrant-local:{self.place}/photos?using=image&storage={self.storage}"

    def open(self):
        import hubplugin_qdrant

        return hubplugin_qdrant.open_store(
            self._connect(), "photos", vector="image", storage=self.storage
        )

    def restart(self):
        self._connect().close()
        self.client = None

    def left(self):
        client = self._connect()
        found = {each.name for each in client.get_collections().collections}
        for point in client.scroll("photos", limit=10_000, with_vectors=True)[0]:
            found.update(point.payload, point.vector)
        return sorted(found - {"photos", "image", "n", "title"})

    def gains(self, scores):
        gains = super().gains(scores)
        if self.metric is Metric.EUCLIDEAN:
            # Distances, below 0 where an offset is large.
            return -np.sign(gains) * gains**2 / 2
        return gains


class InFaiss(Keeper):
    """A file. Plain Faiss gives what is added no offset, which is 0; under L2 the largest."""

    metrics = (Metric.COSINE, Metric.DOT)
    has_zeros = False

    @property
    def file(self):
        return f"{self.place}/photos.faiss"

    def create(self, name="photos"):
        import faiss

        index = faiss.index_factory(DIM, "IDMap2,Flat", faiss.METRIC_INNER_PRODUCT)
        faiss.write_index(index, f"{self.place}/{name}.faiss")

    def put(self, ids, vectors):
        import faiss

        from hubplugin_faiss.handlers import handler_for

        index = faiss.read_index(self.file)
        ids = np.array(ids, np.int64)
        index.remove_ids(ids)
        behind = handler_for(index).index  # a query map is for queries
        behind.add_with_ids(np.ascontiguousarray(vectors, np.float32), ids)
        index.ntotal = behind.ntotal
        faiss.write_index(index, self.file)

    def delete(self, ids):
        import faiss

        index = faiss.read_index(self.file)
        index.remove_ids(np.array(ids, np.int64))
        faiss.write_index(index, self.file)

    def put_by_hubplugin(self, ids, vectors):
        import faiss

        import hubplugin_faiss

        index, model = hubplugin_faiss.read_index(self.file)
        if model is None:
            return False
        ids = np.array(ids, np.int64)
        hubplugin_faiss.remove_ids(index, ids)
        hubplugin_faiss.add(index, vectors, model, ids)
        faiss.write_index(index, self.file)
        return True

    @property
    def url(self):
        return f"faiss:{self.file}?metric={self.metric.value}"

    def left(self):
        names = [path.name for path in Path(self.place).glob("photos*")]
        return [name for name in names if name != "photos.faiss"]


KEEPERS = {
    each.__name__: each for each in (InQdrant, InFaiss, InPostgres, InChroma, InLanceDB)
}
