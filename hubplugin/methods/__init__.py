"""The additive methods by name."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

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

__all__ = ["METHODS", "FitInput", "Method", "configure"]


def configure(method: str, **parameters: Any) -> Method:
    """The method called `method` with `parameters`; raises InputError for an unknown name or a value out of range."""
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}: use one of {', '.join(METHODS)}, auto")
    chosen = METHODS[method]
    try:
        return chosen(**parameters)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise InputError(
                f"method {method!r} has no parameter {field!r}; it takes {', '.join(chosen.model_fields)}"
            ) from None
        raise InputError(f"method {method!r}: {field}={first['input']!r} is refused: {first['msg']}") from None
