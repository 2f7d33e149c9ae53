"""A Chroma collection with corrected searches."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import chromadb
import numpy as np
from chromadb.api import ClientAPI

from hubplugin.candidates import Candidates
from hubplugin_chroma.store import COLUMNS, ChromaStore, as_candidates


def updating_offsets(write: Any) -> Any:
    """Return the method `write` of a collection with an update of the offsets."""

    @functools.wraps(write)
    def write_and_update(
        self: HubCollection, ids: Any, *args: Any, **kwargs: Any
    ) -> None:
        write(self, ids, *args, **kwargs)
        self._store.bring_up_to_date(ids)

    return write_and_update


class HubCollection(chromadb.Collection):
    """A collection with corrected searches once a correction is applied to it.

        photos = HubCollection(client, client.get_collection("photos"))
        photos.query(query_embeddings=[vector], n_results=10)

    Corrected distances are reduced by the offset, or by twice the offset for l2.
    Changes made by other processes take effect within a second.
    """

    def __init__(self, client: ClientAPI, collection: chromadb.Collection):
        vars(self).update(vars(collection))
        self._store = ChromaStore(client, collection)
        self._store.snapshot_seconds = 1.0

    add = updating_offsets(chromadb.Collection.add)
    update = updating_offsets(chromadb.Collection.update)
    upsert = updating_offsets(chromadb.Collection.upsert)

    def query(self, *args: Any, **kwargs: Any) -> Any:
        """Search as a plain collection does, by corrected distances.

        The arguments and the result are those of `chromadb.Collection.query`.
        """
        plain_query = super().query
        if self._store.get_snapshot().version is None:
            return plain_query(*args, **kwargs)

        # Read the request. Chroma checks it and embeds its texts.
        bound = inspect.signature(plain_query).bind(*args, **kwargs)
        bound.apply_defaults()
        request = bound.arguments
        prepared = self._validate_and_prepare_query_request(**request)
        queries = np.asarray(prepared["embeddings"], np.float32)
        include = prepared["include"]

        # Rerank more candidates, with the fields that the result needs.
        fields = list({"distances", *include} - {"data"})  # Chroma loads data by uris
        filters = {name: request[name] for name in ("ids", "where", "where_document")}

        def fetch(queries: np.ndarray, count: int) -> list[Candidates]:
            answer = plain_query(queries, n_results=count, include=fields, **filters)
            return as_candidates(answer)

        rows = self._store.rank(queries, request["n_results"], fetch)

        # Return the rows in Chroma's format.
        answer: Any = dict.fromkeys((*COLUMNS, "data"))
        for name in {"ids", *include}.intersection(COLUMNS):
            answer[name] = [row[name] for row in rows]
        answer["included"] = include
        return self._transform_query_response(answer, include)
