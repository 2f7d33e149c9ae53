"""Banks, read and checked once, for all that is chosen, tried and fitted on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from hubplugin.errors import InputError, Parameter
from hubplugin.methods import FitInput
from hubplugin.metric import Metric
from hubplugin.reductions import Compute, Similarities, dense
from hubplugin.vectors import VectorLike, as_vectors

Pairs: TypeAlias = bool | Sequence[int] | np.ndarray | None
"""Which target of the target bank belongs to each bank query: True for row i to row i, an array of rows [m], False
for none. None looks: banks of equal length are pairs if their own targets are nearer than others'."""

LOOKED_AT, FEWEST = 1_000, 10
"""Bank queries that tell whether banks are pairs, at most and at least."""


@dataclass(frozen=True)
class Banks:
    """What a correction is chosen, tried and fitted on.

    given: the banks, and the gallery once it is known. pairs: the row of the target bank that belongs to each bank
    query, int [m], or None. same_kind: documents are meant to be asked by documents.
    """

    given: FitInput
    pairs: np.ndarray | None = None
    same_kind: bool = False

    @classmethod
    def read(
        cls,
        query_bank: VectorLike,
        target_bank: VectorLike | None,
        pairs: Pairs,
        metric: Metric | str,
        compute: Compute,
        same_kind: bool = False,
    ) -> Banks:
        """The banks as a user gave them; raises InputError where they cannot be used."""
        given = FitInput.read(query_bank, None, target_bank, Metric.parse(metric), compute)
        return cls(given, _mapping(pairs, given), same_kind)

    def against(self, targets: VectorLike) -> Banks:
        """These banks with a gallery; raises InputError where it has other dimensions."""
        return replace(self, given=self.given.against(targets))


def _mapping(pairs: Pairs, given: FitInput) -> np.ndarray | None:
    """The row of the target bank that belongs to each bank query, or None."""
    queries, second = given.query_bank, given.target_bank
    if pairs is None:
        if second is None or len(second) != len(queries) or not _look_paired(queries, second, given):
            return None
        return np.arange(len(queries))
    if pairs is False:
        return None
    if second is None:
        raise InputError("pairs were given without a target bank; pass ", Parameter("target_bank"))
    if pairs is True:
        if len(second) != len(queries):
            raise InputError(
                Parameter("pairs", True),
                f" needs banks of equal length, row i to row i; there are {len(queries)} bank queries and "
                f"{len(second)} bank targets",
            )
        return np.arange(len(queries))
    mapping = np.asarray(pairs)
    if mapping.shape != (len(queries),) or mapping.dtype.kind not in "iu":
        raise InputError(f"pairs must hold one row of the target bank for each of the {len(queries)} bank queries")
    outside = np.flatnonzero((mapping < 0) | (mapping >= len(second)))
    if outside.size:
        raise InputError(
            f"pairs: bank query {outside[0]} belongs to row {mapping[outside[0]]}, which is outside the target bank "
            f"of {len(second)} rows"
        )
    return mapping


def _look_paired(queries: np.ndarray, second: np.ndarray, given: FitInput) -> bool:
    """Whether most queries are nearer to their own target than to the next row's: half are by chance."""
    rows = np.random.default_rng(0).permutation(len(queries))[:LOOKED_AT]
    if len(rows) < FEWEST:
        return False
    similarities = dense(
        Similarities(queries[rows], given.metric, given.compute), as_vectors(second[rows], "target bank")
    )
    own = similarities.diagonal()
    return bool((own > similarities.roll(1, dims=1).diagonal()).double().mean() > 0.75)
