"""The additive methods by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from hubplugin.errors import InputError, Parameter
from hubplugin.methods.base import Method
from hubplugin.methods.blend import Blend
from hubplugin.methods.distribution import DistributionNormalisation
from hubplugin.methods.inverted_softmax import DualInvertedSoftmax, InvertedSoftmax
from hubplugin.methods.nearest import (
    CrossDomainLocalScaling,
    NearestNeighbourNormalisation,
)
from hubplugin.methods.sinkhorn import DualBankSinkhorn, SinkhornNormalisation
from hubplugin.model import Setting

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Blend,
        InvertedSoftmax,
        SinkhornNormalisation,
        DualBankSinkhorn,
        DualInvertedSoftmax,
        NearestNeighbourNormalisation,
        CrossDomainLocalScaling,
        DistributionNormalisation,
    )
}

__all__ = ["METHODS", "Method", "build_method"]

Configuration = TypeVar("Configuration", bound=BaseModel)


def build_method(
    methods: Mapping[str, type[Configuration]],
    method: str,
    parameters: Mapping[str, Setting],
) -> Configuration:
    """Return the configuration of a method.

    Args:
        methods: All methods, by name.
        method: The name of the method.
        parameters: The parameters of the method.

    Raises:
        InputError: A name or parameter is unknown, or a value is out of range.
    """
    if not isinstance(method, str):
        raise InputError(
            f"method must be a name, not {type(method).__name__}; a gallery is given as ",
            Parameter("targets"),
        )
    if method not in methods:
        raise InputError(
            f"unknown method {method!r}: use one of {', '.join(methods)}; hubplugin.fit "
            "accepts methods with one offset per target, hubplugin.rerank the others"
        )
    configuration = methods[method]
    try:
        return configuration(**parameters)
    except ValidationError as error:
        first_error = error.errors()[0]
        field = ".".join(map(str, first_error["loc"]))
        if first_error["type"] == "extra_forbidden":
            accepted = ", ".join(configuration.model_fields) or "none"
            problem = (
                f"{field!r} is neither an argument nor a parameter of method "
                f"{method!r}, which takes {accepted}"
            )
        else:
            value = first_error["input"]
            problem = (
                f"method {method!r}: {field}={value!r} is refused: {first_error['msg']}"
            )
        raise InputError(problem) from None
