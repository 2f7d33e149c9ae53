"""The profile of a bank: how its queries lie towards the gallery, whatever the correction, and what kind it is.

Every number is a share, a correlation or a ratio, so that the limits hold for any model, metric and scale. Each limit
lies in a gap between banks that help and banks that do harm; benchmarks/guard.py measures both sides of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from pydantic import computed_field

from hubplugin.bank.prepared import PreparedBank, spacing_ratio
from hubplugin.compute import Compute, Similarities, dense, topk
from hubplugin.metric import Metric
from hubplugin.vectors import as_vectors

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
"""Rows of the bank, and of the gallery, that are looked at."""

NEIGHBOURS = 5
"""Nearest neighbours of the two-sample tests (Schilling 1986 finds their power to grow little beyond)."""

FEWEST = 20
"""Queries, and targets, below which nothing is said about the kind of a bank."""

OWN_SHARE, COPIES = 0.525, 0.475
"""Share of nearest neighbours from the own set below which bank and gallery are one set, or nearly the same vectors.
Documents have 0.50, with an error of 0.01 for 100 to 300 of them. Those of the gallery, moved a little or not, have
0.40 to 0.47. Names asked for by their synonyms have 0.49 to 0.57, other queries 0.55 to 1."""

ONE_SIDED = 0.8
"""`one_sided` below which nothing sets the bank apart from documents: these have 0.14 to 0.79, whatever their subjects,
queries 0.84 to 1, and names asked for by their synonyms 0.44 to 0.84."""

BETWEEN = 0.75
"""Share of the variance of the similarities that lies between queries, above which they are of two kinds: queries have
0.1 to 0.4, queries mixed with documents across modalities 0.87, another model's vectors 0.82."""

CHANCE, AS_NEAR, NEARER = 0.2, 0.85, 1.15
"""`typical_similarity` of another model's vectors is -0.04 to 0.04, of queries 0.39 and more. Documents of the
gallery's subjects have 0.93 to 1.1, of others 0.6 to 0.95, logs of synonyms 0.91 and more, and 1.2 where they find
their targets."""

ORDER, COPY = 0.1, 0.99
"""A gallery has no order if its vectors come less than this share of the way from chance to 1 nearer to each other.
Above this cosine, about the mean, two vectors are copies: rounding leaves 0.999."""

FINDING = 400
"""Queries at a time by which it is told whether what a bank finds lies together. The more there are, the more targets
that are found have neighbours that are: a bank of the gallery's own subjects rose from 0.10 by 300 to 0.25 by 2,000."""

CLUSTERED, AGREEMENT = 0.14, 0.64
"""Banks from elsewhere: what they find lies together, *and* they disagree with the gallery on the hubs. Banks of the
gallery's own subjects stay below the one (0.134) or above the other (0.77); of 60 foreign ones of 400 queries and more,
52 have at least 0.146, all at most 0.61."""

OVERLAP = 0.98
"""Own share above which bank and gallery have no neighbours in common, as across modalities: what the gallery's own
vectors find says nothing of the queries' hubs then, and a disagreement is a doubt, no objection."""

LOG = 1.1
"""Spacing ratio above which answers stand out: clean banks have at most 1.07, most logs 1.3 to 3.5. Below it nothing is
known: a log whose queries find few of their answers has 1.0, too."""


