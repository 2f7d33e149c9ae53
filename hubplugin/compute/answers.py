"""An answer is no hub: which targets are the answers of a bank, and offsets without them.

A *log* holds queries that people asked of this very gallery. Each is near its answer because it was asked for it, not
because the answer is a hub, so the answer's entry says nothing about hubness and is left out of the sums. Where the
answer is another target than the nearest, leaving out each target's largest entry takes care of most of it.

A fit takes two passes: the first finds the nearest target of each query, the second reduces what is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hubplugin.compute.largest import largest, reaching
from hubplugin.compute.similarities import MOST_ANSWERS, Similarities, as_tensor, host, like, module_of, torch, with_own
from hubplugin.compute.terms import ShardResult, Task, over
from hubplugin.vectors import Vectors

SMALLEST_LOG = 20
"""Bank queries, and targets, below which nothing is left out: too little would remain."""


@dataclass(frozen=True)
class Answers:
    """The answers of a bank in a gallery, as far as similarity tells them.

    levels: [m], the similarity of each bank query's nearest target, of gallery and target bank: what reaches it counts
    as an answer, also a target that comes later. weights: [m], 1 over the number of bank queries with the same
    nearest target, so that what was asked for in many wordings counts once.
    """

    levels: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class NearestOfShard(Task):
    """The nearest target of every bank row, the first of several that are as near (see `ANSWER_SLACK`). similarity:
    float64 [m]; rows: int64 [m]."""

    what: str = "answers of the bank"

    def __call__(self, similarities: Similarities, targets: Vectors) -> ShardResult:
        similarity, nearest = np.full(similarities.m, -math.inf), np.zeros(similarities.m, np.int64)
        for tile in similarities.tiles(targets, self.what):
            s = with_own(tile)
            highest = host(module_of(s).amax(s, 0))
            least = similarities.reached(highest)
            rows, columns = reaching(s, like(np.where(least > similarity, least, math.inf), s))
            nearest[columns[::-1]] = rows[::-1] + tile.start  # the first of several: numpy keeps the last it writes
            similarity = np.maximum(similarity, highest)
        return {"similarity": similarity, "rows": nearest}


def nearest_targets(similarities: Similarities, columns: Sequence[Vectors]) -> tuple[np.ndarray, np.ndarray]:
    """Of every bank row its similarity to the nearest target of all `columns`, in one pass, and that target's number,
    counted through all of them: float64 [m] and int64 [m]."""
    similarity, nearest, first = np.full(similarities.m, -math.inf), np.zeros(similarities.m, np.int64), 0
    for targets in columns:
        for start, found in over(similarities, targets, NearestOfShard()):
            nearer = similarities.reached(found["similarity"]) > similarity
            nearest = np.where(nearer, found["rows"] + first + start, nearest)
            similarity = np.maximum(similarity, found["similarity"])
        first += targets.rows
    return similarity, nearest


def find_answers(similarities: Similarities, columns: Sequence[Vectors]) -> Answers | None:
    """The answers of the bank of `similarities` among the targets of all `columns`, in one pass; None where bank or
    targets are too few."""
    if min(similarities.m, sum(part.rows for part in columns)) < SMALLEST_LOG:
        return None
    levels, rows = nearest_targets(similarities, columns)
    _, place, count = np.unique(rows, return_inverse=True, return_counts=True)
    count[count > MOST_ANSWERS * len(rows)] = 1  # a hub, not an answer: the queries that find it ask for others
    return Answers(levels, 1.0 / count[place.reshape(-1)])


SURVEYED = 512
"""Bank queries that the kind of a bank is judged by: the spacing ratio then has a standard error of about 0.05."""

SPACINGS = 10
"""Gaps between neighbours in a query's list that the spacing ratio reads: the first, and those it is compared with."""


@dataclass(frozen=True)
class Survey:
    """How bank queries see a gallery. largest: [m, k], the k largest similarities of each, the largest first.
    deviation: the standard deviation of all similarities."""

    largest: np.ndarray
    deviation: float


@dataclass(frozen=True)
class _SurveyOfShard(Task):
    """largest: [m, k], as in `Survey`. moments: count and mean of the similarities, and the sum of their squared
    distances from it."""

    k: int
    what: str = "looking at the bank"

    def __call__(self, similarities: Similarities, targets: Vectors) -> ShardResult:
        most = torch.empty((similarities.m, 0), dtype=torch.float64)
        count, total, squares, origin = 0, 0.0, 0.0, None
        for tile in similarities.tiles(targets, self.what):
            s = with_own(tile)
            part = largest(s.T.contiguous(), min(self.k, len(s)))[0].cpu().double()
            most = _most([most, part], self.k)
            origin = float(s.mean()) if origin is None else origin  # so that squares keep their digits
            moved = s.sub_(origin)
            count, total = count + s.numel(), total + float(moved.sum(dim=1).cpu().double().sum())
            squares += float(torch.linalg.vector_norm(moved, dim=1).cpu().double().square().sum())
        moments = np.array([count, (origin or 0.0) + total / count, squares - total**2 / count])
        return {"largest": most.numpy(), "moments": moments}


def survey(similarities: Similarities, targets: Vectors, k: int = SPACINGS + 1) -> Survey:
    """Of all bank rows and `targets`, in one pass: see `Survey`. k: by default, as many as `spacing_ratio` reads."""
    parts = [found for _, found in over(similarities, targets, _SurveyOfShard(k))]
    counts, means, squares = np.array([part["moments"] for part in parts]).T
    apart = means - np.average(means, weights=counts)
    variance = (squares.sum() + (counts * apart**2).sum()) / counts.sum()
    most = _most([as_tensor(part["largest"]) for part in parts], k)
    return Survey(most.numpy(), math.sqrt(max(variance, 0.0)))


def _most(parts: Sequence[torch.Tensor], k: int) -> torch.Tensor:
    """The k largest of each row, the largest first, where there are as many: [m, k]."""
    both = torch.cat(list(parts), dim=1)
    return both.topk(min(k, both.shape[1]), dim=1).values


def spacing_ratio(seen: Survey) -> float:
    """How far the nearest target stands out: about 1 and below where answers are elsewhere, above 1 in a log.

    With s_1 >= s_2 >= ... the similarities of one query, the gaps j (s_j - s_j+1) have one mean for all j if the upper
    end of their distribution is exponential (Renyi's representation of order statistics). It is less for small j if
    the end is shorter. The ratio is the mean of the first gap over the mean of the others, over all queries: it knows
    neither scale nor metric. An answer makes the first gap larger. 1 where there are fewer than 3 targets.

    Measured (benchmarks/settings.py): banks whose answers are elsewhere 0.60 to 0.95, logs 0.95 to 3.5, on text and
    code, text and images, and across languages.
    """
    gaps = -np.diff(seen.largest, axis=1) * np.arange(1, seen.largest.shape[1])
    if gaps.shape[1] < 2 or not gaps[:, 1:].mean() > 0:
        return 1.0
    return float(gaps[:, 0].mean() / gaps[:, 1:].mean())
