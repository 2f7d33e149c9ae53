"""Learn a linear map of the query from known answers.

Each map is computed in closed form from a part of the pairs of queries and answers. The
pairs that were held out choose among several maps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, TypeAlias

import numpy as np
from pydantic import Field, InstanceOf, computed_field

from hubplugin.bank import (
    SEEN,
    Bank,
    PreparedBank,
    number_rows,
    own_share,
    read_store,
)
from hubplugin.compute import Compute, TopK, search
from hubplugin.errors import CorrectionRefused, InputError, Parameter
from hubplugin.guard import FEWEST_PARAPHRASES
from hubplugin.measures.significance import Figure, Side
from hubplugin.methods import Method
from hubplugin.methods.blend import Blend
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, QueryMap
from hubplugin.validation import (
    Fold,
    Margins,
    OffsetsAndMap,
    change_of,
    cross_validate,
    folds_within,
    pairs_of,
)
from hubplugin.vectors import (
    Scannable,
    VectorLike,
    draw_sample,
)

FEWEST_PAIRS = 50
"""The fewest distinct pairs to learn from."""

FEWEST_TARGETS = 10
"""The fewest distinct targets in these pairs."""

CHANCE_ERRORS = 3.0
"""The standard errors by which `share_nearer` must exceed 0.5, which is chance. Other
pairs are refused. Right answers may exceed it by little: of informal names for Unicode
characters, of which the raw search finds 11 %, 71 to 75 % are nearer to their own."""

USUAL_NEARER = 0.9
"""The least usual `share_nearer` of right clicks: 0.9 to 1 for twelve kinds of data,
and less for two, where the raw search finds 11 % at most. With 30 % of the clicks
wrong, it is 0.76 to 0.86."""

STEPS: dict[str, dict[float, tuple[float, ...]]] = {
    "asked": {1.0: (0.0, 0.5, 1.0, 2.0), 0.25: (0.5, 1.0, 2.0)},
    "none": {1.0: (0.5, 1.0), 0.25: (0.5, 1.0)},
}
"""The strengths of a map to try, by its negatives and by its ridge, see `solve_map`.

The negatives are the targets that the map tells an answer from: "asked", all targets
that were asked for; "none", so that the map moves a query to its answer."""

SHARES = {1.0: "", 0.5: ", with half of the offsets", 0.0: ", without offsets"}
"""The shares of the offsets to try with each map, and what a note says of them."""

RAW_CANDIDATE = len(SHARES) - 1
"""The number of the raw search among the candidates: no map, and the last of `SHARES`.

Candidate 0 is the offsets alone."""

FOLDS = 3
"""The number of folds of each side."""

PROBES = 500
"""The most pairs that one fold holds out."""

SOFTNESS = 0.4
"""The softness of R@1: a query counts as right by sigmoid(margin / (SOFTNESS tau))."""

AGAIN = 0.2
"""The gain of a target that is asked for again in other words, relative to the gain of
the pairs that taught. On logs with several wordings per target, it is 0.3 to 0.7; a
lower value spares targets that nobody asks for (docs/measurements/learning.md)."""

PRUDENCE = 1.0
"""The standard errors that are subtracted from a gain on held-out pairs."""

APART = 0.85
"""The `own_share` from which held-out pairs may miss a loss, as across modalities and
languages (docs/measurements/methods.md). Then no side may gain less than with the
offsets alone, offsets keep their full share, and nothing is whitened."""

INTERVAL_FACTOR = 1.4
"""The factor that widens the interval of a change: the held-out pairs also choose the
map, and the folds share most of the pairs that teach."""

SEARCHED_PAIRS = 1_000
"""The number of pairs to search for in the whole gallery. The share that is found then
has a standard error of 1.3 points."""

FOUND = 0.8
"""The share of pairs found by the raw search from which pairs are refused: titles that
appear in their documents say nothing about other queries. Of titles that taught
something, the raw search found 40 to 64 %; of those that did harm, 88 %."""

IDENTITY_SHARE = 0.7
"""The share of the identity that a whitening keeps. Of 0.9, 0.7, 0.5 and 0.3, it gained
most on twelve kinds of data (docs/measurements/learning.md)."""

PRODUCTS = 1 << 22
"""The number of similarities in one block: 16 MiB, which fit in a cache."""


Pairs: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The queries, the row of each query's target among the targets, and the targets; see
`pairs_of`."""


