"""An answer is no hub: which targets are the answers of a bank, and offsets without them.

A *log* holds queries that people asked of this very gallery. Each is near its answer because it was asked for it, not
because the answer is a hub, so the answer's entry says nothing about hubness and is left out of the sums. Where the
answer is another target than the nearest, leaving out each target's largest entry takes care of most of it.

Answers are found and left out in one pass (`reduce_and_seek`): what was reduced before they were known is corrected
afterwards. While tiles pass by, an entry that comes up to the largest its bank row has met so far may be an answer. Of
the few targets with such an entry the largest similarities are listed, and once all levels are known, the list says
what becomes of the target without its answers. Only targets with many answers are multiplied again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hubplugin.compute.largest import largest, reached
from hubplugin.compute.similarities import (
    MOST_ANSWERS,
    LeftOut,
    Similarities,
    Tile,
    as_tensor,
    leave_largest_out,
    near_levels,
    torch,
    with_own,
)
from hubplugin.compute.terms import LogSum, MeanOfLargest, ShardResult, Task, over, reduce
from hubplugin.vectors import Spread, Vectors, as_vectors, taken

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


SAME = 1e-12
"""Similarities that differ by less, beside the larger of 1 and them, are the same: copies of a target have them."""


class Nearest:
    """The nearest target of every bank row among the tiles seen so far, the first of several that are as near.
    similarity: float64 [m]; rows: int64 [m]."""

    def __init__(self, m: int):
        self.similarity = np.full(m, -math.inf)
        self.rows = np.zeros(m, np.int64)

    def see(self, tile: Tile, first: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A tile of `scale` * s, whose targets are numbered from `first` + tile.start on. Returns rows, columns and
        s(b_u, t) of the entries that are at the nearest so far."""
        rows, columns, values = near_levels(tile, self.similarity, scale, of_nearest=True)
        highest = np.full_like(self.similarity, -math.inf)
        np.maximum.at(highest, columns, values)
        least = reached(highest, SAME)
        best = ((least > self.similarity)[columns] & (values >= least[columns])).nonzero()[0][::-1]
        self.rows[columns[best]] = rows[best] + first + tile.start  # numpy keeps the last it writes to one place
        self.similarity = np.maximum(self.similarity, highest)
        left = values >= reached(self.similarity)[columns]
        return rows[left], columns[left], values[left]

    def see_shard(self, found: ShardResult, first: int) -> None:
        """What another `Nearest` has `found` in a shard, whose targets are numbered from `first` on."""
        nearer = reached(found["similarity"], SAME) > self.similarity
        self.rows = np.where(nearer, found["rows"] + first, self.rows)
        self.similarity = np.maximum(self.similarity, found["similarity"])

    @property
    def found(self) -> ShardResult:
        return {"similarity": self.similarity, "rows": self.rows}

    @property
    def answers(self) -> Answers:
        return Answers.of(self.similarity, self.rows)


@dataclass(frozen=True)
class NearestOfShard(Task):
    """See `Nearest.found`."""

    what: str = "answers of the bank"

    def __call__(self, similarities: Similarities, targets: Vectors) -> ShardResult:
        nearest = Nearest(similarities.m)
        for tile in similarities.tiles(targets, self.what):
            nearest.see(tile, 0)
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


SPARE = 8
"""Answers that the list of a target has room for. A target with more is multiplied again: one in a hundred is, where
answers are spread over the gallery."""

MOST_TAKEN = 1 - 2.0**-6
"""The largest share of a sum that is taken out of it by subtraction, which costs six of a float32's bits."""

CROWDED = 32
"""Possible answers of a target in a tile above which it is multiplied again, where many targets are alike."""


def listed(m: int, k: int | None) -> int | None:
    """How many of the largest similarities of a target a `Seeker` needs for a mean of k; None where that is so much
    of a bank of m that another pass costs no more."""
    count = (k or 1) + 1 + SPARE
    return count if 2 * count <= m else None


