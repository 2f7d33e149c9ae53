"""A Chroma collection as a `Store`: `chroma:FOLDER/COLLECTION`, or `chroma://HOST:8000/COLLECTION` on a server.

A correction of `photos` is a copy of its vectors, the collection `photos--hub-1`, and its model, `photos--hub-1-model`;
the next is `photos--hub-2`. The manifest in the metadata of the collection `photos--hub` says which copy searches use,
so that one request switches. `photos` itself is never written to.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import chromadb
import httpx
import numpy as np
from chromadb.api import ClientAPI
from chromadb.errors import ChromaError, InternalError

from hubplugin.compute import Compute
from hubplugin.copies import BATCH, Copy, CopyStore, CopyWriting
from hubplugin.corrections import Manifest
from hubplugin.errors import StoreError
from hubplugin.jobs.write import Counts, compare, write_wrong
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.store import Batch, ErrorTranslator, Hits, Id

OURS, MANIFEST = "hubplugin", "hubplugin:manifest"
"""Metadata of our collections, and where that of the first holds the manifest."""

METRICS = {"cosine": Metric.COSINE, "ip": Metric.DOT, "l2": Metric.EUCLIDEAN}
SPACES = {Metric.COSINE: "ip", Metric.DOT: "ip", Metric.EUCLIDEAN: "l2"}
"""Of copies."""
ERRORS = (ChromaError, ValueError, httpx.HTTPError)

SAMPLE = 20
"""Targets whose copies a wrapped collection compares beside those that a search returns."""

UNSEEN = "Error finding id"
"""What Chroma says of a target in a folder that another process has added: its index does not know of it."""


def damage(error: BaseException | None) -> str:
    """What to say where a collection can never be read again: a kill while Chroma writes an index leaves its files of
    different ages. A locked or full database is an InternalError, too, and passes; so does what a client cannot see."""
    if not isinstance(error, InternalError) or "database" in str(error):
        return ""
    if UNSEEN in str(error):
        return " (another process has written to this folder, and this one reads it only when it starts anew)"
    return " (damaged, as by a kill; if it is a copy of ours, `hubplugin refresh` makes it anew)"


class ChromaStore(CopyStore):
    """See `hubplugin.store.Store`. every: after how many seconds a search looks again which copy is active, and
    compares copies with what others may have changed past hubplugin."""

    shared = True
    place = "collection"

    def __init__(
        self,
        client: ClientAPI,
        collection: chromadb.Collection,
        url: str | None = None,
        every: float = 0.0,
    ):
        self.url = url or f"chroma:{collection.name}"
        self._client, self._targets = (
            ErrorTranslator(part, self.url, ERRORS, damage)
            for part in (client, collection)
        )
        self._hnsw: dict[str, Any] = collection.configuration_json.get("hnsw") or {}
        if not self._hnsw:
            raise StoreError(
                f"{self.url} has another index than HNSW, as in Chroma Cloud; use a server or a folder"
            )
        self.metric = METRICS[self._hnsw["space"]]
        self.name, self.gallery = f"{collection.name}--hub", str(collection.id)
        self._every, self._looked, self._settled = every, -np.inf, False
        self._rng = np.random.default_rng()

    @property
    def dim(self) -> int:  # type: ignore[override]
        for page in read_pages(self._targets, ["embeddings"]):
            return len(page["embeddings"][0])
        if (version := self.read_manifest().find_current()[0]) is not None:
            return version.dim
        raise StoreError(
            f"{self.url} is empty, so that its dimension is not known; add its targets first"
        )

    def count(self) -> int:
        return int(self._targets.count())

    def batches(
        self, copy: Copy | None, field: str | None, ids: Sequence[Id] | None = None
    ) -> Iterator[Batch]:
        """As of every `CopyStore`, for `copy`, `field` and `ids`. Of a copy that cannot be read there are no
        offsets."""
        include = ["embeddings", *(["metadatas"] if field else [])]
        for page in (
            read_pages(self._targets, include)
            if ids is None
            else self._read_visible(include, ids)
        ):
            stored = {} if copy is None else self._read_copy(copy, page["ids"]) or {}
            values = (
                [(metadata or {}).get(field) for metadata in page["metadatas"]]
                if field
                else None
            )
            yield self.batch(
                copy,
                page["ids"],
                np.asarray(page["embeddings"], np.float32),
                stored,
                values,
            )

    def _read_visible(
        self, include: Sequence[str], ids: Sequence[Id]
    ) -> Iterator[dict[str, Any]]:
        """The targets `ids`, save those that another process has added to this folder: this one cannot read
        their vectors, and plain searches leave them out, too."""
        try:
            yield from list(read_pages(self._targets, include, ids))
        except StoreError as error:
            if UNSEEN not in str(error):
                raise
            for half in (
                (ids[: len(ids) // 2], ids[len(ids) // 2 :]) if len(ids) > 1 else ()
            ):
                yield from self._read_visible(include, half)

    def is_readable(self, version: Copy) -> bool:
        is_there = self.name_of(version.number) in self._list_ours()
        return is_there and all(
            self._read_copy(version, page["ids"]) is not None
            for page in read_pages(self._targets, [])
        )

    def _read_copy(self, copy: Copy, ids: Sequence[str]) -> dict[Id, Any] | None:
        """What `copy` holds of `ids`, None if it cannot be read."""
        try:
            page = self._open_copy(copy).get(ids=ids, include=["embeddings"])
        except StoreError as error:
            if damage(error.__cause__):
                return None
            raise
        return dict(zip(page["ids"], page["embeddings"], strict=True))

    def nearest(
        self,
        copy: Copy | None,
        queries: np.ndarray,
        k: int,
        among: Collection[Id] | None,
    ) -> Hits:
        if among is not None and not among:
            return Hits([[] for _ in queries], [[] for _ in queries])
        collection = self._targets if copy is None else self._copy
        answer = collection.query(
            query_embeddings=queries,
            n_results=k,
            ids=None if among is None else list(among),
            include=["distances"],
        )
        return Hits(answer["ids"], answer["distances"])

    def active(self, *, anew: bool = False) -> Copy | None:
        """As of at most `every` seconds ago."""
        if anew or time.monotonic() > self._looked + self._every:
            self._active, self._settled = super().active(), False
            if self._active is not None:
                self._copy = self._open_copy(self._active)
            self._looked = time.monotonic()
        return self._active

    def is_fresh(self, copy: Copy) -> bool:
        """No for the first search after each look, which compares what it finds, some targets at random and the last
        one. No for all searches, too, as long as any of these is wrong, or copies and targets differ in number."""
        if self._settled or not self._every:
            return self._settled and not self._wrong
        count = self.count()
        starts = [int(self._rng.integers(max(count - SAMPLE, 1))), max(count - 1, 0)]
        samples = [
            self._targets.get(limit=SAMPLE, offset=start, include=[])["ids"]
            for start in starts
        ]
        self.read_offsets(copy, {key for page in samples for key in page})
        self._settled = count == self._copy.count()
        return False

    def update_copy(self, ids: Sequence[str]) -> None:
        """Puts the targets `ids`, as they are now, into the active copy; what is deleted leaves it."""
        copy = self.active(anew=True)
        if copy is not None and ids:
            model = self.model(copy)
            batches = list(self.batches(copy, None, ids))
            compared = compare(self, model, batches, Counts(), Compute(), "keeping")
            write_wrong(CopyWriting(self, model, copy, "active"), compared)
            if gone := set(ids).difference(*(batch.ids for batch in batches)):
                self._open_copy(copy).delete(ids=list(gone))

    def read_text(self) -> str | None:
        ours = self._list_ours()
        return ours[self.name].metadata.get(MANIFEST, "") if self.name in ours else None

    def write_manifest(self, manifest: Manifest[Copy]) -> None:
        metadata = {OURS: "1", MANIFEST: manifest.model_dump_json()}
        if self.name in self._list_ours():
            self._client.get_collection(self.name, embedding_function=None).modify(
                metadata=metadata
            )
        else:
            self._client.create_collection(
                self.name, metadata=metadata, embedding_function=None
            )
        self._looked = -np.inf

    def switch(self, version: Copy) -> None:
        super().switch(version)
        self.update_copy(
            list(read_ids(self._open_copy(version)) - read_ids(self._targets))
        )

    def write_model(self, version: Copy, model: OffsetModel) -> None:
        for name in (
            self.name_of(version.number),
            self.name_of(version.number, "model"),
        ):
            self.drop(name)
        collection = self._client.create_collection(
            name, metadata={OURS: "1"}, embedding_function=None
        )
        for number, part in enumerate(model.to_texts()):
            collection.add(
                ids=[str(number)],
                embeddings=[[0.0]],
                metadatas=[{"number": number, "part": part}],
            )

    def read_model(self, version: Copy) -> OffsetModel:
        collection = self._client.get_collection(
            self.name_of(version.number, "model"), embedding_function=None
        )
        parts = sorted(
            collection.get(include=["metadatas"])["metadatas"],
            key=lambda part: int(part["number"]),
        )
        return OffsetModel.from_texts([part["part"] for part in parts], self.url)

    def make_room(self, version: Copy) -> None:
        name, hnsw = (
            self.name_of(version.number),
            {**self._hnsw, "space": SPACES[self.metric]},
        )
        if name not in self._list_ours():
            self._client.create_collection(
                name,
                metadata={OURS: "1"},
                configuration={"hnsw": hnsw},
                embedding_function=None,
            )

    def write_copy(self, copy: Copy, ids: Sequence[Id], vectors: np.ndarray) -> None:
        self._open_copy(copy).upsert(ids=list(ids), embeddings=vectors)

    def drop(self, name: str) -> None:
        self._looked = -np.inf
        if name in self._list_ours():
            self._client.delete_collection(name)

    def _list_ours(self) -> dict[str, Any]:
        """The collections that a correction has made, of whatever collection, by name."""
        return {
            place.name: place
            for place in self._client.list_collections()
            if OURS in (place.metadata or {})
        }

    def _open_copy(self, copy: Copy) -> Any:
        return self._client.get_collection(
            self.name_of(copy.number), embedding_function=None
        )


def read_pages(
    collection: Any, include: Sequence[str], ids: Sequence[Id] | None = None
) -> Iterator[dict[str, Any]]:
    """What `collection` holds, or holds of `ids`, page by page, with the fields that `include` names."""
    for start in range(
        0, collection.count() + BATCH if ids is None else len(ids), BATCH
    ):
        part = (
            {"limit": BATCH, "offset": start}
            if ids is None
            else {"ids": ids[start : start + BATCH]}
        )
        page = collection.get(**part, include=include)
        if page["ids"]:
            yield page


def read_ids(collection: Any) -> set[str]:
    return {key for page in read_pages(collection, []) for key in page["ids"]}


def open_url(url: str) -> ChromaStore:
    """The store behind `chroma:FOLDER/COLLECTION`, or `chroma://HOST:8000/COLLECTION` (or `chroma+https`), which may
    end in `?tenant=T&database=D`, and either in `?record=FOLDER`. Raises StoreError if there is none."""
    parts, (folder, _, name) = (
        urlsplit(url),
        url.partition("?")[0].partition(":")[2].rpartition("/"),
    )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    record = options.pop("record", None)
    if "@" in parts.netloc or options.keys() - (
        {"tenant", "database"} if parts.netloc else set()
    ):
        raise StoreError(
            "expected chroma:FOLDER/COLLECTION or chroma://HOST:8000/COLLECTION, with no more than ?record=FOLDER and, "
            "of a server, tenant=T&database=D behind it; a client with a password or other settings goes to "
            "hubplugin_chroma.open_store"
        )
    chroma = ErrorTranslator(chromadb, url, ERRORS, damage)
    if parts.netloc:
        client = chroma.HttpClient(
            parts.hostname,
            parts.port or 8000,
            ssl=parts.scheme == "chroma+https",
            **options,
        )
    elif (Path(folder) / "chroma.sqlite3").is_file():
        client = chroma.PersistentClient(folder)
    else:
        raise StoreError(
            f"{url}: {folder!r} is no folder of Chroma; expected chroma:FOLDER/COLLECTION"
        )
    store = ChromaStore(
        client, client.get_collection(name, embedding_function=None), url
    )
    store.folder, store.record = (
        None if parts.netloc else Path(folder),
        None if record is None else Path(record),
    )
    return store