def read_learn(
    learn: object,
    method: str,
    metric: Metric | str,
    targets: object,
    executor: object = None,
) -> bool | Bank:
    """Return `learn` as False, True or a bank of pairs.

    Raises InputError for any other value. Unless `learn` is False, it is also raised for
    arguments that learning does not support: another method, the Euclidean metric, no
    gallery, or an executor.
    """
    if not isinstance(learn, (bool, Bank)):
        got = type(learn).__name__
        raise InputError(
            Parameter("learn"),
            f": expected True, False, or pairs as Bank(titles, ids), got {got}",
        )
    if learn is False:
        return False
    unsupported = {
        "method": method != "blend",
        "metric": Metric(metric) is Metric.EUCLIDEAN,
        "targets": targets is None,
        "executor": executor is not None,
    }
    for name, is_unsupported in unsupported.items():
        if is_unsupported:
            raise InputError(
                "learning needs the default method, an inner product, a gallery and no "
                "executor: change ",
                Parameter(name),
            )
    return learn


@dataclass(frozen=True)
class Teachers:
    """The banks that teach a correction and a query map.

    bank: The bank for the offsets, whose answers also teach the map.
    pairs: More pairs that teach the map, such as titles with the rows of documents.
    """

    bank: PreparedBank
    pairs: PreparedBank | None = None

    @classmethod
    def read(
        cls,
        bank: Bank,
        learn: bool | Bank,
        metric: Metric | str,
        compute: Compute,
        gallery: object = None,
    ) -> Teachers:
        """Read the banks, before their gallery is known.

        Args:
            bank, metric, compute: As in `hubplugin.fit`.
            learn: False, True, or the pairs.
            gallery: As in `Bank.prepare`.

        Raises:
            InputError: A bank cannot be used, or the two banks cannot be combined.
        """
        prepared = bank.prepare(metric, compute, gallery)
        if not isinstance(learn, Bank):
            return cls(prepared)
        if learn.name == Bank.name:
            # Error messages must tell the pairs from the bank.
            learn = replace(learn, name="pairs")
        pairs = learn.prepare(metric, compute, gallery)
        if pairs.clicks is None:
            raise InputError(
                Parameter("learn"),
                ": the pairs lack ids or rows; pass Bank(titles, ids)",
            )
        if prepared.target_bank is not None:
            raise InputError(
                "the bank has vectors as answers, so no pairs can be added: leave ",
                Parameter("learn"),
                " out",
            )
        return cls(prepared, pairs)

    @property
    def clicks(self) -> np.ndarray | None:
        """The ids of all clicked targets, before `against` turns them into rows."""
        clicks = []
        for bank in (self.bank, self.pairs):
            if bank is not None and bank.clicks is not None:
                clicks.append(bank.clicks.astype(object))
        return np.concatenate(clicks) if clicks else None

    def against(
        self, targets: VectorLike, ids: Mapping[int | str, int] | None = None
    ) -> Teachers:
        """Return these banks with the gallery `targets`.

        If there are pairs, the bank's answers are dropped when they are too few to
        learn from. A pair is dropped if an earlier pair equals it. It is also dropped
        if the bank has an answer for its query: when that query is held out, the pair
        would teach its answer.

        Args:
            targets: The gallery.
            ids: As in `PreparedBank.against`.
        """
        clicks = self.clicks
        if ids is None and isinstance(targets, Scannable) and clicks is not None:
            targets, ids = read_store(targets, clicks)
        bank = self.bank.against(targets, ids)
        if self.pairs is None:
            return Teachers(bank)
        if not has_enough(bank):
            bank = replace(bank, clicks=None)
        answered = bank.query_bank[distinct_pairs(bank)]
        pairs = self.pairs.against(targets, ids)
        rows = distinct_pairs(pairs)
        queries = np.concatenate([answered, pairs.query_bank[rows]])
        # `number_rows` gives the first row that equals each query. For a query that the
        # bank answers, this row lies in `answered`.
        is_new = number_rows(queries)[len(answered) :] >= len(answered)
        return Teachers(bank, pairs.take(rows[is_new]))

    @property
    def unasked(self) -> bool:
        """True if the pairs must choose the map, since the bank has no answers."""
        return self.pairs is not None and self.bank.clicks is None

    @cached_property
    def together(self) -> PreparedBank:
        """All queries in one bank: first the bank, then the pairs."""
        if self.pairs is None:
            return self.bank
        return self.bank.with_pairs(self.pairs)

    def find_teaching(self) -> np.ndarray:
        """Return the rows of `together` that teach.

        Raises the same errors as `find_pairs`, for the bank or for the pairs.
        """
        rows = distinct_pairs(self.bank)
        if not self.unasked:
            find_pairs(self.bank)
        if self.pairs is None:
            return rows
        added = distinct_pairs(self.pairs)
        # Beside a bank with answers, few pairs are enough: `against` may have dropped
        # the others.
        if self.unasked or has_enough(self.pairs):
            find_pairs(self.pairs, "the bank of pairs")
        return np.concatenate([rows, len(self.bank.query_bank) + added])