@dataclass(frozen=True)
class BankProfile:
    """A bank as its samples look.

    distinct: bank queries that differ. spacing: `spacing_ratio` in the gallery; 1 where the target
    bank holds the answers. answered: whether the answers are in the gallery, as far as clicks, pairs or the target bank
    say; None where nothing does. own_share: share of the 5 nearest neighbours that come from the own set, of bank and
    gallery in equal shares. target_share: the same of target bank and gallery, looked at where `own_share` is low.
    one_sided, near: see the functions of their names. between: share of the variance of the similarities that lies
    between queries. clustered: correlation between whether a target is found by the bank and the share of its
    neighbours that are. agreement: correlation, over targets, between how near the bank and how near the gallery itself
    comes. known: answers are known, so that documents may be asked by documents; where they are of this gallery, a bank
    may look as if it came from elsewhere: a trial on held-out queries then says whether it does harm.
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
        if not self.told:
            return "too small to tell"
        if self.near < CHANCE:
            return "another model"
        if self.between > BETWEEN:
            return "mixture"
        if self.own_share < OWN_SHARE <= self.target_share:
            return "swapped"
        one_set = self.own_share < (OWN_SHARE if self.near < NEARER else COPIES)
        far = self.like_documents and self.near < AS_NEAR and not self.answers_stand_out
        if (one_set or far) and not self.known:
            return "documents"
        if (
            self.clustered > CLUSTERED
            and self.agreement < AGREEMENT
            and self.own_share < OVERLAP
            and not self.answered
        ):
            return "elsewhere"
        if self.answered or self.answers_stand_out:
            return "log"
        return "clean or log" if self.answered is None else "clean"

    @property
    def like_documents(self) -> bool:
        """True if nothing sets the bank apart from documents of the gallery's kind, whatever their subjects."""
        return self.one_sided < ONE_SIDED

    @property
    def answers_stand_out(self) -> bool:
        """True if the nearest targets of the queries look like answers."""
        return self.spacing > LOG

    @property
    def objection(self) -> str | None:
        """The reason against a fit on this bank, if there is one."""
        usable = ("clean", "log", "clean or log", "too small to tell")
        return None if self.kind in usable else str(self)

    @property
    def doubt(self) -> str | None:
        """The question that the bank alone cannot answer, and what would.

        It may not be made of queries, or ask about one part of the gallery, to the harm of the rest.
        """
        if self.objection or not self.told:
            return None
        if self.like_documents and not self.known:
            return (
                "whether this bank helps or harms is not known without answers: it may be documents, or synonyms of "
                f"the targets ({self.one_sided:.0%} of its vectors lie beyond their nearest targets, of other queries "
                "84% and more); such banks changed R@1 by -3 to +1 points on text: pass the answers of fifty queries "
                "or more (--answers)"
            )
        if not (self.clustered > CLUSTERED and self.agreement < AGREEMENT):
            return None
        return (
            f"what the bank finds lies together ({self.clustered:.2f}): if it asks about one part of the gallery only, "
            "measure the rest with `hubplugin evaluate`; such banks changed R@1 by -3 to +4 points"
        )

    def __str__(self) -> str:
        """Describe the kind of bank in one sentence."""
        ratio = f"(spacing ratio {self.spacing:.2f})"
        log = "the bank is a log: its answers are known, and in the gallery"
        if self.answers_stand_out:
            log = f"the bank looks like a log: its answers are in the gallery {ratio}"
        documents = (
            f"the bank looks like documents about something else, not queries: {self.one_sided:.0%} of its vectors lie "
            f"beyond their nearest targets ({ONE_SIDED:.0%} is needed), and they come {self.near:.0%} as near to the "
            f"gallery as its own vectors to each other ({AS_NEAR:.0%} is needed)"
        )
        if self.own_share < OWN_SHARE:
            documents = (
                f"the bank looks like documents, not queries: {self.own_share:.0%} of nearest neighbours come from the "
                f"own set, as in two halves of one set ({OWN_SHARE:.1%} is needed)"
            )
        return {
            "clean": "the bank is clean: its answers are in the target bank, not in the gallery",
            "log": log,
            "clean or log": "the bank cannot be told from a log: no answers stand out in the gallery, but they may be "
            f"there {ratio}",
            "documents": documents,
            "swapped": "query bank and target bank look swapped: of nearest neighbours come from the own set "
            f"{self.own_share:.0%} of the query bank and the gallery, as in two halves of one set, and "
            f"{self.target_share:.0%} of the target bank and the gallery",
            "mixture": f"the bank looks like a mixture of two kinds of vectors: {self.between:.0%} of the variance of "
            f"its similarities lies between its queries ({BETWEEN:.0%} is allowed)",
            "another model": "the bank looks as if another model had embedded it: its queries come "
            f"{max(self.near, 0):.0%} as near to the gallery as its own vectors to each other, where 0% is chance "
            f"({CHANCE:.0%} is needed)",
            "elsewhere": "the bank looks as if it came from elsewhere, or asked about one corner of the gallery: what "
            f"it finds lies together ({self.clustered:.2f}, {CLUSTERED} is allowed), and on the hubs it disagrees with "
            f"the gallery ({self.agreement:.2f}, {AGREEMENT} is needed)",
            "too small to tell": f"the bank, or the gallery, is too small to tell its kind ({FEWEST} rows are needed)",
        }[self.kind]


