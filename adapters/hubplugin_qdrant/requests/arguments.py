"""The arguments of the client's search methods as one `QueryRequest`, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from qdrant_client import grpc, models
from qdrant_client.conversions.conversion import GrpcToRest

from hubplugin_qdrant import plain_client
from hubplugin_qdrant.operations import Arguments

_ARGUMENTS = {
    "prefetch": "prefetch",
    "query": "query",
    "using": "using",
    "filter": "query_filter",
    "params": "search_params",
    "score_threshold": "score_threshold",
    "limit": "limit",
    "offset": "offset",
    "with_payload": "with_payload",
    "with_vector": "with_vectors",
    "lookup_from": "lookup_from",
}
"""The fields of `QueryRequest`, and what they are called among the client's arguments."""

_FIELDS = {argument: name for name, argument in _ARGUMENTS.items()}

_DEFAULTS = models.QueryRequest(limit=10, with_payload=True, with_vector=False)
"""What the client's methods do without arguments."""


def as_request(arguments: Arguments) -> models.QueryRequest:
    """The arguments of `query_points` as one request."""
    fields = {_FIELDS[name]: _rest(value) for name, value in arguments.items() if name in _FIELDS}
    prefetch = fields.get("prefetch")
    if dict in map(type, fields.values()) or (isinstance(prefetch, list) and dict in map(type, prefetch)):
        return models.QueryRequest.model_validate({**_DEFAULTS.__dict__, **fields})
    return plain_client.changed(_DEFAULTS, fields)


_FROM_GRPC: dict[type, Callable[..., object]] = {
    grpc.PointId: GrpcToRest.convert_point_id,
    grpc.PrefetchQuery: GrpcToRest.convert_prefetch_query,
    grpc.Filter: GrpcToRest.convert_filter,
    grpc.SearchParams: GrpcToRest.convert_search_params,
    grpc.LookupLocation: GrpcToRest.convert_lookup_location,
    grpc.WithVectorsSelector: GrpcToRest.convert_with_vectors_selector,
}


def _rest(value: object) -> Any:
    """`value`, an argument of the client, in the form that a prefetch takes."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list) and value and isinstance(value[0], grpc.PrefetchQuery):
        return [_rest(each) for each in value]
    convert = _FROM_GRPC.get(type(value))
    return value if convert is None else convert(value)


def as_arguments(arguments: Arguments, request: models.QueryRequest) -> Arguments:
    """`arguments` with the fields of `request` in their place."""
    fields = request.__dict__
    return arguments | {argument: fields[name] for name, argument in _ARGUMENTS.items()}
