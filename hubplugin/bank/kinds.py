"""The profile of a bank: how its queries relate to the gallery, and the bank's kind.

Every number is a share, a correlation or a ratio, so that the limits hold for any model,
metric and scale. Each limit lies in a gap between banks that help and banks that do
harm; benchmarks/guard.py measures both sides of the gap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from pydantic import computed_field

from hubplugin.bank.prepared import PreparedBank, compare, spacing_ratio
from hubplugin.compute import Compute, topk
from hubplugin.metric import Metric

Kind: TypeAlias = Literal[
    "clean",
    "log",
    "clean or log",
    "swapped",
    "documents",
    "mixture",
    "another model",
    "elsewhere",
    "too small to tell",
]

SEEN = 2_048
"""The most rows of the gallery that a profile samples."""

MOST_SEARCHED = 1_024
"""The most vectors of one set whose nearest neighbours a profile searches for."""

NEIGHBOURS = 5
"""The number of nearest neighbours in the two-sample tests.

With more, the power of the test grows little (Schilling 1986)."""

FEWEST = 20
"""The fewest queries, and the fewest targets, from which a bank's kind is judged."""

OWN_SHARE = 0.525
"""The own share below which two sets of vectors count as one, see `own_share`.

Documents have 0.50, with an error of 0.01 for 100 to 300 of them. Synonyms that ask for
names have 0.49 to 0.57, and other queries have 0.55 to 1."""

COPIES = 0.475
"""The own share below which bank and gallery have nearly the same vectors.

Documents of the gallery have 0.40 to 0.47, whether unchanged or moved a little."""

ONE_SIDED = 0.8
"""The value of `_one_sided` below which a bank cannot be told from documents.

Documents of any subject have 0.14 to 0.79, queries have 0.84 to 1, and synonyms that
ask for names have 0.44 to 0.84."""

BETWEEN = 0.75
"""The share of the variance between queries above which they are of two kinds.

Queries have 0.1 to 0.4, queries mixed with documents across modalities have 0.87, and
vectors of another model have 0.82."""

CHANCE = 0.2
"""The `typical_similarity` below which another model must have embedded the bank.

Vectors of another model have -0.04 to 0.04, and queries have 0.39 or more."""

AS_NEAR = 0.85
NEARER = 1.15
"""Limits of `typical_similarity`: documents about other subjects are below `AS_NEAR`,
and queries that find their targets are above `NEARER`.

Documents about the gallery's subjects have 0.93 to 1.1, and documents about other
subjects have 0.6 to 0.95. Logs of synonyms have 0.91 or more, and 1.2 if they find
their targets."""

LEAST_ORDER = 0.1
"""The least order of a gallery at which `typical_similarity` can tell anything.

Order is how near targets are to each other: 0 is as near as random directions are, and
1 is equality."""

DIRECTIONS = 256
"""The number of random directions whose mean nearness counts as chance."""

COPY = 0.99
"""The cosine about the mean above which vectors are copies.

Copies that differ by rounding have 0.999."""

FINDING = 400
"""The number of queries in each part for which `clustering` is computed.

With more queries, more neighbours of found targets are also found: the value of a bank
on the gallery's own subjects rose from 0.10 for 300 queries to 0.25 for 2,000."""

CLUSTERED = 0.14
AGREEMENT = 0.64
"""Limits of the clustering and the agreement of banks from elsewhere.

The targets that such a bank finds lie together, *and* the bank disagrees with the
gallery on the hubs. Banks on the gallery's own subjects have a clustering of at most
0.134, or an agreement of at least 0.77. Of 60 foreign banks of 400 queries or more, 52
have a clustering of at least 0.146, and all have an agreement of at most 0.61."""

OVERLAP = 0.98
"""The own share above which bank and gallery have no neighbours in common.

This is so across modalities. The targets that the gallery's vectors find then say
nothing about the queries' hubs. To disagree with them is then a doubt about the bank,
and not an objection."""

LOG = 1.1
"""The spacing ratio above which answers stand out.

Clean banks have at most 1.07, and most logs have 1.3 to 3.5. A lower ratio tells
nothing: a log whose queries find few of their answers also has 1.0."""


