"""A Chroma collection that answers corrected."""

from __future__ import annotations

import inspect
from typing import Any

import chromadb
import numpy as np
from chromadb.api import ClientAPI
from chromadb.api.types import maybe_cast_one_to_many

from hubplugin.store import Id
from hubplugin_chroma.store import ChromaStore


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

    distances: less the offset (with l2 less twice the offset). A filter costs a request for the ids that pass it, and
    once a second five small ones tell what others switched, added or deleted.
    """

    def __init__(self, client: ClientAPI, collection: chromadb.Collection):
        vars(self).update(vars(collection))
        self._store = ChromaStore(client, collection, every=1.0)

    def query(self, *args: Any, **kwargs: Any) -> Any:
        if self._store.active() is None:
            return super().query(*args, **kwargs)
        asked = _named("query", args, kwargs)
        embeddings = self._validate_and_prepare_query_request(**asked)["embeddings"]
        among = self._among(asked)
        hits = self._store.search(np.asarray(embeddings, np.float32), asked["n_results"], among=among)
        if not any(hits.ids):
            return super().query(*args, **kwargs)
        loads = self._data_loader is not None  # without one, `get` refuses data, which `query` leaves out
        include = [each for each in asked["include"] if each != "distances" and (loads or each != "data")]
        found = list({str(key) for row in hits.ids for key in row})
        held: dict[str, Any] = {**self.get(ids=found, include=include)} if include else {"ids": []}
        at: dict[Id, int] = {key: row for row, key in enumerate(held["ids"])}
        if include and not at.keys() >= set(found):  # some have been deleted since
            self._store.active(anew=True)
            return self.query(*args, **kwargs)
        result: dict[str, Any] = dict.fromkeys(("embeddings", "documents", "uris", "data", "metadatas", "distances"))
        result |= {each: [[held[each][at[key]] for key in row] for row in hits.ids] for each in include}
        result |= {"distances": hits.scores} if "distances" in asked["include"] else {}
        return {**result, "ids": hits.ids, "included": asked["include"]}

    add, update, upsert = _kept("add"), _kept("update"), _kept("upsert")

    def delete(self, *args: Any, **kwargs: Any) -> Any:
        ids = self._among(_named("delete", args, kwargs))
        result = super().delete(*args, **kwargs)
        self._store.keep(list(ids or ()))
        return result

    def _among(self, asked: dict[str, Any]) -> set[str] | None:
        """The ids that pass the filters of a request, None where it has none."""
        filters = {key: asked[key] for key in ("ids", "where", "where_document") if asked[key] is not None}
        return set(self.get(**filters, include=[])["ids"]) if filters else None