def find_pairs(bank: PreparedBank, name: str = "the bank") -> np.ndarray:
    """Return the rows [m] of a bank's distinct pairs, if they are enough to learn from.

    Args:
        bank: The bank.
        name: The name of the bank in error messages.

    Raises:
        InputError: The bank has no known answers, or too few.
        CorrectionRefused: The answers do not belong to the queries.
    """
    bank.require_answers()
    rows = distinct_pairs(bank)
    pairs = pairs_of(bank, rows)
    if not has_enough(bank):
        raise InputError(
            f"{name} has {len(rows)} different pairs of {len(pairs[2])} targets; "
            f"learn=True needs {FEWEST_PAIRS} pairs of {FEWEST_TARGETS} targets: collect "
            "more, or leave ",
            Parameter("learn"),
            " out",
        )
    share = share_nearer(pairs)
    least = 0.5 + CHANCE_ERRORS * 0.5 / len(rows) ** 0.5
    if share < least:
        raise CorrectionRefused(
            f"the answers of {name} do not belong to its queries: {share:.0%} of "
            f"these are nearer to their own than to another's ({least:.0%} is "
            "needed, 50% is chance); nothing was changed: pass answers from this "
            "gallery, and queries embedded with the gallery's model"
        )
    return rows


def distinct_pairs(bank: PreparedBank) -> np.ndarray:
    """Return the first row of each distinct (query, answer) pair, [m], ascending.

    Without known answers, there are none.
    """
    answers = bank.known_answers
    if answers is None:
        return np.empty(0, np.int64)
    answered = np.flatnonzero(answers >= 0)
    # Equal queries have the same number in `bank.same`.
    pairs = np.stack([bank.same[answered], answers[answered]], axis=1)
    _, first_rows = np.unique(pairs, axis=0, return_index=True)
    return np.sort(answered[first_rows])


def has_enough(bank: PreparedBank) -> bool:
    """Return True if the distinct pairs of a bank are enough to learn from."""
    rows = distinct_pairs(bank)
    if len(rows) < FEWEST_PAIRS:
        return False
    return len(np.unique(bank.require_answers()[rows])) >= FEWEST_TARGETS


def share_nearer(pairs: Pairs) -> float:
    """Return the share of queries nearer to their own answer than to another answer.

    Each query's answer is compared with that of another pair, at random. So the share
    of unrelated pairs is 0.5, however popular some targets are. If both answers are
    equally near, the query counts as one half; if they are the same, it does not count.
    """
    queries, answer, targets = pairs
    other = np.random.default_rng(0).permutation(answer)
    lead = (queries * (targets[answer] - targets[other])).sum(axis=1)
    return float(np.heaviside(lead[answer != other], 0.5).mean())


def doubtful_share(pairs: Pairs) -> float:
    """Return the share of queries nearer to another answer; 0 if that is usual."""
    nearer = share_nearer(pairs)
    # A share that is lower by up to two standard errors may be chance.
    error = (USUAL_NEARER * (1 - USUAL_NEARER) / len(pairs[0])) ** 0.5
    return 1 - nearer if nearer < USUAL_NEARER - 2 * error else 0.0


