"""An answer is no hub: whether a bank's answers are in the gallery, and which targets they are.

A *log* holds queries that people asked of this very gallery. Each is near its answer because it was asked for it, not
because the answer is a hub, so the answer's entry says nothing about hubness and is left out of the sums. Where the
answer is another target than the nearest, leaving out each target's largest entry takes care of most of it.
"""

from __future__ import annotations

import numpy as np

from hubplugin.reductions import Similarities, Survey, survey
from hubplugin.vectors import Vectors

SURVEYED = 512
"""Bank queries that the kind of a bank is judged by: the spacing ratio then has a standard error of about 0.05."""

SPACINGS = 10
"""Gaps between neighbours in a query's list that the spacing ratio reads: the first, and those it is compared with."""


def look(similarities: Similarities, targets: Vectors) -> Survey:
    """What `spacing_ratio` reads, and the spread of the similarities, in one pass."""
    return survey(similarities, targets, SPACINGS + 1)


def spacing_ratio(seen: Survey) -> float:
    """How far the nearest target stands out: about 1 and below where answers are elsewhere, above 1 in a log.

    With s_1 >= s_2 >= ... the similarities of one query, the gaps j (s_j - s_j+1) have one mean for all j if the upper
    end of their distribution is exponential (Renyi's representation of order statistics), and it is less for small j if
    the end is shorter. The ratio is the mean of the first gap over the mean of the others, over all queries: it knows
    neither scale nor metric. An answer makes the first gap larger. 1 where there are fewer than 3 targets.

    Measured (benchmarks/settings.py): banks whose answers are elsewhere 0.60 to 0.95, logs 0.95 to 3.5, on text and
    code, text and images, and across languages.
    """
    gaps = -np.diff(seen.largest, axis=1) * np.arange(1, seen.largest.shape[1])
    if gaps.shape[1] < 2 or not gaps[:, 1:].mean() > 0:
        return 1.0
    return float(gaps[:, 0].mean() / gaps[:, 1:].mean())