@dataclass(frozen=True)
class BankProfile:
    """The measurements on samples of a bank and its gallery.

    distinct: The number of distinct bank queries.
    spacing: The `spacing_ratio` in the gallery; 1 if the target bank contains the
        answers.
    own_share: The `own_share` of bank and gallery.
    target_share: The `own_share` of target bank and gallery, measured if the bank's is
        low.
    one_sided, near: See `_one_sided` and `typical_similarity`.
    between: The share of the variance of the similarities that lies between queries.
    clustered: The correlation, over targets, between being found by the bank and the
        share of neighbours that are found. 0 unless `agreement` is below `AGREEMENT`.
    agreement: The correlation, over targets, between nearness to the bank and nearness
        to the gallery itself.
    known: True if answers are known; documents may then be used as queries.
    answered: True if the answers are in the gallery according to clicks or pairs, False
        if the target bank contains them, None if nothing is known. If True, a bank may
        look as if it came from elsewhere; a trial on held-out queries then shows
        whether it does harm.
    told: False if the kind of the bank cannot be determined because the bank is too
        small.
    """

    distinct: int
    spacing: float = 1.0
    own_share: float = 1.0
    target_share: float = 0.5
    one_sided: float = 1.0
    near: float = 1.0
    between: float = 0.0
    clustered: float = 0.0
    agreement: float = 1.0
    known: bool = False
    answered: bool | None = None
    told: bool = field(default=True, repr=False)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def kind(self) -> Kind:
        """The first kind whose condition holds, in the order of the code."""
        if not self.told:
            return "too small to tell"
        if self.near < CHANCE:
            return "another model"
        if self.between > BETWEEN:
            return "mixture"
        if self.own_share < OWN_SHARE <= self.target_share:
            return "swapped"
        # Queries that find their targets lie among them, without being documents.
        limit = COPIES if self.near >= NEARER else OWN_SHARE
        lies_far = self.near < AS_NEAR and not self.answers_stand_out
        other_subjects = self.like_documents and lies_far
        if (self.own_share < limit or other_subjects) and not self.known:
            return "documents"
        # In these cases a corner is no objection, see `answered` and `OVERLAP`.
        may_find_a_corner = self.answered or self.own_share >= OVERLAP
        if self.finds_a_corner and not may_find_a_corner:
            return "elsewhere"
        if self.answered or self.answers_stand_out:
            return "log"
        return "clean or log" if self.answered is None else "clean"

    @property
    def like_documents(self) -> bool:
        """True if the bank cannot be told from documents, whatever their subjects."""
        return self.one_sided < ONE_SIDED

    @property
    def finds_a_corner(self) -> bool:
        """True if the bank finds targets that lie together, but not the usual hubs."""
        return self.clustered > CLUSTERED and self.agreement < AGREEMENT

    @property
    def answers_stand_out(self) -> bool:
        """True if the nearest targets of the queries look like answers."""
        return self.spacing > LOG

    @property
    def objection(self) -> str | None:
        """The reason against a fit on this bank; None if there is none."""
        usable = ("clean", "log", "clean or log", "too small to tell")
        return None if self.kind in usable else str(self)

    @property
    def doubt(self) -> str | None:
        """A doubt that the bank alone cannot dispel, and the way to dispel it.

        The bank may be made of documents, or it may ask about one part of the gallery
        and harm the rest. None if there is no such doubt, or if there is an objection.
        """
        if self.objection or not self.told:
            return None
        if self.like_documents and not self.known:
            return (
                "nobody can tell whether this bank helps or harms: only "
                f"{self.one_sided:.0%} of its vectors lie beyond their nearest targets, "
                "as with documents or synonyms of the targets (with other queries, 84% "
                "and more). Such banks changed R@1 by -3 to +1 points on text: pass the "
                "answers of fifty queries or more (--answers)"
            )
        if not self.finds_a_corner:
            return None
        return (
            "the targets that the bank finds lie close together "
            f"({self.clustered:.2f}): if it asks about one part of the gallery only, "
            "measure the rest with `hubplugin evaluate`; such banks changed R@1 by -3 "
            "to +4 points"
        )

    def __str__(self) -> str:
        """Describe the kind of bank in one sentence."""
        own = f"{self.own_share:.0%}"
        near = f"{max(self.near, 0):.0%}"
        ratio = f"(spacing ratio {self.spacing:.2f})"
        log = "the bank is a log: its answers are known and lie in the gallery"
        if self.answers_stand_out:
            log = f"the bank looks like a log: its answers are in the gallery {ratio}"
        documents = (
            "the bank looks like documents about something else, not queries: "
            f"{self.one_sided:.0%} of its vectors lie beyond their nearest targets (at "
            f"least {ONE_SIDED:.0%} is needed), and they come {near} as near to the "
            f"gallery as its own vectors come to each other (at least {AS_NEAR:.0%} is "
            "needed)"
        )
        if self.own_share < OWN_SHARE:
            documents = (
                f"the bank looks like documents, not queries: {own} of nearest "
                "neighbours come from the same set, as in two halves of one set (at "
                f"least {OWN_SHARE:.1%} is needed)"
            )
        descriptions: dict[Kind, str] = {
            "clean": "the bank is clean: its answers are in the target bank, not in the "
            "gallery",
            "log": log,
            "clean or log": "the bank may be clean or a log: no answers stand out in "
            f"the gallery, but they may be there {ratio}",
            "documents": documents,
            "swapped": f"query bank and target bank look swapped: {own} of nearest "
            "neighbours come from the same set for query bank and gallery, "
            f"as in two halves of one set, but {self.target_share:.0%} for "
            "target bank and gallery",
            "mixture": "the bank looks like a mixture of two kinds of vectors: "
            f"{self.between:.0%} of the variance of its similarities lies "
            f"between its queries (at most {BETWEEN:.0%} is allowed)",
            "another model": "the bank looks as if another model had embedded it: its "
            f"queries come {near} as near to the gallery as its own "
            "vectors come to each other (0% is chance, at least "
            f"{CHANCE:.0%} is needed)",
            "elsewhere": "the bank looks as if it came from elsewhere, or asked about "
            "one corner of the gallery: the targets that it finds lie "
            f"close together ({self.clustered:.2f}, at most {CLUSTERED} is "
            "allowed), and it disagrees with the gallery on the hubs "
            f"({self.agreement:.2f}, at least {AGREEMENT} is needed)",
            "too small to tell": "bank or gallery is too small to tell the kind of the "
            f"bank ({FEWEST} rows are needed)",
        }
        return descriptions[self.kind]


