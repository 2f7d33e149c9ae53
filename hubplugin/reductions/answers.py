"""Answers and neighbours of bank queries: the nearest targets, found in passes over the similarities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hubplugin.reductions.largest import largest
from hubplugin.reductions.products import as_tensor
from hubplugin.reductions.similarities import MOST_ANSWERS, Similarities, Tile, with_own
from hubplugin.reductions.tasks import Found, Task, over
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

    @classmethod
    def of(cls, levels: np.ndarray, rows: np.ndarray) -> Answers:
        """From each query's largest similarity and the number of its target: float64 [m] and int64 [m]."""
        _, place, count = np.unique(rows, return_inverse=True, return_counts=True)
        count[count > MOST_ANSWERS * len(rows)] = 1  # a hub, not an answer: the queries that find it ask for others
        return cls(levels, 1.0 / count[place.reshape(-1)])


class Nearest:
    """The nearest target of every bank row among the tiles seen so far. similarity: float64 [m]; rows: int64 [m]."""

    def __init__(self, m: int):
        self._similarity = torch.full((m,), -math.inf, dtype=torch.float64)
        self._rows = torch.zeros(m, dtype=torch.int64)

    def see(self, tile: Tile, first: int, scale: float = 1.0) -> None:
        """A tile of `scale` * s, whose targets are numbered from `first` + tile.start on."""
        s = with_own(tile)
        highest = s.amax(dim=0).cpu().double() / scale
        nearer = (highest > self._similarity).nonzero()[:, 0]  # ever fewer, so that their rows cost next to nothing
        self._similarity[nearer] = highest[nearer]
        self._rows[nearer] = first + tile.start + s[:, nearer.to(s.device)].argmax(dim=0).cpu()

    def see_shard(self, found: Found, first: int) -> None:
        """What another `Nearest` has `found` in a shard, whose targets are numbered from `first` on."""
        similarity = as_tensor(found["similarity"])
        nearer = similarity > self._similarity
        self._similarity = torch.where(nearer, similarity, self._similarity)
        self._rows = torch.where(nearer, as_tensor(found["rows"]) + first, self._rows)

    @property
    def rows(self) -> np.ndarray:
        return self._rows.numpy()

    @property
    def found(self) -> Found:
        return {"similarity": self._similarity.numpy(), "rows": self.rows}

    @property
    def answers(self) -> Answers:
        return Answers.of(self._similarity.numpy(), self.rows)


@dataclass(frozen=True)
class NearestOfShard(Task):
    """See `Nearest.found`. scale: of the products, which round as others do that have the same."""

    scale: float = 1.0
    what: str = "answers of the bank"

    def __call__(self, similarities: Similarities, targets: Vectors) -> Found:
        nearest = Nearest(similarities.m)
        for tile in similarities.tiles(targets, self.what, scale=self.scale):
            nearest.see(tile, 0, self.scale)
        return nearest.found


def find_answers(
    similarities: Similarities, columns: Sequence[Vectors], task: Task = NearestOfShard()
) -> Answers | None:
    """The answers of the bank of `similarities` among the targets of all `columns`, in one pass of `task`; None where
    bank or targets are too few."""
    if not may_be_log(similarities, columns):
        return None
    nearest, first = Nearest(similarities.m), 0
    for targets in columns:
        for start, found in over(similarities, targets, task):
            nearest.see_shard(found, first + start)
        first += targets.rows
    return nearest.answers


def may_be_log(similarities: Similarities, columns: Sequence[Vectors]) -> bool:
    return min(similarities.m, sum(part.rows for part in columns)) >= SMALLEST_LOG


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

    def __call__(self, similarities: Similarities, targets: Vectors) -> Found:
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


def survey(similarities: Similarities, targets: Vectors, k: int) -> Survey:
    """Of all bank rows and `targets`, in one pass: see `Survey`."""
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
