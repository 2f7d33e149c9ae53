"""The additive methods by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from inspect import Parameter as Argument
from inspect import signature
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from hubplugin.compute import Compute
from hubplugin.errors import InputError, Parameter
from hubplugin.methods.base import (
    SPACINGS,
    SURVEYED,
    FitInput,
    Method,
    Whole,
    spacing_ratio,
)
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

QUERY_DEPENDENT = ("dis", "dualdis", "dsl", "gc")
"""Those of `hubplugin.rerank`, which this package does not know, by name: errors say where to find them."""

__all__ = [
    "METHODS",
    "SPACINGS",
    "SURVEYED",
    "FitInput",
    "Method",
    "Whole",
    "build_method",
    "configure",
    "spacing_ratio",
]


Configuration = TypeVar("Configuration", bound=BaseModel)


def configure(method: str, **parameters: Setting) -> Method:
    """The method called `method` with `parameters`; raises InputError for an unknown name or a value out of range."""
    return build_method(METHODS, method, parameters)


def build_method(
    methods: Mapping[str, type[Configuration]],
    method: str,
    parameters: Mapping[str, Setting],
    caller: Callable[..., object] | None = None,
) -> Configuration:
    """The configuration of a method.

    Args:
        methods: all that there are, by name.
        method: the name.
        parameters: those of the method.
        caller: the function whose keywords the parameters were: a misspelt argument of it lies among them.

    Raises:
        InputError: one line, which lists the known names or parameters, or names the allowed range.
    """
    if not isinstance(method, str):
        raise InputError(
            f"method must be a name, not {type(method).__name__}; a gallery is given as ",
            Parameter("targets"),
        )
    if method not in methods:
        is_additive = methods is METHODS
        hint = f"use one of {', '.join(methods)}{'; hubplugin.evaluate compares them' if is_additive else ''}"
        if is_additive and method in QUERY_DEPENDENT:
            hint = (
                "it depends on the query, so it is no offset: fit it with hubplugin.rerank.fit_rule, or "
                + hint
            )
        elif not is_additive and method in METHODS:
            hint = (
                "it gives each target one offset: fit it with hubplugin.fit, or " + hint
            )
        raise InputError(f"unknown method {method!r}: {hint}")
    configuration = methods[method]
    try:
        return configuration(**parameters)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise InputError(
                *_explain_unknown(field, method, configuration.model_fields, caller)
            ) from None
        raise InputError(
            f"method {method!r}: {field}={first['input']!r} is refused: {first['msg']}"
        ) from None


def _explain_unknown(
    name: str,
    method: str,
    fields: Collection[str],
    caller: Callable[..., object] | None,
) -> list[str | Parameter]:
    """The message on a keyword that is no parameter of `method`, whose are `fields`, and no argument of `caller`."""
    message: list[str | Parameter] = [
        f"method {method!r} has no parameter {name!r}; it takes {', '.join(fields) or 'none'}"
    ]
    if name in Compute.__dataclass_fields__:
        return [*message, f"; pass it as compute=hubplugin.Compute({name}=...)"]
    arguments = [] if caller is None else [*signature(caller).parameters.values()]
    no_names = (Argument.VAR_KEYWORD, Argument.VAR_POSITIONAL)
    names = [argument.name for argument in arguments if argument.kind not in no_names]
    near = get_close_matches(name, [*fields, *names], n=1)
    takers = [
        taker
        for taker, configuration in METHODS.items()
        if name in configuration.model_fields
    ]
    if near:
        message += ["; did you mean ", Parameter(near[0]), "?"]
    elif takers:
        message += [f"; {', '.join(takers)} {'have' if len(takers) > 1 else 'has'} it"]
    elif caller is not None:
        message += [f"; {caller.__name__} itself takes {', '.join(names)}"]
    return message