@dataclass(frozen=True)
class AnswersFound:
    """rows [r]: targets of the gallery with answers. Of each, from the largest on, values
    [r, l] (float64) and columns [r, l] of its largest similarities, what of them is left out [r, l], and what
    else was kept of them. again: targets of which the list does not tell enough, of all sets. elsewhere: targets and
    columns of the answers in other sets, numbered after the gallery."""

    rows: np.ndarray
    values: np.ndarray
    columns: np.ndarray
    out: np.ndarray
    kept: list[np.ndarray]
    again: np.ndarray
    elsewhere: tuple[np.ndarray, np.ndarray]

    def means(self, k: int) -> np.ndarray:
        """Of the k largest that are not left out: float64 [r]."""
        counted = ~self.out & (np.cumsum(~self.out, axis=1) <= k)
        means: np.ndarray = np.where(counted, self.values, 0.0).sum(axis=1) / counted.sum(axis=1)
        return means

    def shares(self, kept: np.ndarray) -> np.ndarray:
        """The sum of the entries of `kept` [r, l] that are left out: float64 [r]."""
        sums: np.ndarray = np.where(self.out, kept, 0.0).sum(axis=1)
        return sums

    def without(self, doubtful: np.ndarray) -> AnswersFound:
        """This with the `doubtful` [r] of its rows among those to do again."""
        sure = ~doubtful
        parts = (self.rows[sure], self.values[sure], self.columns[sure], self.out[sure])
        again = np.union1d(self.again, self.rows[doubtful])
        return AnswersFound(*parts, [each[sure] for each in self.kept], again, self.elsewhere)


class Seeker:
    """Sees every tile of s(b_u, t) once, and knows at the end what `AnswersFound` says."""

    def __init__(self, m: int):
        self._m, self._nearest = m, Nearest(m)
        # Entries that may be answers: number of the target, column, value; and the lists of their targets.
        self._entries: list[tuple[np.ndarray, ...]] = []
        self._lists: list[tuple[np.ndarray, ...]] = []
        self._crowded: list[np.ndarray] = []
        self._size, self._limit = 0, 8 * m + 10_000

    def see(self, tile: Tile, first: int, scale: float = 1.0) -> torch.Tensor:
        """A tile of `scale` * s, whose targets are numbered from `first` + tile.start on. Returns which of them may
        have answers: those that `keep` is to know of."""
        rows, columns, values = self._nearest.see(tile, first, scale)
        count, start = np.bincount(rows, minlength=len(tile.s)), first + tile.start
        if len(rows) > 4 * self._m:
            self._crowded.append(np.flatnonzero(count > CROWDED) + start)
            count[count > CROWDED] = 0
            rows, columns, values = (each[count[rows] > 0] for each in (rows, columns, values))
        self._entries.append((rows + start, columns, values))
        self._size += len(rows)
        if self._size > self._limit:
            self._prune()
        return torch.from_numpy(np.flatnonzero(count)).to(tile.s.device)

    def see_and_list(
        self, tile: Tile, first: int, k: int | None, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray | None]:
        """`see` for targets of the gallery, which then lose their largest. Returns which may have answers [r], columns
        of their largest [r, l], and if k, the mean of the k largest that are left to each target: float64 [b]."""
        count = listed(self._m, k)
        assert count is not None
        some = self.see(tile, first, scale)
        many = 2 * len(some) > len(tile.s)  # then one list of all costs less than a copy of them
        of_all, places = largest(tile.s, count if many else (k or 0) + 1)
        values, columns = (of_all[some], places[some]) if many else largest(tile.s[some], count)
        leave_largest_out(tile, places[:, :1])
        means = None
        if k is not None:
            means = ((of_all[:, 1 : k + 1].cpu().double().mean(dim=1) + tile.own) / scale).numpy()
        own = tile.own[some.cpu()]
        similarity = (values.cpu().double() + own[:, None]) / scale
        self._lists.append((some.cpu().numpy() + first + tile.start, similarity.numpy(), columns.cpu().numpy()))
        return some, columns, means

    def add(self, more: torch.Tensor) -> None:
        """What else is to be known of the entries that were listed last: [r, l]."""
        self._lists[-1] += (more.cpu().numpy(),)

    def _prune(self) -> None:
        """Lets go of the entries that their bank rows have met nearer targets than since."""
        levels = reached(self._nearest.similarity)
        numbers, columns, values = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        left = values >= levels[columns]
        self._entries = [(numbers[left], columns[left], values[left])]
        self._size = int(left.sum())
        self._limit = max(self._limit, 2 * self._size)
        if self._lists:
            known = [np.concatenate(parts) for parts in zip(*self._lists, strict=True)]
            still = np.isin(known[0], numbers[left])
            self._lists = [tuple(each[still] for each in known)]

    @property
    def nearest(self) -> ShardResult:
        """See `Nearest.found`."""
        return self._nearest.found

    @property
    def answers(self) -> Answers:
        return self._nearest.answers

    def found(self, gallery: int, levels: np.ndarray | None = None) -> AnswersFound:
        """After all tiles, of which the first `gallery` targets are the gallery. levels: see `LeftOut`, of these and
        other targets."""
        if levels is not None:
            self._nearest.similarity = levels
        self._prune()
        (numbers, columns, _), lowest = self._entries[0], reached(self._nearest.similarity)
        targets, place, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        answered = counts <= MOST_ANSWERS * self._m  # a target with more is a hub
        outside = answered[place] & (numbers >= gallery)
        inside = targets[answered & (targets < gallery)]
        rows, values, places, *kept = self._lists[0]
        mine = np.isin(rows, inside)
        rows, values, places, kept = rows[mine], values[mine], places[mine], [each[mine] for each in kept]
        out = values >= reached(lowest)[places]  # what a list may have of them; it is rounded
        out[out] = np.isin((rows[:, None] * self._m + places)[out], numbers * self._m + columns)
        told = (out.sum(axis=1) == counts[np.searchsorted(targets, rows)]) & (out.sum(axis=1) <= SPARE)
        out[np.arange(len(out)), (~out).argmax(axis=1)] = True  # the largest of the rest
        again = np.unique(np.concatenate([np.setdiff1d(inside, rows), *self._crowded]))
        elsewhere = numbers[outside], columns[outside]
        return AnswersFound(rows, values, places, out, kept, again, elsewhere).without(~told)


