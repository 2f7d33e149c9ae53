"""The additive methods by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hubplugin.errors import InputError
from hubplugin.methods.base import FitInput, Method
from hubplugin.methods.distribution import DistributionNormalisation
from hubplugin.methods.inverted_softmax import DualInvertedSoftmax, InvertedSoftmax
from hubplugin.methods.nearest import CrossDomainLocalScaling, NearestNeighbourNormalisation
from hubplugin.methods.sinkhorn import DualBankSinkhorn, SinkhornNormalisation

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        InvertedSoftmax,
        SinkhornNormalisation,
        DualBankSinkhorn,
        DualInvertedSoftmax,
        NearestNeighbourNormalisation,
        CrossDomainLocalScaling,
        DistributionNormalisation,
    )
}

QUERY_DEPENDENT = ("dis", "dualdis", "dsl", "gc", "ssn")
"""Those of `hubplugin.activation`, which this package does not know, by name: errors say where to find them."""

__all__ = ["METHODS", "FitInput", "Method", "asked_for", "configure", "configured"]


Configuration = TypeVar("Configuration", bound=BaseModel)


def configure(method: str, **parameters: Any) -> Method:
    """The method called `method` with `parameters`; raises InputError for an unknown name or a value out of range."""
    return configured(METHODS, method, parameters)


def asked_for(method: str, parameters: Mapping[str, Any]) -> Method | None:
    """`configured` among the additive methods, but None for "auto", which is chosen later and takes no parameters."""
    if not isinstance(method, str) or method != "auto":  # an array would compare row by row
        return configured(METHODS, method, parameters)
    if parameters:
        raise InputError(f"method 'auto' takes no parameters; given: {', '.join(parameters)}")
    return None


def configured(known: Mapping[str, type[Configuration]], method: str, parameters: Mapping[str, Any]) -> Configuration:
    """The configuration called `method` among `known`; raises InputError, one line, which lists the known names or
    parameters, or names the allowed range."""
    if not isinstance(method, str):
        raise InputError(f"method must be a name, not {type(method).__name__}; a gallery is given as targets=")
    if method not in known:
        additive = known is METHODS
        hint = f"use one of {', '.join(known)}{', auto' if additive else ''}"
        if additive and method in QUERY_DEPENDENT:
            hint = "it depends on the query, so it is no offset: fit it with hubplugin.fit_rule, or " + hint
        elif not additive and method in METHODS:
            hint = "it gives each target one offset: fit it with hubplugin.fit, or " + hint
        raise InputError(f"unknown method {method!r}: {hint}")
    chosen = known[method]
    try:
        return chosen(**parameters)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            taken = f"it takes {', '.join(chosen.model_fields)}" if chosen.model_fields else "it takes none"
            raise InputError(f"method {method!r} has no parameter {field!r}; {taken}") from None
        raise InputError(f"method {method!r}: {field}={first['input']!r} is refused: {first['msg']}") from None