def require_able_to_choose(teachers: Teachers) -> None:
    """Raise CorrectionRefused for pairs that cannot tell what a map gains.

    Such pairs are as far from the bank's queries as another language would be, or the
    raw search already finds most of their targets.
    """
    bank = teachers.bank
    pairs = teachers.pairs
    assert pairs is not None
    rng = np.random.default_rng(0)
    own_neighbours = own_share(bank.query_bank, pairs.query_bank, bank.compute, rng)
    found_share = share_found(pairs)
    if own_neighbours >= APART:
        reason = (
            "the pairs are unlike the queries of the bank: "
            f"{own_neighbours:.0%} of nearest "
            f"neighbours come from the own set ({APART:.0%} is too much), as across "
            "languages, so they may teach a wrong map"
        )
    elif found_share >= FOUND:
        reason = (
            f"the raw search finds {found_share:.0%} of the pairs ({FOUND:.0%} is too "
            "much), so they cannot tell what a map gains"
        )
    else:
        return
    raise CorrectionRefused(
        f"{reason}; nothing was changed: leave the pairs out, or pass the ",
        Parameter("answers"),
        " of 50 queries of the bank, which then choose",
    )


def share_found(pairs: PreparedBank) -> float:
    """Return the share of pairs, in a sample, whose target comes first, raw."""
    rows = np.random.default_rng(0).permutation(len(pairs.query_bank))[:SEARCHED_PAIRS]
    queries, answer, targets = pairs_of(pairs, rows)
    top = TopK(1)
    quiet = pairs.compute.without_progress
    search(queries, pairs.require_targets(), pairs.metric, quiet, top)
    own_scores = (queries * targets[answer]).sum(axis=1)
    best = top.scores[0, :, 0]
    # An answer that ties with the nearest target, up to rounding, counts as found.
    return float((own_scores >= best - 1e-5).mean())


NOTHING_TAUGHT = "the pairs taught nothing beyond the offsets: queries are not mapped"
UNASKED_NOTE = (
    "this is R@1 of held-out pairs such as titles, with which nobody searches: real "
    "queries gained 0 to 10 points over the offsets alone (docs/titles.md)"
)


@dataclass(frozen=True)
class LearnedMap:
    """A query map learned from the known answers of a bank, and its gain.

    model: The model. It has a query map unless held-out answers gain nothing from one.
    map_fit: The chosen fit.
    asked: R@1 of the raw search, and with offsets and map, for held-out queries whose
        targets were taught by other queries. None if there are few.
    other: The same for held-out pairs whose targets were not taught.
    unasked: True if the held-out pairs are not queries that people asked, but titles,
        for example.
    doubtful: The `doubtful_share` of the bank's clicks; 0 if it has none.
    """

    model: OffsetModel
    map_fit: Annotated[InstanceOf[MapFit], Field(exclude=True)]
    asked: Side | None
    other: Side
    unasked: Annotated[bool, Field(exclude=True)]
    doubtful: Annotated[float, Field(exclude=True)]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def strength(self) -> float:
        """The strength of the map, 0 if none was learned."""
        return self.map_fit.strength

    @property
    def notes(self) -> list[str]:
        """What was learned and what it gains, and a warning about wrong clicks."""
        notes = list[str]()
        query_map = self.model.query_map
        if query_map is None:
            notes.append(NOTHING_TAUGHT)
        else:
            changes = f"not asked for before: {self.other}"
            if self.asked is not None:
                changes = f"asked for before: {self.asked}; {changes}"
            offsets = SHARES[self.map_fit.share]
            notes.append(f"{query_map}{offsets}; over the raw search, {changes}")
            if self.unasked:
                notes.append(UNASKED_NOTE)
        if self.doubtful:
            notes.append(
                f"{self.doubtful:.0%} of the queries are nearer to another query's "
                f"answer (with right clicks, mostly {1 - USUAL_NEARER:.0%} at most). "
                "If people clicked on wrong results, held-out clicks are wrong, too, "
                "and these figures are too low: pass the clicks as pairs, with a bank "
                "of 50 answers that somebody has checked (docs/learning.md)"
            )
        return notes


