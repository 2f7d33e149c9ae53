"""Which queries of a search are recorded: the dense vectors that somebody asks for the nearest of, also in prefetches.

Points that are asked for by their ids, recommendations and discoveries are documents and no queries; sparse vectors and
multi-vectors have no correction. A document in a prefetch or a batch is embedded out of sight.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
from qdrant_client import models

from hubplugin.errors import InputError
from hubplugin.recording import Recorder
from hubplugin_qdrant.cached_manifest import CorrectionCache, OfClient
from hubplugin_qdrant.operations import Arguments, Operation
from hubplugin_qdrant.requests.arguments import as_request
from hubplugin_qdrant.requests.nodes import Node, nearest, prefetches_of

Record: TypeAlias = "str | os.PathLike[str] | Recorder | None"
"""A folder, or a `Recorder` with other settings than the default's; None to record nothing."""


def recorder_of(record: Record) -> Recorder | None:
    """Raises InputError for what is neither a folder nor a `Recorder`."""
    if record is None or isinstance(record, Recorder):
        return record
    if isinstance(record, (str, os.PathLike)):
        return Recorder(record)
    raise InputError(f"record={record!r}: expected a folder, or a hubplugin.Recorder")


def recorded(operation: OfClient) -> OfClient:
    """`operation`, a search, whose queries are recorded once it has been answered."""

    def recording(cache: CorrectionCache, recorder: Recorder, arguments: Arguments) -> Operation:
        text, document = None, nearest(arguments.get("query"))
        if isinstance(document, models.Document):  # embedded here, so that its vector is known
            (request,) = yield from cache.embedded_queries([as_request(arguments)])
            text, arguments = document.text, arguments | {"query": request.query}
        found = yield from operation(cache, arguments)
        _record(cache, recorder, arguments, text)
        return found

    @functools.wraps(operation)
    def searched(cache: CorrectionCache, arguments: Arguments) -> Operation:
        recorder = cache.recorder
        return operation(cache, arguments) if recorder is None else recording(cache, recorder, arguments)

    return searched


def _record(cache: CorrectionCache, recorder: Recorder, arguments: Arguments, text: str | None) -> None:
    name = arguments["collection_name"]
    known = cache.known.get(name)
    collection = name if known is None else known.collection
    if recorder.collections is not None and recorder.collections.isdisjoint((name, collection)):
        return
    try:
        for using, query in _dense_queries(arguments):
            recorder.within(collection, using).add(query, text)
    except Exception as error:  # a search that was answered never fails
        recorder.fail(error)


def _dense_queries(arguments: Arguments) -> Iterable[tuple[str, Any]]:
    if "requests" not in arguments:
        query = nearest(arguments.get("query"))
        if not arguments.get("prefetch"):
            return [(arguments.get("using") or "", query)] if _is_dense(query) else []
        return _of_node(as_request(arguments))
    requests = [
        models.QueryRequest.model_validate(each) if isinstance(each, dict) else each for each in arguments["requests"]
    ]
    return [found for request in requests for found in _of_node(request)]


def _of_node(node: Node) -> Iterator[tuple[str, Any]]:
    query = nearest(node.query)
    if _is_dense(query):
        yield node.using or "", query
    for prefetch in prefetches_of(node.prefetch):
        yield from _of_node(prefetch)


def _is_dense(query: object) -> bool:
    if isinstance(query, np.ndarray):
        return query.ndim == 1
    return isinstance(query, list) and bool(query) and isinstance(query[0], (float, int))