def profile(
    bank: PreparedBank,
    queries: np.ndarray,
    targets: np.ndarray,
    answered: bool,
    seed: int,
) -> BankProfile:
    """Look at samples of a bank and its gallery.

    Args:
        bank: The bank, with its gallery.
        queries: Some of the bank's, all distinct [m, d].
        targets: Some of the gallery's [n, d].
        answered: Clicks or pairs say that the answers are in the gallery.
        seed: The seed of what is drawn.
    """
    distinct = len(bank.distinct)
    known = bank.known_answers is not None
    if min(len(queries), len(targets)) < FEWEST:
        return BankProfile(distinct, known=known, told=False)
    metric, compute = bank.metric, bank.compute
    rng = np.random.default_rng(seed)
    queries = rng.permutation(queries)[:SEEN]
    targets = rng.permutation(targets)[:SEEN]
    moved_queries, moved_targets = _as_queries(queries, targets, metric)
    from_bank = _similarities(moved_queries, targets, metric, compute)
    from_gallery = _similarities(moved_targets, targets, metric, compute)
    np.fill_diagonal(from_gallery, -math.inf)
    queries = _unit(queries, metric)
    unit = _unit(targets, metric)
    share = own_share(queries, unit, compute, rng)
    target_share = 0.5
    second = bank.target_bank
    if share < OWN_SHARE and second is not None and len(second) >= FEWEST:
        target_share = own_share(_unit(second, metric), unit, compute, rng)
    is_answered = answered or (False if bank.answers_are_elsewhere else None)
    mean_variance = float(from_bank.mean(axis=1).var())
    return BankProfile(
        distinct=distinct,
        spacing=_spacing(bank),
        own_share=share,
        target_share=target_share,
        one_sided=one_sided(queries, unit, compute),
        near=typical_similarity(queries, unit, metric, compute, rng),
        between=mean_variance / max(float(from_bank.var()), 1e-30),
        clustered=_join_count(from_bank.argmax(axis=1), _neighbours(unit, compute)),
        agreement=_correlation(_hubness(from_bank), _hubness(from_gallery)),
        known=known,
        answered=is_answered,
    )


def _hubness(similarities: np.ndarray) -> np.ndarray:
    """Return the mean of the 16 largest `similarities` [m, n] of each target: [n]."""
    size = min(16, len(similarities) - 1)
    means: np.ndarray = topk(similarities.T, size)[0].mean(axis=1)
    return means


def _spacing(bank: PreparedBank) -> float:
    """Return the spacing ratio of the bank in the gallery, 1 where the target bank holds the answers.

    A hub stands out as an answer does, but it is one target: so of the queries that have the same nearest target one
    counts.
    """
    if bank.answers_are_elsewhere:
        return 1.0
    largest = bank.survey.largest
    ratio = spacing_ratio(largest)
    once = np.unique(bank.survey.nearest, return_index=True)[1]
    return ratio if ratio <= LOG else spacing_ratio(largest[once])