def learn_query_map(configuration: Method, teachers: Teachers) -> LearnedMap:
    """Fit `configuration` on a bank, with the query map that known answers teach.

    Every map is first learned from one part of the pairs and tried on the rest. The
    kind of map that gains most there is then learned from all pairs.

    Args:
        configuration: The method of the offsets, `blend`.
        teachers: The banks, with their gallery. The pairs choose the map if the bank's
            answers were too few and `Teachers.against` dropped them. Otherwise, the
            bank's answers choose it.

    Raises:
        InputError: One of the banks has too few answers.
        CorrectionRefused: The answers do not belong to the queries, or pairs that must
            choose the map are unlike the queries or found by the raw search.
    """
    assert isinstance(configuration, Blend), "`read_learn` checks it"
    bank = teachers.bank
    teaching = teachers.find_teaching()
    if teachers.unasked:
        require_able_to_choose(teachers)
    bases = list_bases(configuration, teachers)
    # The order of the fits is that in which `cross_validate` numbers the candidates.
    fits = [fit for base in bases for fit in base.variants]
    sides = {
        side: cross_validate(
            [base.try_variants for base in bases], teachers.together, folds, hits=0
        )
        for side, folds in draw_sides(teachers, teaching).items()
    }
    rng = np.random.default_rng(0)
    sample = draw_sample(bank.require_targets(), SEEN, bank.metric, rng)
    are_apart = own_share(bank.query_bank, sample, bank.compute, rng) >= APART
    allowed = [fit.may_be_chosen(are_apart, teachers.unasked) for fit in fits]
    number = choose(sides, bases[0].tau, np.array(allowed), are_apart)

    chosen = fits[number]
    taught = pairs_of(teachers.together, teaching[teaching < chosen.teaching_limit])
    query_map = chosen.learn(taught)
    # The bank to resolve for is the one that the offsets are fitted on.
    chosen = replace(chosen, method=configuration.resolve(map_bank(bank, query_map)))
    doubtful = 0.0
    if not teachers.unasked:
        doubtful = doubtful_share(pairs_of(bank, distinct_pairs(bank)))
    asked = None
    if "asked" in sides:
        asked = forecast(sides["asked"], number, "other wordings")
    return LearnedMap(
        model=chosen.fit(bank, query_map),
        map_fit=chosen,
        asked=asked,
        other=forecast(sides["other"], number, "pairs"),
        unasked=teachers.unasked,
        doubtful=doubtful,
    )


def list_bases(configuration: Blend, teachers: Teachers) -> list[MapFit]:
    """Return the fits whose `variants` to try: one without a whitening, one with it.

    If the bank has answers and there are pairs, too, both fits are also tried without
    the pairs, since titles may harm the queries that people ask.
    """
    bank = teachers.bank
    pairs = teachers.pairs
    tau = configuration.resolve(bank).tau
    assert tau is not None
    plain = MapFit(configuration, 0.0, tau, pairs=pairs)
    bases = [plain, replace(plain, whitens=True)]
    if pairs is not None and not teachers.unasked:
        limit = len(bank.query_bank)
        bases += [replace(base, pairs=None, teaching_limit=limit) for base in bases]
    return bases