def profile(
    bank: PreparedBank,
    queries: np.ndarray,
    targets: np.ndarray,
    answered: bool,
    rng: np.random.Generator,
) -> BankProfile:
    """Measure the profile of a bank on samples of the bank and its gallery.

    Args:
        bank: The bank, with its gallery.
        queries: Distinct queries of the bank, in random order [m, d].
        targets: Targets of the gallery, in random order [n, d].
        answered: True if clicks or pairs say that the answers are in the gallery.
        rng: The generator of further samples.
    """
    distinct = len(bank.distinct)
    known = bank.known_answers is not None
    if min(len(queries), len(targets)) < FEWEST:
        # None if not `answered`: whether the target bank holds them is not measured.
        return BankProfile(distinct, known=known, answered=answered or None, told=False)
    metric = bank.metric
    compute = bank.compute
    queries = _unit(queries[:MOST_SEARCHED], metric)
    targets = _unit(targets[:SEEN], metric)
    from_bank, from_gallery = _as_queries(queries, targets)
    # The similarities of each target to the queries [n, m], and to other targets.
    to_bank = compare(targets, from_bank, metric, compute)
    to_gallery = compare(targets, from_gallery[:MOST_SEARCHED], metric, compute)
    np.fill_diagonal(to_gallery, -math.inf)  # a target is not compared with itself
    share = own_share(queries, targets, compute, rng)
    target_share = 0.5
    answers = bank.target_bank
    if share < OWN_SHARE and answers is not None and len(answers) >= FEWEST:
        target_share = own_share(_unit(answers, metric), targets, compute, rng)
    is_answered = None
    if answered:
        is_answered = True
    elif bank.answers_are_elsewhere:
        is_answered = False
    agreement = _correlation(_nearness(to_bank), _nearness(to_gallery))
    clustered = 0.0
    if agreement < AGREEMENT:
        clustered = clustering(to_bank.argmax(axis=0), targets, compute)
    variance_between = float(to_bank.mean(axis=0).var())
    return BankProfile(
        distinct=distinct,
        spacing=_spacing(bank),
        own_share=share,
        target_share=target_share,
        one_sided=_one_sided(to_bank, queries, targets),
        near=typical_similarity(queries, targets, metric, compute, rng),
        between=variance_between / max(float(to_bank.var()), 1e-30),
        clustered=clustered,
        agreement=agreement,
        known=known,
        answered=is_answered,
    )


