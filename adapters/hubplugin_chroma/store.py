"""A Chroma collection as a `Store`: `chroma:FOLDER/COLLECTION`, or `chroma://HOST:8000/COLLECTION` on a server.

A correction of `photos` is a copy of its vectors, the collection `photos--hub-1`; the next is `photos--hub-2`. The
collection `photos--hub` holds the models, and its metadata say which copy searches use, so that one request switches.
`photos` itself is never written to.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import chromadb
import httpx
import numpy as np
from chromadb.api import ClientAPI
from chromadb.errors import ChromaError, InternalError, NotFoundError

from hubplugin.compute import Compute
from hubplugin.copies import Copy, CopyStore
from hubplugin.errors import StoreError
from hubplugin.jobs.write import InvalidVectors, offsets_of_all
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, group_key
from hubplugin.store import Batch, Hits, Id
from hubplugin.vectors import Progress

BATCH = 500
"""Vectors a request, within the 40 MB that a server takes."""

PART = 2**20
"""Bytes of a model a record."""

OF, LISTED = "hubplugin:collection", "hubplugin:versions"
"""Metadata of our collections: the id of the collection that they correct, and the versions."""

METRICS = {"cosine": Metric.COSINE, "ip": Metric.DOT, "l2": Metric.EUCLIDEAN}


class Unreadable(StoreError):
    """A copy that Chroma cannot read again: a kill while it writes an index leaves its files of different ages."""


class Told:
    """A client or collection of Chroma whose errors are StoreErrors of one line. copy: the name of a copy of ours."""

    def __init__(self, of: Any, url: str, copy: str | None = None):
        self._of, self._url, self._copy = of, url, copy

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._of, name)
        return partial(self._call, value) if callable(value) else value

    def _call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        try:
            result = function(*args, **named)
        except (ChromaError, ValueError, httpx.HTTPError) as error:
            said = str(error).partition("\n")[0]
            # A locked or full database is an InternalError, too, and passes.
            if self._copy and isinstance(error, InternalError) and "database" not in said:
                raise Unreadable(
                    f"{self._url}: Chroma cannot read {self._copy} any more, as after a kill while it was written; "
                    f"`hubplugin refresh` makes the active copy anew ({said})"
                ) from error
            raise StoreError(f"{self._url}: {said}") from error
        return Told(result, self._url) if isinstance(result, chromadb.Collection) else result


class ChromaStore(CopyStore):
    """See `hubplugin.store.Store`. every: after how many seconds a search looks again which copy is active, and which
    targets were added or deleted past hubplugin."""

    shared = True

    def __init__(self, client: ClientAPI, collection: chromadb.Collection, url: str | None = None, every: float = 0.0):
        self.url = url or f"chroma:{collection.name}"
        self._client, self._targets = Told(client, self.url), Told(collection, self.url)
        self._hnsw: dict[str, Any] = collection.configuration_json.get("hnsw") or {}
        if not self._hnsw:
            raise StoreError(f"{self.url} has another index than HNSW, as in Chroma Cloud; use a server or a folder")
        self.metric = METRICS[self._hnsw["space"]]
        self._name, self._id = f"{collection.name}--hub", str(collection.id)
        self._every, self._looked = every, -np.inf
        self._known: tuple[int, int] | None = None

    @property
    def dim(self) -> int:  # type: ignore[override]
        first = self._targets.get(limit=1, include=["embeddings"])["embeddings"]
        if not len(first):
            raise StoreError(f"{self.url} is empty, so that its dimension is not known; add its targets first")
        return len(first[0])

    def count(self) -> int:
        return int(self._targets.count())

    def batches(self, copy: Copy | None, group_by: str | None, ids: Sequence[str] | None = None) -> Iterator[Batch]:
        """ids: of these targets alone, as far as they are there."""
        include = ["embeddings", *(["metadatas"] if group_by else [])]
        for start in range(0, len(ids) if ids is not None else self.count() + BATCH, BATCH):
            asked = {"limit": BATCH, "offset": start} if ids is None else {"ids": ids[start : start + BATCH]}
            page = self._targets.get(**asked, include=include)
            if not page["ids"]:
                continue
            vectors = np.asarray(page["embeddings"], np.float32)
            offsets = np.full(len(vectors), np.nan, np.float32)
            if copy is not None:
                try:
                    stored = self._named(copy.number).get(ids=page["ids"], include=["embeddings"])
                except Unreadable:  # which a search says, and `begin` heeds
                    stored = {"ids": [], "embeddings": []}
                rows = dict(zip(page["ids"], range(len(vectors)), strict=True))
                at = [rows[key] for key in stored["ids"]]
                found = np.asarray(stored["embeddings"], np.float32).reshape(len(at), vectors.shape[1] + 1)
                offsets[at] = self.offsets_of(self.model_of(copy), vectors[at], found)
            groups = [(each or {}).get(group_by) for each in page["metadatas"]] if group_by else None
            yield Batch(page["ids"], vectors, offsets, groups=groups)

    def readable(self, copy: Copy) -> bool:
        there = self._named(copy.number)
        try:
            for start in range(0, there.count(), BATCH):
                there.get(limit=BATCH, offset=start, include=["embeddings"])
        except Unreadable:
            return False
        return True

    def search(self, queries: np.ndarray, k: int, *, raw: bool = False) -> Hits:
        """Scores are Chroma's distances, less the offset; under squared Euclidean distance less twice the offset."""
        found = [self.nearest(queries[row : row + BATCH], k, raw=raw) for row in range(0, len(queries), BATCH)]
        return Hits([row for each in found for row in each.ids], [row for each in found for row in each.scores])

    def nearest(self, queries: np.ndarray, k: int, among: Collection[str] | None = None, raw: bool = False) -> Hits:
        """`search` of a few queries, of the ids `among` alone."""
        copy = None if raw else self.active()
        if copy is None:
            return _asked(self._targets, queries, k, among)
        try:
            return self._corrected(self.model_of(copy), queries, k, among)
        except StoreError as error:
            if not isinstance(error.__cause__, NotFoundError):
                raise
            self._looked = -np.inf  # the copy has been deleted since
            return self.nearest(queries, k, among)

    def _corrected(self, model: OffsetModel, queries: np.ndarray, k: int, among: Collection[str] | None) -> Hits:
        asked, longer = model.queries(queries), self.augmented_queries(model, queries)
        found = _asked(self._copy, longer, k + self._deleted, among)
        if self._deleted:
            there = self._targets.get(ids=list({key for row in found.ids for key in row}), include=[])["ids"]
            found = _asked(self._copy, longer, k, there)
        neutral = _asked(self._targets, asked, k, self._lacking if among is None else self._lacking & set(among))
        return self.corrected(model, asked, k, found, neutral)

    def active(self) -> Copy | None:
        """The copy that searches use, as of at most `every` seconds ago."""
        if time.monotonic() > self._looked + self._every:
            self._active = self.copy_in("active")
            if self._active is not None:
                self._copy = self._named(self._active.number)
                known = self._active.number, self.count() - self._copy.count()
                if known != self._known:
                    self._lacking, self._known = absent(self._targets, self._copy), known
                self._deleted = len(self._lacking) - known[1]
            self._looked = time.monotonic()
        return self._active

    def keep(self, ids: Sequence[str]) -> None:
        """Puts the targets `ids`, as they are now, into the active copy; what is deleted leaves it."""
        copy = self.copy_in("active")
        if copy is None or not ids:
            return
        model, deleted = self.model_of(copy), set(ids)
        for batch in self.batches(copy, group_key(model), ids):
            offsets = offsets_of_all(model, batch, InvalidVectors(), unit=self.unit, compute=Compute())
            self.write_copy(copy, batch.ids, self.augmented(model, batch.vectors, offsets))
            deleted -= set(batch.ids)
        self._delete(copy.number, deleted)

    def copies(self) -> list[Copy]:
        book = self._book()
        return [] if book is None else [Copy(**each) for each in json.loads(book.metadata[LISTED])]

    def list_copies(self, copies: Sequence[Copy]) -> None:
        held = {OF: self._id, LISTED: json.dumps([asdict(copy) for copy in copies])}
        if self._book() is None:
            self.remove()
            self._client.create_collection(self._name, metadata=held, embedding_function=None)
        self._book().modify(metadata=held)
        self._sweep({self._name, *(f"{self._name}-{copy.number}" for copy in copies)})
        self._book().delete(where={"version": {"$nin": [0, *(copy.number for copy in copies)]}})

    def return_to(self, number: int) -> None:
        self._delete(number, absent(self._named(number), self._targets))
        super().return_to(number)

    def create_copy(self, copy: Copy, model: OffsetModel) -> None:
        how = {"hnsw": {**self._hnsw, "space": "l2" if self.metric is Metric.EUCLIDEAN else "ip"}}
        name, named = f"{self._name}-{copy.number}", {OF: self._id}
        self._client.create_collection(name, metadata=named, configuration=how, embedding_function=None)
        text = base64.b64encode(model.to_bytes()).decode()
        for start in range(0, len(text), PART):
            held = {"version": copy.number, "start": start, "model": text[start : start + PART]}
            self._book().add(ids=[f"{copy.number}.{start}"], embeddings=[[0.0]], metadatas=[held])

    def model_bytes(self, copy: Copy) -> bytes:
        parts = self._book().get(where={"version": copy.number}, include=["metadatas"])["metadatas"]
        return base64.b64decode("".join(each["model"] for each in sorted(parts, key=lambda each: int(each["start"]))))

    def write_copy(self, copy: Copy, ids: Sequence[Id], vectors: np.ndarray) -> None:
        self._named(copy.number).upsert(ids=list(ids), embeddings=vectors)

    def remove(self, progress: Progress | None = None) -> None:
        self._sweep(set())

    def _ours(self) -> dict[str, Any]:
        """The collections of this correction, or of one that a collection of the same name has left."""
        ours = re.compile(rf"{re.escape(self._name)}(-\d+)?").fullmatch
        every = {each.name: each for each in self._client.list_collections() if ours(each.name)}
        return {name: Told(each, self.url) for name, each in sorted(every.items()) if OF in (each.metadata or {})}

    def _book(self) -> Any:
        """What holds the models; None if there is no correction."""
        book = self._ours().get(self._name)
        return book if book is not None and book.metadata[OF] == self._id else None

    def _named(self, number: int) -> Any:
        name = f"{self._name}-{number}"
        return Told(self._client.get_collection(name, embedding_function=None)._of, self.url, name)

    def _delete(self, number: int, ids: Collection[str]) -> None:
        if ids:
            self._named(number).delete(ids=list(ids))

    def _sweep(self, kept: Collection[str]) -> None:
        """Deletes the collections of this correction but `kept`, that of the models first."""
        self._looked = -np.inf
        for name in self._ours():
            if name not in kept:
                self._client.delete_collection(name)


