"""A Chroma collection as a `Store`, in a folder or on a server.

Its URL is `chroma:FOLDER/COLLECTION` or `chroma://HOST:8000/COLLECTION`.

For a collection `photos`, the offsets are in the collection `photos--hub-WORD` and the
model is in `photos--hub-WORD-model`. The manifest is in the metadata of the collection
`photos--hub`, so a switch takes one request. Nothing is written to `photos`: if Chroma
is killed while it writes to a collection, the collection may become unreadable.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import chromadb
import httpx
import numpy as np
from chromadb.api import ClientAPI
from chromadb.errors import ChromaError, NotFoundError

from hubplugin.candidates import (
    MARK,
    Candidates,
    CandidateStore,
    CandidateWriting,
    plain_batch,
    with_offsets,
)
from hubplugin.compute import Compute
from hubplugin.errors import StoreError
from hubplugin.jobs.write import Counts, compare, rewrite_differing
from hubplugin.metric import Metric
from hubplugin.store import Batch, ErrorTranslator, Id

BATCH = 500
"""The number of targets per request. A server rejects requests above about 32 MB."""

UNREACHED = 1_000_000_000
"""A number of records that the collections of a correction never reach.

Used as Chroma's threshold for writing an index, it means that no index is ever
written. Offsets need none, and a kill during that write would make the collection
unreadable.
"""

COLUMNS = ("ids", "distances", "embeddings", "documents", "uris", "metadatas")
"""The fields in Chroma's response to a query."""

METRICS = {"cosine": Metric.COSINE, "ip": Metric.DOT, "l2": Metric.EUCLIDEAN}
ERRORS = (ChromaError, ValueError, httpx.HTTPError)


class ChromaStore(CandidateStore):
    """A Chroma collection as a store. See `hubplugin.store.Store` for its methods."""

    shared = True
    separator = "-"
    place = "collection"

    def __init__(
        self,
        client: ClientAPI,
        collection: chromadb.Collection,
        url: str | None = None,
    ):
        self.url = url or f"chroma:{collection.name}"
        self._client = ErrorTranslator(client, self.url, ERRORS)
        self._targets = ErrorTranslator(collection, self.url, ERRORS)
        hnsw = collection.configuration_json.get("hnsw")
        if not hnsw:
            raise StoreError(
                f"the index of {self.url} is not HNSW, as in Chroma Cloud; use a server "
                "or a folder"
            )
        self.metric = METRICS[hnsw["space"]]
        self.name = f"{collection.name}--hub"
        self.gallery = str(collection.id)

    @property
    def dim(self) -> int:  # type: ignore[override]
        page = self._targets.get(limit=1, include=["embeddings"])
        for vector in page["embeddings"]:
            return len(vector)
        version, _ = self.read_manifest().find_current()
        if version is None:
            raise StoreError(
                f"{self.url} is empty, so its dimension is not known; add its targets "
                "first"
            )
        return version.dim

    def count(self) -> int:
        return int(self._targets.count())

    def fetch(self, queries: np.ndarray, count: int) -> list[Candidates]:
        answer = self._targets.query(queries, n_results=count, include=["distances"])
        return as_candidates(answer)

    def how_to_search(self) -> tuple[str, str]:
        collection = f"client.get_collection({self._targets.name!r})"
        return (
            f"collection = hubplugin_chroma.HubCollection(client, {collection})",
            "this collection maps each query",
        )

    def read_fields(self, ids: Sequence[Id]) -> list[Mapping[str, Any]]:
        page = self._targets.get([*ids], include=["metadatas", "documents"])
        columns = (page["ids"], page["metadatas"], page["documents"])
        fields = {}
        for id, metadata, document in zip(*columns, strict=True):
            fields[id] = {**(metadata or {}), "document": document}
        return [fields.get(id, {}) for id in ids]

    def read_targets(self, field: str | None = None) -> Iterator[Batch]:
        include = ["embeddings"]
        if field is not None:
            include.append("metadatas")
        for page in read_pages(self._targets, include):
            values = None
            if field is not None:
                values = [(each or {}).get(field) for each in page["metadatas"]]
            yield plain_batch(page["ids"], page["embeddings"], values)

    def fields(self) -> Sequence[str]:
        """Return the keys in the metadata of the first targets."""
        page = self._targets.get(limit=BATCH, include=["metadatas"])
        return sorted(set().union(*filter(None, page["metadatas"])))

    def bring_up_to_date(self, ids: str | list[str]) -> None:
        """Write the offsets of targets, computed from their current vectors.

        Do nothing without a correction.

        ids: One id, or several.
        """
        snapshot = self.get_snapshot(anew=True)
        version = snapshot.version
        if version is None:
            return
        page = self._targets.get(ids, include=["embeddings"])
        batch = plain_batch(page["ids"], page["embeddings"])
        batches = with_offsets(iter([batch]), snapshot)
        model = self.model(version)
        compared = compare(self, model, batches, Counts(), Compute(), "keeping")
        try:
            rewrite_differing(CandidateWriting(self, version, "active"), compared)
        except StoreError:
            if self.active() == version:
                raise
            self.bring_up_to_date(ids)  # another version has become active
        self.get_snapshot(anew=True)  # searches of this store see the new offsets

    def find_place(self, name: str) -> Any:
        try:
            return self._client.get_collection(name, embedding_function=None)
        except StoreError as error:
            if isinstance(error.__cause__, NotFoundError):
                return None
            raise

    def make_place(self, name: str, mark: str) -> Any:
        place = self.open_place(name)
        if place is not None:
            place.modify(metadata={MARK: mark})
            return place
        return self._client.create_collection(
            name,
            metadata={MARK: mark},
            configuration={"hnsw": {"sync_threshold": UNREACHED}},
            embedding_function=None,
        )

    def mark(self, place: Any) -> str | None:
        return (place.metadata or {}).get(MARK)

    def read_texts(self, place: Any, start: int) -> list[str]:
        pages = read_pages(place, ["metadatas"], start)
        return [record["text"] for page in pages for record in page["metadatas"]]

    def append_text(self, place: Any, text: str) -> None:
        key = uuid.uuid4().hex
        place.add([key], embeddings=[[0.0]], metadatas=[{"text": text}])

    def drop(self, name: str) -> None:
        if self.open_place(name) is not None:
            self._client.delete_collection(name)