def reduce_and_seek(
    similarities: Similarities,
    targets: Vectors,
    reductions: Sequence[LogSum | MeanOfLargest],
    others: Sequence[Vectors] = (),
    what: str = "offsets",
) -> tuple[list[np.ndarray], Answers | None]:
    """`reduce` with the answers left out, which the same pass finds in `targets` (the gallery) and `others`. At most
    one of `reductions` is of each kind."""
    if not may_be_log(similarities, [targets, *others]):
        return reduce(similarities, targets, reductions, what=what), None
    largest_k = next((each.k for each in reductions if isinstance(each, MeanOfLargest)), None)
    # Of what lies in shards no target can be multiplied again cheaply: another pass finds the answers first.
    if listed(similarities.m, largest_k) is None or isinstance(targets, Spread):
        answers = find_answers(similarities, [targets, *others])
        assert answers is not None
        return reduce(similarities, targets, reductions, LeftOut(answers.levels), what), answers
    seeker, first = Seeker(similarities.m), targets.rows
    results = [np.empty(targets.rows) for _ in reductions]
    for tile in similarities.tiles(targets, what):
        some, columns, means = seeker.see_and_list(tile, 0, largest_k)
        for reduction, result in zip(reductions, results, strict=True):
            if isinstance(reduction, LogSum):
                result[tile.start : tile.stop] = reduction.of(tile)
                seeker.add(tile.s[some[:, None], columns].double() / tile.s[some].sum(dim=1, keepdim=True))
            else:
                result[tile.start : tile.stop] = means
    for part in others:
        for tile in similarities.tiles(part, "answers of the bank"):
            seeker.see(tile, first)
        first += part.rows
    found, answers = seeker.found(targets.rows), seeker.answers
    if found.kept:
        found = found.without(found.shares(found.kept[0]) > MOST_TAKEN)
    for reduction, result in zip(reductions, results, strict=True):
        if isinstance(reduction, LogSum):
            result[found.rows] += np.log1p(-found.shares(found.kept[0]))
        else:
            result[found.rows] = found.means(reduction.k)
    rows = found.again[found.again < targets.rows]
    if rows.size:
        some_targets = as_vectors(taken(targets, rows, similarities.metric), targets.name)
        again = reduce(similarities, some_targets, reductions, LeftOut(answers.levels), what)
        for result, corrected in zip(results, again, strict=True):
            result[rows] = corrected
    return results, answers


ROUNDS = 20
"""Lloyd's iterations at most; banks of text and of images settle within ten or so."""


def clusters(vectors: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """The number of the cluster that each of `vectors` [m, d] is in: int64 [m], 0 to at most `count` - 1.

    k-means by Lloyd's algorithm from `count` rows drawn with a fixed seed; a cluster that runs empty stays empty.
    """
    drawn = np.random.default_rng(seed).permutation(len(vectors))[:count]
    centres, labels = vectors[drawn].astype(np.float32), np.full(len(vectors), -1)
    for _ in range(ROUNDS):
        nearest = (vectors @ centres.T - np.square(centres).sum(axis=1) / 2).argmax(axis=1)
        if np.array_equal(nearest, labels):
            break
        labels = nearest
        for number in np.unique(labels):
            centres[number] = vectors[labels == number].mean(axis=0)
    return labels


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