def own_share(
    first: np.ndarray, second: np.ndarray, compute: Compute, rng: np.random.Generator
) -> float:
    """Share of the nearest neighbours that come from the same set, of `first` and `second` in equal shares: 0.5 if they
    are one set, 1 if they lie apart (Schilling 1986).

    `rng` draws small sets again, which lessens the error; `compute` multiplies.
    """
    size = min(len(first), len(second), SEEN // 2)
    shares = []
    for _ in range(min(8, SEEN // (2 * size))):
        both = np.concatenate(
            [rng.permutation(first)[:size], rng.permutation(second)[:size]]
        )
        near = _neighbours(both, compute)
        same = (near >= size) == (np.arange(2 * size) >= size)[:, None]
        shares.append(float(same.mean()))
    return float(np.mean(shares))


def _similarities(
    bank: np.ndarray, targets: np.ndarray, metric: Metric, compute: Compute
) -> np.ndarray:
    return dense(Similarities(bank, metric, compute), as_vectors(targets, "targets"))


def _neighbours(vectors: np.ndarray, compute: Compute) -> np.ndarray:
    """The rows of the `NEIGHBOURS` nearest other vectors: [n, k]."""
    similarities = _similarities(vectors, vectors, Metric.EUCLIDEAN, compute)
    np.fill_diagonal(similarities, -math.inf)
    return topk(similarities, min(NEIGHBOURS, len(vectors) - 1))[1]


def one_sided(queries: np.ndarray, targets: np.ndarray, compute: Compute) -> float:
    """Share of `queries` [m, d] that lie beyond their nearest `targets` [n, d], in the direction from the targets to
    their nearest queries; `compute` multiplies.

    What all queries have and no target has, such as their form or their language, leads to the same side from both
    ends. Subjects do not: from documents about one to the nearest about another is the way back from these.
    """
    similarities = _similarities(queries, targets, Metric.EUCLIDEAN, compute)
    size = min(NEIGHBOURS, *similarities.shape)
    nearest_queries = topk(similarities.T, size)[1]
    nearest_targets = topk(similarities, size)[1]
    counts = np.bincount(nearest_queries.reshape(-1), minlength=len(queries))
    direction = counts @ queries / nearest_queries.size - targets.mean(axis=0)
    places = (targets @ direction)[nearest_targets].mean(axis=1)
    return float((queries @ direction > places).mean())


def typical_similarity(
    queries: np.ndarray,
    targets: np.ndarray,
    metric: Metric,
    compute: Compute,
    rng: np.random.Generator,
) -> float:
    """Return how near the nearest targets of queries lie.

    0 is as near as those of random directions, 1 as near as the targets lie to each other.

    Both sides are taken about their means, and copies are left out. 1 where nothing can be told: where the targets lie
    no nearer to each other, or chance comes near in few dimensions.

    Args:
        queries, targets: [m, d] and [n, d].
        metric: the similarity.
        compute: multiplies.
        rng: draws the random directions.
    """
    queries_about_mean = _about_mean(queries, metric)
    gallery = _about_mean(targets, metric)
    random = _unit(
        rng.normal(size=(SEEN // 2, queries.shape[1])).astype(np.float32), Metric.COSINE
    )

    def nearest(vectors: np.ndarray) -> float:
        similarities = _similarities(vectors, gallery, Metric.DOT, compute)
        return float(np.where(similarities > COPY, -1, similarities).max(axis=1).mean())

    chance, between_targets = nearest(random), nearest(gallery)
    if chance > 0.5 or between_targets - chance < ORDER * (1 - chance):
        return 1.0
    return (nearest(queries_about_mean) - chance) / (between_targets - chance)


def _join_count(nearest: np.ndarray, neighbours: np.ndarray) -> float:
    """Return whether the targets that the bank finds, `nearest` [m], are `neighbours` [n, k] of one another.

    A join count. Of a large bank it is the mean of parts of `FINDING` queries.
    """
    whole = len(nearest) // FINDING
    parts = nearest[None]
    if whole:
        parts = nearest[: whole * FINDING].reshape(whole, FINDING)
    counts = []
    for part in parts:
        is_found = np.isin(np.arange(len(neighbours)), part).astype(float)
        counts.append(_correlation(is_found, is_found[neighbours].mean(axis=1)))
    return float(np.mean(counts))


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return the correlation of two arrays, 0 where either is constant."""
    if not np.ptp(first) or not np.ptp(second):
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _unit(vectors: np.ndarray, metric: Metric) -> np.ndarray:
    """Return `vectors` at unit length, but where lengths matter to neighbours."""
    return vectors if metric is Metric.EUCLIDEAN else _of_length(vectors, 1.0)


def _about_mean(vectors: np.ndarray, metric: Metric) -> np.ndarray:
    """Return directions of the first of `vectors` about the mean of all."""
    vectors = _unit(vectors, metric)
    return _of_length(vectors - vectors.mean(axis=0), 1.0)[: SEEN // 2]


def _of_length(vectors: np.ndarray, length: float) -> np.ndarray:
    scaled: np.ndarray = vectors * (
        length / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
    )
    return scaled


def _as_queries(
    queries: np.ndarray, targets: np.ndarray, metric: Metric
) -> tuple[np.ndarray, np.ndarray]:
    """`queries` [m, d], and the gallery's own vectors [n, d] in the place of queries: moved by the distance of the two
    means, which is most of what sets two modalities apart (Liang et al. 2022).

    All are of one length where the length of a query changes no ranking, or where queries have one anyway: the
    same vectors are then judged the same by every metric and on every scale.
    """
    lengths = np.linalg.norm(queries, axis=1)
    length = np.median(lengths)
    free = metric is not Metric.EUCLIDEAN
    if free:
        gallery_length = np.median(np.linalg.norm(targets, axis=1))
        targets = targets * (length / max(gallery_length, 1e-30))
    moved = targets - targets.mean(axis=0) + queries.mean(axis=0)
    if free or np.ptp(lengths) <= 0.01 * length:
        queries = _of_length(queries, length)
        moved = _of_length(moved, length)
    return (
        np.ascontiguousarray(queries, np.float32),
        np.ascontiguousarray(moved, np.float32),
    )