@dataclass(frozen=True)
class MapFit:
    """A way to fit offsets and a map together, callable as a `Candidate`.

    The map is (I + strength W) Z, see `solve_map` for W and `compute_whitening` for Z.

    method, share: The method of the offsets, and the share of its strength to use.
    tau: The temperature of W.
    whitens: False if Z is the identity.
    negatives, ridge: Those of W, keys of `STEPS`.
    pairs: Pairs that teach in addition to those of a fold.
    teaching_limit: Rows of `Teachers.together` from this number on do not teach.
    """

    method: Blend
    strength: float
    tau: float
    whitens: bool = False
    share: float = 1.0
    negatives: str = "asked"
    ridge: float = 1.0
    pairs: PreparedBank | None = None
    teaching_limit: float = np.inf

    @property
    def variants(self) -> list[MapFit]:
        """Every map with every share of the offsets, in the order of `try_variants`."""
        return [
            replace(
                self, negatives=negatives, ridge=ridge, strength=strength, share=share
            )
            for negatives, by_ridge in STEPS.items()
            for ridge, strengths in by_ridge.items()
            for strength in strengths
            for share in SHARES
        ]

    def try_variants(
        self, train: PreparedBank, bank: PreparedBank, teach: np.ndarray
    ) -> list[OffsetsAndMap]:
        """Return the offsets and the map of each of `variants`.

        `cross_validate` calls this as a `Candidate`.
        """
        pairs = pairs_of(bank, teach[teach < self.teaching_limit])
        z = self.find_whitening(pairs)
        queries = pairs[0] @ z.T
        # For speed, all variants share the offsets of the whitened bank. The chosen fit
        # computes those of the mapped bank.
        whitened = replace(train, query_bank=train.query_bank @ z.T)
        offsets = self.method.resolve(whitened).raw_offsets(whitened)
        tried = list[OffsetsAndMap]()
        for negatives, by_ridge in STEPS.items():
            fit = replace(self, negatives=negatives)
            residuals = fit.find_residuals(queries, pairs)
            for ridge, strengths in by_ridge.items():
                wz = solve_map(queries, residuals, ridge) @ z
                for strength in strengths:
                    variant = replace(self, strength=strength)
                    query_map = variant.compose_map(wz, z, len(queries))
                    tried += [(share * offsets, query_map) for share in SHARES]
        return tried

    def may_be_chosen(self, are_apart: bool, unasked: bool) -> bool:
        """Return False for a variant whose losses held-out pairs would not show.

        Less than the full offsets is refused if queries and targets `are_apart`, if the
        pairs are `unasked`, such as titles, or if there is no map, since nothing was
        learned. A whitening is refused if queries and targets `are_apart`.
        """
        if self.share < 1 and (are_apart or unasked or not self.has_map):
            return False
        return not (are_apart and self.whitens)

    @property
    def has_map(self) -> bool:
        """True if the map is not the identity."""
        return bool(self.strength) or self.whitens

    def learn(self, pairs: Pairs) -> QueryMap | None:
        """Return the map that `pairs` teach, or None if it is the identity."""
        z = self.find_whitening(pairs)
        queries = pairs[0] @ z.T
        w = solve_map(queries, self.find_residuals(queries, pairs), self.ridge)
        return self.compose_map(w @ z, z, len(queries))

    def find_whitening(self, pairs: Pairs) -> np.ndarray:
        """Return Z [d, d]: the whitening that `pairs` teach, or the identity."""
        queries, answer, targets = pairs
        if not self.whitens:
            return np.eye(queries.shape[1], dtype=np.float32)
        return compute_whitening(queries - targets[answer])

    def find_residuals(self, queries: np.ndarray, pairs: Pairs) -> np.ndarray:
        """Return R [m, d], what the whitened `queries` of pairs lack (`solve_map`)."""
        _, answer, targets = pairs
        expected = queries
        if self.negatives == "asked":
            expected = expect_targets(queries, targets, self.tau)
        residuals: np.ndarray = targets[answer] - expected
        return residuals

    def compose_map(self, wz: np.ndarray, z: np.ndarray, pairs: int) -> QueryMap | None:
        """Return the map (I + s W) Z, or None if it is the identity.

        Args:
            wz, z: W Z and Z [d, d]. s is the strength.
            pairs: The number of pairs that taught the map.
        """
        if not self.has_map:
            return None
        eye = np.eye(len(z), dtype=np.float32)
        step = z - eye + self.strength * wz
        return QueryMap(step, self.strength, pairs)

    @property
    def offset_method(self) -> Method:
        """The method of the offsets with `share` of its strength."""
        assert self.method.strength is not None, "the method is resolved"
        strength = self.share * self.method.strength
        return self.method.model_copy(update={"strength": strength})

    def fit(self, bank: PreparedBank, query_map: QueryMap | None) -> OffsetModel:
        """Fit the offsets for queries mapped by `query_map`.

        The model stores the unmapped bank, and maps it as it maps all queries.
        """
        model = self.offset_method.fit(map_bank(bank, query_map))
        terms = [replace(term, bank=bank.query_bank) for term in model.terms]
        return replace(
            model,
            terms=tuple(terms),
            query_map=query_map,
            bank_fingerprint=bank.fingerprint,
        )

    def __call__(
        self, train: PreparedBank, bank: PreparedBank, teach: np.ndarray
    ) -> list[OffsetsAndMap]:
        """Return the offsets and the map that a fold teaches, as a `Candidate`."""
        together = Teachers(bank, self.pairs).together
        # The added pairs, which follow the bank, teach in every fold.
        added = np.arange(len(bank.query_bank), len(together.query_bank))
        query_map = self.learn(pairs_of(together, np.concatenate([teach, added])))
        offsets = self.offset_method.raw_offsets(map_bank(train, query_map))
        return [(offsets, query_map)]


