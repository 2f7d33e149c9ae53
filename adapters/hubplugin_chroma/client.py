"""A Chroma collection that answers corrected."""

from __future__ import annotations

import inspect
from typing import Any

import chromadb
import numpy as np
from chromadb.api import ClientAPI
from chromadb.api.types import maybe_cast_one_to_many

from hubplugin_chroma.store import ChromaStore


def _bind(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method of `Collection` by their names."""
    bound = inspect.signature(getattr(chromadb.Collection, method)).bind(
        None, *args, **kwargs
    )
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def _write_through(method: str) -> Any:
    """The method of `Collection`, after which the copy that searches use has what it wrote."""

    def write(self: HubCollection, *args: Any, **kwargs: Any) -> None:
        getattr(chromadb.Collection, method)(self, *args, **kwargs)
        self._store.update_copy(
            maybe_cast_one_to_many(_bind(method, args, kwargs)["ids"]) or []
        )

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
        request = _bind("query", args, kwargs)
        embeddings = self._validate_and_prepare_query_request(**request)["embeddings"]
        among = self._filter_ids(request)
        hits = self._store.search(
            np.asarray(embeddings, np.float32), request["n_results"], among=among
        )
        ids = list({str(key) for row in hits.ids for key in row})
        if not ids:
            return super().query(*args, **kwargs)
        has_loader = (
            self._data_loader is not None
        )  # without one, `get` refuses data, which `query` leaves out
        include = [
            field
            for field in request["include"]
            if field != "distances" and (has_loader or field != "data")
        ]
        records: Any = self.get(ids=ids, include=include) if include else {"ids": ids}
        place = {key: row for row, key in enumerate(records["ids"])}
        if len(place) < len(ids):  # some have been deleted since
            self._store.active(anew=True)
            return self.query(*args, **kwargs)
        result: dict[str, Any] = dict.fromkeys(
            ("embeddings", "documents", "uris", "data", "metadatas", "distances")
        )
        for field in include:
            result[field] = [
                [records[field][place[str(key)]] for key in row] for row in hits.ids
            ]
        result |= (
            {"distances": hits.scores} if "distances" in request["include"] else {}
        )
        return {**result, "ids": hits.ids, "included": request["include"]}

    add, update, upsert = (
        _write_through("add"),
        _write_through("update"),
        _write_through("upsert"),
    )

    def delete(self, *args: Any, **kwargs: Any) -> Any:
        ids = self._filter_ids(_bind("delete", args, kwargs))
        result = super().delete(*args, **kwargs)
        self._store.update_copy(list(ids or ()))
        return result

    def _filter_ids(self, request: dict[str, Any]) -> set[str] | None:
        """The ids that pass the filters of a request, None where it has none."""
        filters = {
            name: request[name]
            for name in ("ids", "where", "where_document")
            if request[name] is not None
        }
        return set(self.get(**filters, include=[])["ids"]) if filters else None