def absent(among: Any, other: Any) -> set[str]:
    """The ids in one collection that the other lacks."""
    found: set[str] = set()
    for start in range(0, among.count() + BATCH, 10 * BATCH):
        ids = among.get(limit=10 * BATCH, offset=start, include=[])["ids"]
        found |= set(ids) - set(other.get(ids=ids, include=[])["ids"]) if ids else set()
    return found


def _asked(collection: Any, queries: np.ndarray, k: int, among: Collection[str] | None) -> Hits:
    if among is not None and not among:
        return Hits([[] for _ in queries], [[] for _ in queries])
    ids = None if among is None else list(among)
    found = collection.query(query_embeddings=queries, n_results=k, ids=ids, include=["distances"])
    return Hits(found["ids"], found["distances"])


def open_url(url: str) -> ChromaStore:
    """The store behind `chroma:FOLDER/COLLECTION`, or `chroma://HOST:8000/COLLECTION` (or `chroma+https`), which may
    end in `?tenant=T&database=D`. Raises StoreError if there is none."""
    parts, (place, _, name) = urlsplit(url), url.partition(":")[2].rpartition("/")
    chroma = Told(chromadb, url)
    if "@" in parts.netloc:
        raise StoreError(
            "a chroma:// URL takes no user and no password: name host, port and collection, and pass a client with "
            "settings of its own to hubplugin_chroma.ChromaStore"
        )
    if parts.netloc:
        name, where = parts.path.strip("/"), dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := sorted(where.keys() - {"tenant", "database"}):
            raise StoreError(f"{url}: {unknown[0]}= is unknown; expected tenant= or database=")
        client = chroma.HttpClient(parts.hostname, parts.port or 8000, ssl=parts.scheme == "chroma+https", **where)
    elif (Path(place) / "chroma.sqlite3").is_file():
        client = chroma.PersistentClient(place)
    else:
        raise StoreError(f"{url}: {place!r} is no folder of Chroma; expected chroma:FOLDER/COLLECTION")
    return ChromaStore(client, Told(client, url).get_collection(name, embedding_function=None), url)
