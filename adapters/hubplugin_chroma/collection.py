"""`HubCollection`: a Chroma `Collection` that answers corrected, and keeps the correction up with what it writes."""

from __future__ import annotations

import inspect
from typing import Any

import chromadb
import numpy as np
from chromadb.api import ClientAPI
from chromadb.api.types import maybe_cast_one_to_many

from hubplugin.store import Id
from hubplugin_chroma.store import ChromaStore

FILTERS = ("ids", "where", "where_document")

LOOK = 1.0
"""After so many seconds a query sees what others switched, added or deleted: three small requests."""


def _named(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method of `Collection` by their names."""
    bound = inspect.signature(getattr(chromadb.Collection, method)).bind(None, *args, **kwargs)
    bound.apply_defaults()
    return {key: value for key, value in bound.arguments.items() if key != "self"}


def _kept(method: str) -> Any:
    """The method of `Collection`, after which the copy that searches use has what it wrote."""

    def write(self: HubCollection, *args: Any, **kwargs: Any) -> None:
        getattr(chromadb.Collection, method)(self, *args, **kwargs)
        self._store.keep(maybe_cast_one_to_many(_named(method, args, kwargs)["ids"]) or [])

    return write


class HubCollection(chromadb.Collection):
    """`collection` of `client`, corrected once a correction is applied to it, and as it was until then:

        photos = HubCollection(client, client.get_collection("photos"))
        photos.query(query_embeddings=[vector], n_results=10)

    distances: less the offset (with l2 less twice the offset). A filter costs a request for the ids that pass it.
    """

    def __init__(self, client: ClientAPI, collection: chromadb.Collection):
        vars(self).update(vars(collection))
        self._store = ChromaStore(client, collection, every=LOOK)

    def query(self, *args: Any, **kwargs: Any) -> Any:
        if self._store.active() is None:
            return super().query(*args, **kwargs)
        asked = _named("query", args, kwargs)
        embeddings = self._validate_and_prepare_query_request(**asked)["embeddings"]
        among = self._among(asked) if any(asked[key] is not None for key in FILTERS) else None
        hits = self._store.nearest(np.asarray(embeddings, np.float32), asked["n_results"], among)
        if not any(hits.ids):
            return super().query(*args, **kwargs)
        include = [each for each in asked["include"] if each != "distances"]
        found = list({str(key) for row in hits.ids for key in row})
        held: dict[str, Any] = {**self.get(ids=found, include=include)} if include else {"ids": []}
        at: dict[Id, int] = {key: row for row, key in enumerate(held["ids"])}
        result: dict[str, Any] = dict.fromkeys(("embeddings", "documents", "uris", "data", "metadatas", "distances"))
        result |= {each: [[held[each][at[key]] for key in row] for row in hits.ids] for each in include}
        result |= {"distances": hits.scores} if "distances" in asked["include"] else {}
        return {**result, "ids": hits.ids, "included": asked["include"]}

    add, update, upsert = _kept("add"), _kept("update"), _kept("upsert")

    def delete(self, *args: Any, **kwargs: Any) -> Any:
        ids = self._among(_named("delete", args, kwargs))
        result = super().delete(*args, **kwargs)
        self._store.keep(ids)
        return result

    def _among(self, asked: dict[str, Any]) -> list[str]:
        return self.get(**{key: asked[key] for key in FILTERS}, include=[])["ids"]