def _as_queries(
    queries: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the queries [m, d], and the gallery's vectors [n, d] as queries.

    The gallery is translated to the mean of the queries, which removes most of the
    modality gap (Liang et al. 2022). If all queries have the same length, all vectors
    are scaled to this length.
    """
    translated = targets - targets.mean(axis=0) + queries.mean(axis=0)
    lengths = np.linalg.norm(queries, axis=1)
    length = np.median(lengths)
    if np.ptp(lengths) <= 0.01 * length:  # they differ by rounding
        queries = _of_length(queries, length)
        translated = _of_length(translated, length)
    return queries.astype(np.float32), translated.astype(np.float32)


def _spacing(bank: PreparedBank) -> float:
    """Return the spacing ratio in the gallery; 1 if the target bank holds the answers.

    A hub stands out just as an answer does. A ratio above `LOG` is therefore computed
    again, with only one of the queries that have the same nearest target.
    """
    if bank.answers_are_elsewhere:
        return 1.0
    largest = bank.survey.largest
    ratio = spacing_ratio(largest)
    if ratio <= LOG:
        return ratio
    first_rows = np.unique(bank.survey.nearest, return_index=True)[1]
    return spacing_ratio(largest[first_rows])


def own_share(
    first: np.ndarray, second: np.ndarray, compute: Compute, rng: np.random.Generator
) -> float:
    """Return the share of nearest neighbours that come from a vector's own set.

    The samples of both sets have equal size, so the share is 0.5 if the two sets are
    one, and 1 if they lie apart (Schilling 1986).

    Args:
        first, second: The sets [m, d] and [n, d].
        compute: Device and memory.
        rng: The generator of the samples. From small sets, up to eight samples are
            drawn to reduce the error.
    """
    size = min(len(first), len(second), SEEN // 2)
    is_second = np.arange(2 * size) >= size
    shares = []
    for _ in range(min(8, SEEN // (2 * size))):
        both = np.concatenate(
            [rng.permutation(first)[:size], rng.permutation(second)[:size]]
        )
        rows = rng.permutation(2 * size)[:MOST_SEARCHED]
        from_second = _neighbours(both, compute, rows) >= size
        shares.append(float((from_second == is_second[rows, None]).mean()))
    return float(np.mean(shares))


def _neighbours(vectors: np.ndarray, compute: Compute, rows: np.ndarray) -> np.ndarray:
    """Return the rows of the `NEIGHBOURS` nearest other vectors of each row: [r, k].

    Args:
        vectors: The vectors [n, d]. If there are few, k is n - 1.
        compute: Device and memory.
        rows: The rows of the vectors whose neighbours are wanted [r].
    """
    similarities = compare(vectors[rows], vectors, Metric.EUCLIDEAN, compute)
    similarities[np.arange(len(rows)), rows] = -math.inf
    return topk(similarities, min(NEIGHBOURS, len(vectors) - 1))[1]


def _one_sided(
    similarities: np.ndarray, queries: np.ndarray, targets: np.ndarray
) -> float:
    """Return the share of queries that lie beyond their nearest targets.

    "Beyond" is measured along the direction from targets to their nearest queries. A
    trait that all queries and no targets have, such as a form or a language, puts
    queries beyond targets whichever side is searched from. A different subject does
    not, because the direction is reversed when seen from the nearest documents.

    Args:
        similarities: The similarity of each target to each query [n, m].
        queries, targets: The queries [m, d] and the targets [n, d].
    """
    size = min(NEIGHBOURS, *similarities.shape)
    nearest_queries = topk(similarities, size)[1]
    nearest_targets = topk(similarities.T, size)[1]
    counts = np.bincount(nearest_queries.reshape(-1), minlength=len(queries))
    direction = counts @ queries / nearest_queries.size - targets.mean(axis=0)
    # The positions of each query's nearest targets along this direction.
    positions = (targets @ direction)[nearest_targets].mean(axis=1)
    return float((queries @ direction > positions).mean())


def typical_similarity(
    queries: np.ndarray,
    targets: np.ndarray,
    metric: Metric,
    compute: Compute,
    rng: np.random.Generator,
) -> float:
    """Return how near queries come to their nearest targets, relative to the gallery.

    0 is as near as random directions come, and 1 is as near as targets come to each
    other. Queries and targets are each centred on their mean, and copies are ignored.
    Return 1 if this scale means nothing: either targets are hardly nearer to each other
    than random directions are to them, or random directions are near, too, because
    there are few dimensions.

    Args:
        queries, targets: The queries [m, d] and the targets [n, d].
        metric: The similarity.
        compute: Device and memory.
        rng: The generator of the random directions.
    """
    random = rng.normal(size=(DIRECTIONS, queries.shape[1])).astype(np.float32)
    parts = [_of_length(random, 1.0)]
    for vectors in (targets, queries):
        scaled = _unit(vectors, metric)
        centred = scaled - scaled.mean(axis=0)
        parts.append(_of_length(centred, 1.0)[:MOST_SEARCHED])
    gallery = parts[1]
    # The mean cosine of each part to its nearest targets, without copies.
    means = []
    for part in parts:
        cosines = compare(part, gallery, Metric.DOT, compute)
        nearest = np.where(cosines > COPY, -1, cosines).max(axis=1)
        means.append(float(nearest.mean()))
    chance, between_targets, near = means
    if chance > 0.5 or between_targets - chance < LEAST_ORDER * (1 - chance):
        return 1.0
    return (near - chance) / (between_targets - chance)


def _unit(vectors: np.ndarray, metric: Metric) -> np.ndarray:
    """Return `vectors` at unit length; unchanged if the metric is Euclidean."""
    return vectors if metric is Metric.EUCLIDEAN else _of_length(vectors, 1.0)


def _of_length(vectors: np.ndarray, length: float) -> np.ndarray:
    """Return `vectors` scaled to the same length; zero vectors stay zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: np.ndarray = vectors * (length / np.maximum(lengths, 1e-30))
    return scaled


def clustering(nearest: np.ndarray, targets: np.ndarray, compute: Compute) -> float:
    """Return how far the targets that the bank finds are neighbours of one another.

    This is a join count: the correlation, over targets, between being found and the
    share of neighbours that are found. For a large bank, it is the mean of the
    correlations for parts of `FINDING` queries each.

    Args:
        nearest: The row of the target that each query finds [m].
        targets: The targets [n, d].
        compute: Device and memory.
    """
    neighbours = _neighbours(targets, compute, np.arange(len(targets)))
    count = len(nearest) // FINDING
    if count:
        parts = nearest[: count * FINDING].reshape(count, FINDING)
    else:
        parts = nearest[None]
    correlations = []
    for part in parts:
        is_found = np.isin(np.arange(len(targets)), part).astype(float)
        correlations.append(_correlation(is_found, is_found[neighbours].mean(axis=1)))
    return float(np.mean(correlations))


def _nearness(similarities: np.ndarray) -> np.ndarray:
    """Return how near a set of vectors comes to each target [n].

    The nearness is the mean of the target's 16 largest similarities.

    Args:
        similarities: The similarities of targets and vectors [n, m].
    """
    size = min(16, similarities.shape[1] - 1)
    largest = np.partition(similarities, -size, axis=1)[:, -size:]
    means: np.ndarray = largest.mean(axis=1)
    return means


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return the correlation of two arrays; 0 if either is constant."""
    if not np.ptp(first) or not np.ptp(second):
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])