def read_pages(
    collection: Any, include: Sequence[str], start: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield the records of a collection, page by page.

    Args:
        collection: The collection.
        include: The fields of the records to read.
        start: The number of the first record.
    """
    while True:
        page = collection.get(limit=BATCH, offset=start, include=include)
        if not page["ids"]:
            return
        yield page
        start += BATCH


def as_candidates(answer: Mapping[str, Any]) -> list[Candidates]:
    """Convert Chroma's response to a query into candidates for each query vector.

    Fields that are None are omitted.
    """
    columns = {name: answer[name] for name in COLUMNS if answer[name] is not None}
    return [
        {name: rows[query] for name, rows in columns.items()}
        for query in range(len(answer["ids"]))
    ]


def open_url(url: str) -> ChromaStore:
    """Open the store behind a URL.

    Args:
        url: `chroma:FOLDER/COLLECTION`, or `chroma://HOST:8000/COLLECTION`
            (`chroma+https`). It may end in `?tenant=T&database=D&record=FOLDER`.

    Raises:
        StoreError: The URL is of neither form, or there is no such collection.
    """
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    record = options.pop("record", None)
    if "@" in parts.netloc or options.keys() - {"tenant", "database"}:
        raise StoreError(
            "expected chroma:FOLDER/COLLECTION or chroma://HOST:8000/COLLECTION, "
            "optionally followed by ?record=FOLDER&tenant=T&database=D; pass a client "
            "with a password or other settings to hubplugin_chroma.open_store"
        )
    folder, _, name = url.partition("?")[0].partition(":")[2].rpartition("/")
    chroma = ErrorTranslator(chromadb, url, ERRORS)
    if parts.netloc:
        ssl = parts.scheme == "chroma+https"
        client = chroma.HttpClient(parts.hostname, parts.port or 8000, ssl, **options)
    elif (Path(folder) / "chroma.sqlite3").is_file():
        client = chroma.PersistentClient(folder, **options)
    else:
        raise StoreError(
            f"{url}: {folder!r} is not a folder of Chroma; expected "
            "chroma:FOLDER/COLLECTION"
        )
    collection = client.get_collection(name, embedding_function=None)
    store = ChromaStore(client, collection, url)
    if not parts.netloc:
        store.folder = Path(folder)
    if record is not None:
        store.record = Path(record)
    return store