def map_bank(bank: PreparedBank, query_map: QueryMap | None) -> PreparedBank:
    """Return `bank` with its queries mapped."""
    if query_map is None:
        return bank
    return replace(bank, query_bank=query_map.of_bank(bank.query_bank))


def draw_sides(teachers: Teachers, rows: np.ndarray) -> dict[str, list[Fold]]:
    """Return the folds of `teachers.together`, by side.

    `rows` are the pairs that teach. Pairs of the bank are held out, and added pairs
    (such as titles) only teach. If only the added pairs have answers
    (`teachers.unasked`), they are held out instead.

    - "other": pairs whose target no teaching pair has.
    - "asked": pairs whose target some teaching pair has, in other words.
    - "taught": pairs that also teach; it replaces "asked" if a log has too few
      paraphrases, unless its clicks are doubtful.
    """
    together = teachers.together
    answers = together.require_answers()
    bank_size = len(teachers.bank.query_bank)
    test_rows = rows
    if not teachers.unasked:
        test_rows = rows[rows < bank_size]
    rng = np.random.default_rng(0)
    order = rng.permutation(test_rows)
    numbers, target = np.unique(answers, return_inverse=True)
    # All queries for a target are in its fold, so none of them teaches there.
    fold_of_target = rng.permutation(len(numbers)) % FOLDS
    by_target = fold_of_target[target]
    other = hold_out(
        teachers, rows, order=order, fold_of=by_target[order], key=by_target
    )
    sides = {"other": other}

    added_pairs_teach = len(test_rows) < len(rows)
    if added_pairs_teach:
        # Most targets have a title that teaches, even targets with a single click.
        by_wording = np.arange(len(order)) % FOLDS
    else:
        # Spread the wordings of a target over the folds, so that each fold can teach
        # some.
        by_wording = folds_within(answers[order], FOLDS)
    asked = []
    for fold in hold_out(
        teachers, rows, order=order, fold_of=by_wording, key=together.same
    ):
        # In this fold, some pair of the same target must still teach.
        still_asked = np.isin(answers[fold.test], answers[fold.teach])
        asked.append(fold._replace(test=fold.test[still_asked]))
    if sum(len(fold.test) for fold in asked) >= FEWEST_PARAPHRASES:
        sides["asked"] = asked
    elif teachers.bank.pairs is None:  # a log, whose targets may be asked for again
        clicks = pairs_of(together, test_rows)
        if not doubtful_share(clicks):  # a map that fits wrong clicks would gain here
            sides["taught"] = [Fold(np.arange(bank_size), order[:PROBES], rows)]
    return sides


def hold_out(
    teachers: Teachers,
    rows: np.ndarray,
    order: np.ndarray,
    fold_of: np.ndarray,
    key: np.ndarray,
) -> list[Fold]:
    """Return `FOLDS` folds of the teaching `rows`.

    In each fold, offsets are fitted on the bank's queries that teach and on those
    without an answer.

    Args:
        teachers: The banks.
        rows: The rows that teach, except in folds that hold out a row of the same key.
        order: The rows to hold out, in random order [h].
        fold_of: The fold in which each row of `order` is held out, -1 for none [h].
        key: A number for each row of `Teachers.together`, such as the fold of its
            target.
    """
    folds = []
    for number in range(FOLDS):
        tested = order[fold_of == number][:PROBES]
        taught = rows[~np.isin(key[rows], key[tested])]
        is_fitted = teachers.together.require_answers() < 0
        is_fitted[taught] = True
        in_bank = is_fitted[: len(teachers.bank.query_bank)]
        folds.append(Fold(np.flatnonzero(in_bank), tested, taught))
    return folds


