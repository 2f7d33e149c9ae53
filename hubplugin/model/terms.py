"""The terms of a model. Each computes one number for a target from a bank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, TypeAlias

import numpy as np

from hubplugin.compute import LogSum, MeanOfLargest
from hubplugin.model.file import Header


@dataclass(frozen=True)
class LogSumExp:
    """scale * LSE_u( s(b_u, t)/tau + log_weights_u ) over a bank.

    bank: The bank [m, d].
    log_weights: The log weights [m]; None means 0.
    answers: The similarity from which a target counts as the answer of bank query u,
        [m]. The sum of a target leaves out u if the target is its answer, and then the
        largest similarity of the rest. None leaves nothing out.
    """

    kind: ClassVar[str] = "log_sum_exp"
    bank: np.ndarray
    tau: float
    scale: float
    log_weights: np.ndarray | None = None
    answers: np.ndarray | None = None

    @property
    def reduction(self) -> LogSum:
        """The reduction that computes the sum."""
        return LogSum(self.tau, self.log_weights)


@dataclass(frozen=True)
class TopKMean:
    """scale * mean of the k largest s(b_u, t) over a bank [m, d].

    answers: As in `LogSumExp`.
    """

    kind: ClassVar[str] = "top_k_mean"
    bank: np.ndarray
    k: int
    scale: float
    answers: np.ndarray | None = None

    @property
    def reduction(self) -> MeanOfLargest:
        """The reduction that computes the mean."""
        return MeanOfLargest(self.k)


@dataclass(frozen=True)
class Dot:
    """scale * s(v, t) for one vector v, held as a bank [1, d]."""

    kind: ClassVar[str] = "dot"
    answers: ClassVar[None] = None
    bank: np.ndarray
    scale: float

    @property
    def reduction(self) -> MeanOfLargest:
        """The reduction that gives the one similarity."""
        return MeanOfLargest(1)


Term: TypeAlias = LogSumExp | TopKMean | Dot

TERMS: dict[str, Callable[..., Term]] = {
    term.kind: term for term in (LogSumExp, TopKMean, Dot)
}


def pack(terms: Sequence[Term]) -> tuple[list[Header], dict[str, np.ndarray]]:
    """Return `terms` as headers of a file, and their arrays by name.

    In a header, {"tensor": NAME} replaces an array. An array that several terms share
    is stored once.
    """
    headers = []
    tensors = {}
    names: dict[int, str] = {}  # of arrays, by their `id`
    for number, term in enumerate(terms):
        header: Header = {"kind": term.kind}
        for field in fields(term):
            value = getattr(term, field.name)
            if isinstance(value, np.ndarray):
                name = names.setdefault(id(value), f"{number}.{field.name}")
                tensors[name] = np.ascontiguousarray(value)
                value = {"tensor": name}
            header[field.name] = value
        headers.append(header)
    return headers, tensors


def unpack(
    headers: Sequence[Header], tensors: dict[str, np.ndarray]
) -> tuple[Term, ...]:
    """Return the terms from the headers and arrays that `pack` returned."""
    terms = []
    for header in headers:
        values = dict(header)
        for field, value in header.items():
            if isinstance(value, dict):
                values[field] = tensors[value["tensor"]]
        terms.append(TERMS[values.pop("kind")](**values))
    return tuple(terms)
