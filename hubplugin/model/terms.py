"""The three kinds of term that a model is a sum of, each over a bank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hubplugin.model.file import Header

if TYPE_CHECKING:
    from hubplugin.reductions import LogSum, MeanOfLargest


@dataclass(frozen=True)
class LogSumExp:
    """scale * LSE_u( s(b_u, t)/tau + log_weights_u ) over a bank [m, d]; log_weights [m] or None for 0.

    answers: [m], the similarity from which on a target counts as the answer of bank query u; its entry, and then the
    target's largest, are left out of the sum. None leaves nothing out.
    """

    kind: ClassVar[str] = "log_sum_exp"
    bank: np.ndarray
    tau: float
    scale: float
    log_weights: np.ndarray | None = None
    answers: np.ndarray | None = None


@dataclass(frozen=True)
class TopKMean:
    """scale * mean of the k largest s(b_u, t) over a bank [m, d]. answers: as in `LogSumExp`."""

    kind: ClassVar[str] = "top_k_mean"
    bank: np.ndarray
    k: int
    scale: float
    answers: np.ndarray | None = None


@dataclass(frozen=True)
class Dot:
    """scale * s(v, t) for one vector v, held as a bank [1, d]."""

    kind: ClassVar[str] = "dot"
    bank: np.ndarray
    scale: float


Term = LogSumExp | TopKMean | Dot
TERMS: dict[str, Callable[..., Term]] = {term.kind: term for term in (LogSumExp, TopKMean, Dot)}


def of_one_bank(terms: Sequence[Term]) -> list[list[Term]]:
    """`terms` in lists that share a bank, and what is left out of it, so that one pass serves each list."""
    lists: list[list[Term]] = []
    for term in terms:
        for others in lists:
            first = others[0]
            if isinstance(term, Dot) or isinstance(first, Dot) or term.bank is not first.bank:
                continue
            if term.answers is first.answers:
                others.append(term)
                break
        else:
            lists.append([term])
    return lists


def reduction_of(term: Term) -> LogSum | MeanOfLargest:
    """What `reductions.reduce` computes for a term that has a bank of examples."""
    from hubplugin.reductions import LogSum, MeanOfLargest

    if isinstance(term, LogSumExp):
        return LogSum(term.tau, term.log_weights)
    assert isinstance(term, TopKMean)
    return MeanOfLargest(term.k)


def packed(terms: Sequence[Term]) -> tuple[list[Header], dict[str, np.ndarray]]:
    """`terms` as a list of fields for the header of a file, and the arrays in them by name."""
    tensors: dict[str, np.ndarray] = {}
    listed = []
    places: dict[int, str] = {}
    for number, term in enumerate(terms):
        fields: Header = {"kind": term.kind}
        for key, value in vars(term).items():
            if isinstance(value, np.ndarray):
                # An array that several terms share is held once; the others name it.
                place = places.setdefault(id(value), f"{number}.{key}")
                if place == f"{number}.{key}":
                    tensors[place] = np.ascontiguousarray(value)
                else:
                    fields[key] = {"as": place}
            elif value is not None:
                fields[key] = value
        listed.append(fields)
    return listed, tensors


def unpacked(listed: Sequence[Header], tensors: dict[str, np.ndarray]) -> tuple[Term, ...]:
    """The terms of which `packed` made the fields `listed` and the arrays `tensors`."""
    terms = []
    for number, fields in enumerate(listed):
        prefix = f"{number}."
        arrays = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        arrays |= {key: tensors[value["as"]] for key, value in fields.items() if isinstance(value, dict)}
        terms.append(TERMS[fields["kind"]](**({k: v for k, v in fields.items() if k != "kind"} | arrays)))
    return tuple(terms)