def choose(
    sides: Mapping[str, Margins], tau: float, allowed: np.ndarray, are_apart: bool
) -> int:
    """Return the number of the candidate whose soft R@1 gains most over the raw search.

    The gain is the mean over the sides. On a side of held-out pairs, `PRUDENCE`
    standard errors are subtracted, and R@1 must not fall. The side "taught" of a log
    without paraphrases counts `AGAIN` times its gain: held-out targets alone would
    choose a map far too weak for targets that are asked for again. Return 0, the
    offsets alone, if no candidate is left.

    Args:
        sides: The trials of all candidates, by side.
        tau: The temperature of the margins.
        allowed: True for each candidate that may be chosen, bool [c].
        are_apart: True if queries and targets lie apart. Then no side of held-out pairs
            may gain less than with the offsets alone.
    """
    values = list[np.ndarray]()
    for side, tried in sides.items():
        assert tried.margins is not None
        assert tried.right is not None
        soft = 1 / (1 + np.exp(np.clip(-tried.margins / (SOFTNESS * tau), -30, 30)))
        gains = soft - soft[RAW_CANDIDATE]
        gain = gains.mean(axis=1)
        if side == "taught":
            values.append(AGAIN * gain)
            continue
        error = gains.std(axis=1) / gains.shape[1] ** 0.5
        values.append(gain - PRUDENCE * error)
        right = tried.right.mean(axis=1)
        allowed = allowed & (right >= right[RAW_CANDIDATE])
        if are_apart:
            allowed = allowed & (gain >= gain[0])
    # If no candidate is allowed, all values are equal, and the first one is returned.
    value = np.where(allowed, np.mean(values, axis=0), -np.inf)
    return int(np.argmax(value))


def forecast(tried: Margins, number: int, what: str) -> Side:
    """Return R@1 to expect of the raw search and of candidate `number`.

    The interval of the change is wider than that of the held-out queries, see
    `INTERVAL_FACTOR`.
    """
    side = change_of(tried, RAW_CANDIDATE, number, what)
    assert side is not None
    value = side.change.value
    # A loss that none of n pairs shows may still affect 3 in n (the rule of three).
    room = 3 / side.queries
    low = value + INTERVAL_FACTOR * (side.change.low - value) - room
    high = value + INTERVAL_FACTOR * (side.change.high - value) + room
    return replace(side, change=Figure(value, low, high))


def solve_map(queries: np.ndarray, residuals: np.ndarray, ridge: float) -> np.ndarray:
    """Return W [d, d], the ridge regression from queries to residuals.

        W = R' Q (Q' Q + r I)^-1, where r is `ridge` times the mean eigenvalue of Q' Q
        R = A - p T, where p = softmax(Q T' / tau): the descent of the cross-entropy
        R = A - Q without negatives

    A are the answers, and T the negatives. The products are computed in float32, and
    the system is solved in float64.

    Args:
        queries: Q [m, d].
        residuals: R [m, d].
        ridge: The ridge, relative to the mean eigenvalue.
    """
    gram = (queries.T @ queries).astype(np.float64)
    r = ridge * np.trace(gram) / len(gram)
    product = (queries.T @ residuals).astype(np.float64)
    w = np.linalg.solve(gram + r * np.eye(len(gram)), product).T
    return np.ascontiguousarray(w, np.float32)


def expect_targets(queries: np.ndarray, targets: np.ndarray, tau: float) -> np.ndarray:
    """Return p T [m, d], the mean of the targets T weighted by p = softmax(Q T' / tau).

    Similarities are computed in blocks of `PRODUCTS`.
    """
    expected = np.empty_like(queries)
    size = max(PRODUCTS // len(targets), 1)
    for start in range(0, len(queries), size):
        rows = slice(start, start + size)
        # p is the numerator of the softmax; the division below comes last.
        p = (queries[rows] / np.float32(tau)) @ targets.T
        p -= p.max(axis=1, keepdims=True)
        np.exp(p, out=p)
        expected[rows] = (p @ targets) / p.sum(axis=1, keepdims=True)
    return expected


def compute_whitening(differences: np.ndarray) -> np.ndarray:
    """Return Z [d, d], which shrinks directions in which queries miss their answers:

        Z = t (k t I + (1 - k) C)^-1

    C is the covariance of `differences` [m, d], each a query minus its answer. t is the
    mean of C's diagonal, and k is `IDENTITY_SHARE`.
    """
    centred = differences - differences.mean(axis=0)
    covariance = (centred.T @ centred).astype(np.float64) / len(centred)
    eye = np.eye(len(covariance))
    t = float(np.trace(covariance)) / len(eye) or 1.0  # 0 if all are equal
    z = t * np.linalg.inv(IDENTITY_SHARE * t * eye + (1 - IDENTITY_SHARE) * covariance)
    return np.ascontiguousarray(z, np.float32)
