"""`FindsAtFit`: how unevenly the bank found the gallery of the fit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FindsAtFit:
    """The 10-occurrence of the gallery of the fit over `queries` queries of the bank: its skewness raw, corrected and
    by chance; largest: the share of the queries that found the target found most often, corrected."""

    queries: int
    raw: float
    corrected: float
    chance: float
    largest: float
