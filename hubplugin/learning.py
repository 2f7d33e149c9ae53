"""A linear map of the query from known answers: one closed step, which held-out answers
choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import numpy as np
from pydantic import Field, InstanceOf, computed_field

from hubplugin.bank import Bank, BankLike, PreparedBank, own_share, read_store
from hubplugin.compute import Compute, TopK, search
from hubplugin.errors import CorrectionRefused, InputError, Parameter
from hubplugin.guard import FEWEST_PARAPHRASES
from hubplugin.measures.significance import Figure, Side
from hubplugin.methods import Method
from hubplugin.methods.blend import Blend
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, QueryMap
from hubplugin.validation import (
    Candidate,
    Fold,
    Margins,
    OffsetsAndMap,
    answers_of,
    change_of,
    cross_validate,
    folds_within,
    make_folds,
    pairs_of,
    with_rows,
)
from hubplugin.vectors import (
    Scannable,
    VectorLike,
    Vectors,
    draw_sample,
    prepare_blocks,
)

FEWEST_PAIRS, FEWEST_TARGETS = 50, 10
"""Different pairs, and different targets in them, below which nothing is learned."""

NEARER = 0.75
"""A bank is refused if a smaller share of its queries is nearer to its own answer than
to another's: 0.5 is chance."""

RIGHT = 0.93
"""The same share of right clicks: 0.93 to 1 for seven kinds of data, 0.86 for an eighth
that the raw search finds for 10 %. With 30 % of the clicks wrong it is 0.76 to 0.86."""

STEPS = {
    "asked": (0.0, 0.5, 1.0, 2.0),
    "gallery": (0.5, 1.0, 2.0),
    "answer": (0.5, 1.0),
}
"""Strengths of a map, by what it tells answers from: other targets that were asked for,
these and some of the gallery, or nothing, so that it leads to the answer itself."""

SHARES = 1.0, 0.5, 0.0
"""Shares of the offsets that are tried beside each map."""

RAW = len(SHARES) - 1
"""The number of the raw search among all that is tried, of which 0 is the offsets alone."""

OTHERS = 1_500
"""Targets of the gallery that nobody asked for, from which answers are told."""

FOLDS, PROBES = 3, 1_500
"""Folds of each side, and how many pairs all of them hold out."""

FEWEST_JUDGED = 50
"""Judged pairs, below which they are refused."""

SOFTNESS = 0.4
"""A query counts as right to the degree sigmoid(margin / (SOFTNESS tau))."""

AGAIN = 0.3
"""The gain of a target that is asked for again, in other words, as a share of the gain
of the very pairs that taught. On logs whose other wordings are known it is 0.3 to 0.5,
with a correlation of 0.9 over all maps (docs/measurements/learning.md)."""

APART, BEHIND = 0.85, 2.0
"""No side may be behind the offsets alone by more than `BEHIND` standard errors. Where
`own_share` is `APART` or more, as across modalities and languages, it may not be behind
at all, all offsets stay, and nothing is whitened: held-out pairs do not see all that is
lost there (docs/measurements/methods.md)."""

WIDER = 1.2
"""How much wider the interval of a change is than that of held-out pairs alone: these
choose the map, too, and their folds share most of what is learned."""

LOOKED_AT = 1_000
"""Pairs that are searched for in the whole gallery, so that a share comes out to 1.3
points."""

FOUND = 0.8
"""Share of the pairs found by the raw search from which they are refused: titles that
stand in their own documents say nothing of other queries. Titles that taught something
were found for 40 to 55 %, and those that did harm for 88 %."""

KEPT = 0.9
"""How much of the identity a whitening keeps."""

PRODUCTS = 1 << 22
"""Similarities of one block: 16 MiB, which a cache has room for."""


def find_different(bank: PreparedBank) -> np.ndarray:
    """Return the rows [m] of the pairs of query and answer in `bank` that differ, the first of equal ones."""
    answers = bank.known_answers
    if answers is None:
        return np.empty(0, np.int64)
    known = np.flatnonzero(answers >= 0)
    pairs = np.stack([bank.same[known], answers[known]], axis=1)
    return np.sort(known[np.unique(pairs, axis=0, return_index=True)[1]])


def has_enough(bank: PreparedBank, rows: np.ndarray, fewest: int) -> bool:
    """Return True if the `rows` [m] of a `bank` are `fewest` pairs or more, of enough targets."""
    answers = bank.known_answers
    return (
        answers is not None
        and len(rows) >= fewest
        and len(np.unique(answers[rows])) >= FEWEST_TARGETS
    )


def require_answers(bank: PreparedBank) -> None:
    """Raise InputError for a bank of which no answers are known."""
    if bank.known_answers is None:
        raise InputError(
            "learn=True learns from what each query asks for: pass a Bank with ",
            Parameter("answers"),
            ", or pairs such as titles (docs/titles.md)",
        )


def find_pairs(
    bank: PreparedBank, name: str = "the bank", fewest: int = FEWEST_PAIRS
) -> np.ndarray:
    """Return the rows [m] of the different pairs of a bank.

    Args:
        bank: A bank with known answers.
        name: What errors call it.
        fewest: How many different pairs it must have.

    Raises:
        InputError: The bank has fewer.
        CorrectionRefused: They are no pairs of this gallery.
    """
    require_answers(bank)
    rows = find_different(bank)
    queries, answer, targets = pairs_of(bank, rows)
    if not has_enough(bank, rows, fewest):
        raise InputError(
            f"{name} has {len(rows)} different pairs of {len(targets)} targets; learn=True needs {fewest} pairs of "
            f"{FEWEST_TARGETS} targets: collect more, or leave ",
            Parameter("learn"),
            " out",
        )
    nearer = share_nearer(queries, answer, targets)
    if nearer < NEARER:
        raise CorrectionRefused(
            f"the answers of {name} do not belong to its queries: {nearer:.0%} of "
            f"these are nearer to their own than to another's ({NEARER:.0%} is needed, "
            "50% is chance); nothing was changed: pass answers of this gallery, and "
            "queries that its own model embedded"
        )
    return rows


def share_nearer(queries: np.ndarray, answer: np.ndarray, targets: np.ndarray) -> float:
    """Return the share of pairs, as of `pairs_of`, nearer to their own answer than to
    another's."""
    shift = np.random.default_rng(0).integers(1, len(targets), len(answer))
    other = (answer + shift) % len(targets)
    ahead = (queries * (targets[answer] - targets[other])).sum(axis=1)
    # Where two targets are equal, neither is nearer.
    return float(np.heaviside(ahead, 0.5).mean())


@dataclass(frozen=True)
class Teachers:
    """The banks from which a correction and its map are learned.

    bank: Offsets are fitted on it, and its answers teach.
    judged: Clicks that somebody has looked at.
    pairs: They teach, too, such as titles and the rows of their documents.
    """

    bank: PreparedBank
    judged: PreparedBank | None = None
    pairs: PreparedBank | None = None

    @classmethod
    def read(
        cls,
        bank: Bank,
        learn: bool | Bank,
        judged: BankLike | None,
        metric: Metric | str,
        compute: Compute,
        gallery: object = None,
    ) -> Teachers:
        """Read the banks before they know their gallery.

        Args:
            bank, judged, metric, compute: As in `hubplugin.fit`.
            learn: False, True, or the pairs.
            gallery: As in `Bank.prepare`.

        Raises:
            InputError: One of them cannot be used, or they do not go together.
        """
        if judged is not None and learn is False:
            raise InputError(
                Parameter("judged"),
                " chooses how strong a map is: pass ",
                Parameter("learn", True),
            )
        prepared = bank.prepare(metric, compute, gallery)
        looked_at = None
        if judged is not None:
            looked_at = Bank.of(judged).prepare(metric, compute, gallery)
        if not isinstance(learn, Bank):
            return cls(prepared, looked_at)
        if learn.name == Bank.name:
            learn = replace(learn, name="pairs")
        pairs = learn.prepare(metric, compute, gallery)
        if pairs.clicks is None:
            raise InputError(
                Parameter("learn"),
                ": the pairs lack ids or rows; pass Bank(titles, ids)",
            )
        if prepared.target_bank is not None:
            raise InputError(
                "the bank has vectors as answers, beside which no pairs teach: leave ",
                Parameter("learn"),
                " out",
            )
        if pairs.query_bank.shape[1] != prepared.query_bank.shape[1]:
            raise InputError(
                f"the pairs have {pairs.query_bank.shape[1]} dimensions, the bank has {prepared.query_bank.shape[1]}; "
                "embed both with the gallery's model"
            )
        return cls(prepared, looked_at, pairs)

    @cached_property
    def together(self) -> PreparedBank:
        """All queries in one bank: first the bank, then the pairs, then what is judged."""
        bank = self.bank
        for part in (self.pairs, self.judged):
            if part is not None:
                bank = bank.with_pairs(part)
        return bank

    def find_teaching(self) -> np.ndarray:
        """Return the rows of `together` that teach. Raises what `find_pairs` does, of the bank and of the pairs."""
        rows = find_different(self.bank)
        if self.pairs is None or self.bank.clicks is not None:
            find_pairs(self.bank)
        if self.pairs is None:
            return rows
        own = find_different(self.pairs)
        # Beside a bank that has answers few may be left.
        if self.bank.clicks is None or has_enough(self.pairs, own, FEWEST_PAIRS):
            find_pairs(self.pairs, "the bank of pairs")
        return np.concatenate([rows, len(self.bank.query_bank) + own])

    def find_held_out(self) -> np.ndarray | None:
        """Return the rows of `together` that choose how strong a map is. None for all that teaches.

        They are those judged, or, beside pairs, the answers of the bank. Raises InputError where what is judged cannot
        choose.
        """
        if self.judged is not None:
            if self.bank.pairs is not None or self.judged.clicks is None:
                raise InputError(
                    Parameter("judged"),
                    " is for logs: pass ids or rows as answers, in both banks",
                )
            first = len(self.together.query_bank) - len(self.judged.query_bank)
            return first + find_pairs(self.judged, "the judged bank", FEWEST_JUDGED)
        if self.pairs is None or self.bank.clicks is None:
            return None
        return find_different(self.bank)

    @property
    def clicks(self) -> np.ndarray | None:
        """The ids of all that was clicked, before they are rows; None where there are none."""
        known = list[np.ndarray]()
        for part in (self.bank, self.judged, self.pairs):
            if part is not None and part.clicks is not None:
                known.append(part.clicks.astype(object))
        return np.concatenate(known) if known else None

    def against(
        self, targets: VectorLike, ids: Mapping[int | str, int] | None = None
    ) -> Teachers:
        """Return the same with the gallery `targets`, and `ids` as in `PreparedBank.against`.

        Beside pairs, fewer answers of the bank than teach by themselves are left out. So are pairs that stand there
        twice, or in the bank: they would teach what is held out.
        """
        clicks = self.clicks
        if ids is None and isinstance(targets, Scannable) and clicks is not None:
            targets, ids = read_store(targets, clicks)
        bank = self.bank.against(targets, ids)
        judged = None if self.judged is None else self.judged.against(targets, ids)
        if self.pairs is None:
            return Teachers(bank, judged)
        pairs = self.pairs.against(targets, ids)
        own = find_different(bank)
        if not has_enough(bank, own, FEWEST_PAIRS):
            bank = replace(bank, clicks=None)
            own = own[:0]
        known = {bank.query_bank[row].tobytes() for row in own}
        rows = [
            row
            for row in find_different(pairs).tolist()
            if pairs.query_bank[row].tobytes() not in known
        ]
        return Teachers(bank, judged, pairs.take(np.array(rows, np.int64)))


@dataclass(frozen=True)
class MapFit:
    """A way to fit offsets and a map together, and a `Candidate`.

    method, share: Those of the offsets.
    strength, tau, whitening: Those of the map.
    apart_from: What it tells answers from, one of `STEPS`.
    others: Targets of the gallery [o, d], for "gallery".
    pairs: They teach beside those of a fold.
    """

    method: Blend
    strength: float
    tau: float
    whitening: np.ndarray | None = None
    share: float = 1.0
    apart_from: str = "asked"
    others: np.ndarray | None = None
    pairs: PreparedBank | None = None

    def whiten(self, queries: np.ndarray) -> np.ndarray:
        return queries if self.whitening is None else queries @ self.whitening.T

    @property
    def maps(self) -> bool:
        """True if queries are mapped at all."""
        return bool(self.strength) or self.whitening is not None

    def compose_map(self, w: np.ndarray, pairs: int) -> QueryMap | None:
        """Return (I + s W) Z, with W = `w` [d, d] of `pairs` pairs and Z the whitening.
        None for I."""
        if not self.maps:
            return None
        eye = np.eye(len(w), dtype=np.float32)
        z = eye if self.whitening is None else self.whitening
        step = (eye + np.float32(self.strength) * w) @ z - eye
        return QueryMap(step, self.strength, pairs, self.whitening is not None)

    def solve(
        self, queries: np.ndarray, answer: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        """Return W [d, d] from pairs as of `pairs_of`."""
        seen: np.ndarray | None = targets
        if self.apart_from == "gallery":
            assert self.others is not None
            seen, _ = with_rows(targets, self.others)
        elif self.apart_from == "answer":
            seen = None
        return solve_map(self.whiten(queries), targets[answer], seen, self.tau)

    def learn(
        self, queries: np.ndarray, answer: np.ndarray, targets: np.ndarray
    ) -> QueryMap | None:
        """Return the map that pairs as of `pairs_of` teach."""
        dim = queries.shape[1]
        w = np.zeros((dim, dim), np.float32)
        if self.strength:
            w = self.solve(queries, answer, targets)
        return self.compose_map(w, len(queries))

    @property
    def offsets(self) -> Method:
        """The method with the share of its offsets."""
        assert self.method.strength is not None, "it is resolved"
        strength = self.share * self.method.strength
        return self.method.model_copy(update={"strength": strength})

    def fit(self, bank: PreparedBank, query_map: QueryMap | None) -> OffsetModel:
        """Fit the method behind `query_map`. The model holds the bank as it was before
        the map."""
        if query_map is None:
            return self.offsets.fit(bank)
        mapped = query_map.of_bank(bank.query_bank)
        model = self.offsets.fit(replace(bank, query_bank=mapped))
        terms = [
            replace(term, bank=bank.query_bank) if term.bank is mapped else term
            for term in model.terms
        ]
        return replace(
            model,
            terms=tuple(terms),
            query_map=query_map,
            bank_fingerprint=bank.fingerprint,
        )

    @property
    def variants(self) -> list[MapFit]:
        """All that is tried behind the whitening: each map with each share of the
        offsets."""
        return [
            replace(self, apart_from=apart_from, strength=strength, share=share)
            for apart_from, strengths in STEPS.items()
            for strength in strengths
            for share in SHARES
        ]

    def try_variants(
        self, train: PreparedBank, bank: PreparedBank, teach: np.ndarray
    ) -> list[OffsetsAndMap]:
        """Return what `variants` give, with the offsets that the bank has before a
        step."""
        pairs = pairs_of(bank, teach)
        whitened = replace(train, query_bank=self.whiten(train.query_bank))
        offsets = self.method.raw_offsets(whitened)
        tried = list[OffsetsAndMap]()
        for apart_from, strengths in STEPS.items():
            step = replace(self, apart_from=apart_from)
            w = step.solve(*pairs)
            for strength in strengths:
                query_map = replace(step, strength=strength).compose_map(w, len(teach))
                tried += [(share * offsets, query_map) for share in SHARES]
        return tried

    def may_be_chosen(self, apart: bool, unasked: bool) -> bool:
        """Return True unless held-out pairs cannot tell what is lost.

        They cannot where queries and targets lie `apart`. Pairs that are `unasked`, such
        as titles, cannot tell of hubs among the queries. Less of the offsets, and no map
        beside them, is nothing that was learned.
        """
        if self.share < 1 and (apart or unasked or not self.maps):
            return False
        return not apart or self.whitening is None

    def __call__(
        self, train: PreparedBank, bank: PreparedBank, teach: np.ndarray
    ) -> list[OffsetsAndMap]:
        """Return the map that the pairs of a fold teach, and the offsets of its mapped
        bank."""
        if self.pairs is not None:
            added = len(bank.query_bank) + np.arange(len(self.pairs.query_bank))
            bank = bank.with_pairs(self.pairs)
            teach = np.concatenate([teach, added])
        query_map = self.learn(*pairs_of(bank, teach))
        model = self.fit(train, query_map)
        offsets = model.raw_offsets(train.require_targets(), train.compute)
        return [(offsets, query_map)]


NOTHING = "the pairs taught nothing beyond the offsets: queries are not mapped"
UNASKED = (
    "that is R@1 of held-out pairs, such as titles, which nobody asks by: real queries "
    "gained 0 to 6 points over the offsets alone (docs/titles.md)"
)


@dataclass(frozen=True)
class LearnedMap:
    """The map that the known answers of a bank taught, and what it gains.

    model: It has a query map, unless held-out answers gain nothing by one.
    how: The method, and what was chosen.
    asked: R@1 of the raw search and with offsets and map, of held-out paraphrases whose
        target stays asked for. None where there are few.
    other: The same of held-out pairs whose target nobody else asks for.
    unasked: True if pairs that nobody asked, such as titles, were held out.
    nearer: The share of the held-out pairs nearer to their own answer than to another's.
    """

    model: OffsetModel
    how: Annotated[InstanceOf[MapFit], Field(exclude=True)]
    asked: Side | None
    other: Side
    unasked: Annotated[bool, Field(exclude=True)] = False
    nearer: Annotated[float, Field(exclude=True)] = 1.0

    @computed_field  # type: ignore[prop-decorator]
    @property
    def strength(self) -> float:
        """The strength of the map, 0 where none was learned."""
        return self.how.strength

    @computed_field  # type: ignore[prop-decorator]
    @property
    def whitened(self) -> bool:
        """True if queries are whitened before they are mapped."""
        return self.how.whitening is not None

    @property
    def notes(self) -> list[str]:
        notes = [NOTHING]
        if self.model.query_map is not None:
            changes = f"not asked before: {self.other}"
            if self.asked is not None:
                changes = f"asked before: {self.asked}; {changes}"
            share = f", with {self.how.share:g} of the offsets"
            offsets = {1.0: "", 0.0: ", without offsets"}.get(self.how.share, share)
            what = f"{self.model.query_map}{offsets}"
            notes = [f"{what}; over the raw search, {changes}"]
            if self.unasked:
                notes.append(UNASKED)
        # Two errors of a share in so many pairs.
        chance = 2 * (RIGHT * (1 - RIGHT) / self.other.queries) ** 0.5
        if self.nearer < RIGHT - chance:
            notes.append(
                f"{1 - self.nearer:.0%} of the pairs are nearer to another's answer "
                f"(of right clicks {1 - RIGHT:.0%} at most, mostly): if people clicked "
                "wrong, held-out clicks are wrong, too, and what is said here is too "
                "dark: pass 50 pairs that somebody has looked at (judged=)"
            )
        return notes


def learn_query_map(configuration: Method, teachers: Teachers) -> LearnedMap:
    """Fit `configuration` on a bank, with the query map that known answers teach.

    Args:
        configuration: The method of the offsets, `blend`.
        teachers: With their gallery. What is judged chooses the map. Otherwise the
            answers of the bank choose: all of them where they alone teach, or, beside
            pairs, if there are 50. Otherwise the pairs choose.

    Raises:
        InputError: One of the banks has too few answers.
        CorrectionRefused: The answers do not belong to the queries, or pairs that must
            choose are unlike the queries or found already.
    """
    assert isinstance(configuration, Blend), "`read_learn` has looked"
    bank, pairs = teachers.bank, teachers.pairs
    rows = teachers.find_teaching()
    held = teachers.find_held_out()
    unasked = pairs is not None and held is None
    if pairs is not None and unasked:
        require_like(bank, pairs)
        require_unfound(pairs)
    rng = np.random.default_rng(0)
    gallery = bank.require_targets()
    others = draw_sample(gallery, OTHERS, bank.metric, rng)
    apart = own_share(bank.query_bank, others, bank.compute, rng) >= APART
    bases = list[MapFit]()
    for z in (None, compute_whitening(bank.query_bank, gallery, bank.metric)):
        whitened = bank
        if z is not None:
            whitened = replace(bank, query_bank=bank.query_bank @ z.T)
        method = configuration.resolve(whitened)
        assert method.tau is not None
        bases.append(MapFit(method, 0.0, method.tau, z, others=others, pairs=pairs))
    candidates: list[Candidate] = [base.try_variants for base in bases]
    own = len(bank.query_bank)
    if pairs is not None and bank.clicks is not None:
        # Titles may cost what was asked before: clicks are tried without them, too.
        for base in bases[:]:
            alone = replace(base, pairs=None)
            bases.append(alone)
            candidates.append(only_rows_below(own, alone.try_variants))
    sides = {
        side: cross_validate(candidates, teachers.together, folds)
        for side, folds in draw_sides(teachers, rows, held).items()
    }
    fits = [fit for base in bases for fit in base.variants]
    may = np.array([fit.may_be_chosen(apart, unasked) for fit in fits])
    number = choose(sides, bases[0].tau, may, 0.0 if apart else BEHIND)
    how = fits[number]
    if how.pairs is None:
        rows = rows[rows < own]
    taught = pairs_of(teachers.together, rows)
    query_map = how.learn(*taught)
    if query_map is not None:
        mapped = replace(bank, query_bank=query_map.of_bank(bank.query_bank))
        how = replace(how, method=configuration.resolve(mapped))
    changes = {
        side: widen(change_of(tried, RAW, number, LABELS[side]))
        for side, tried in sides.items()
        if side in LABELS
    }
    if held is not None:
        taught = pairs_of(teachers.together, held)
    return LearnedMap(
        how.fit(bank, query_map),
        how,
        changes.get("asked"),
        changes["other"],
        unasked,
        share_nearer(*taught),
    )


def only_rows_below(limit: int, candidate: Candidate) -> Candidate:
    """Return `candidate` taught by the rows of a bank below `limit` alone."""
    return lambda train, bank, teach: candidate(train, bank, teach[teach < limit])


INSTEAD = (
    "leave the pairs out, or pass the ",
    Parameter("answers"),
    " of 50 queries of the bank, which then choose",
)
"""What to do about pairs that cannot choose."""


def require_like(bank: PreparedBank, pairs: PreparedBank) -> None:
    """Raise CorrectionRefused where `pairs` lie as far from the queries of `bank` as other languages do."""
    rng = np.random.default_rng(0)
    apart = own_share(bank.query_bank, pairs.query_bank, bank.compute, rng)
    if apart >= APART:
        raise CorrectionRefused(
            f"the pairs are unlike the queries of the bank: {apart:.0%} of nearest neighbours come from the own set "
            f"({APART:.0%} is too much), as across languages, so they may teach a wrong map; nothing was changed: ",
            *INSTEAD,
        )


def require_unfound(pairs: PreparedBank) -> None:
    """Raise CorrectionRefused where the raw search finds most of the pairs already."""
    assert pairs.clicks is not None
    gallery = pairs.require_targets()
    rows = np.random.default_rng(0).permutation(len(pairs.clicks))[:LOOKED_AT]
    queries = pairs.query_bank[rows]
    top = TopK(1)
    quiet = pairs.compute.without_progress
    search(queries, gallery, pairs.metric, quiet, top)
    own = (queries * answers_of(pairs, pairs.clicks[rows])).sum(axis=1)
    # One of two that are equal is as good.
    found = float((own >= top.scores[0, :, 0] - 1e-5).mean())
    if found >= FOUND:
        raise CorrectionRefused(
            f"the raw search finds {found:.0%} of the pairs ({FOUND:.0%} is too much), so they cannot tell what a map "
            "gains; nothing was changed: ",
            *INSTEAD,
        )


def widen(side: Side | None) -> Side:
    """Return `side` with `WIDER` the interval of its change."""
    assert side is not None, "answers are known"
    change = side.change
    low = change.value - WIDER * (change.value - change.low)
    high = change.value + WIDER * (change.high - change.value)
    return replace(side, change=Figure(change.value, low, high))


LABELS = {"asked": "other wordings", "other": "pairs"}
"""What results call the held-out pairs of each side."""


def draw_sides(
    teachers: Teachers, rows: np.ndarray, held: np.ndarray | None = None
) -> dict[str, list[Fold]]:
    """Return the folds of `teachers.together` by side.

    In "other" the target of a held-out query was never among the learned. In "asked"
    held-out queries are paraphrases: their target stays asked for. A log that has few of
    them has "taught" in its place: pairs that teach are tried themselves.

    Args:
        teachers: With known answers.
        rows: The pairs that teach. Offsets are fitted on what a fold leaves of the bank.
        held: The pairs that are held out; by default those that teach.
    """
    bank = teachers.together
    answers = bank.known_answers
    assert answers is not None
    rng = np.random.default_rng(0)
    order = rng.permutation(rows if held is None else held)
    numbers, target = np.unique(answers, return_inverse=True)
    fold_of = (rng.permutation(len(numbers)) % FOLDS)[target.reshape(-1)]
    own = np.arange(len(teachers.bank.query_bank))
    unanswered = own[answers[own] < 0]

    def fold(taught: np.ndarray, tested: np.ndarray) -> Fold:
        fitted = np.union1d(taught[taught < len(own)], unanswered)
        return Fold(fitted, tested, taught)

    other = []
    for number in range(FOLDS):
        tested = order[fold_of[order] == number][: PROBES // FOLDS]
        other.append(fold(rows[fold_of[rows] != number], tested))
    asked = []
    if held is None:
        wordings = make_folds(order, folds_within(answers[order], FOLDS), PROBES)
        asked = [fold(each.train, each.test) for each in wordings]
    else:
        for tested in np.array_split(order[:PROBES], FOLDS):
            taught = rows[~np.isin(bank.same[rows], bank.same[tested])]
            still_asked = np.isin(answers[tested], answers[taught])
            asked.append(fold(taught, tested[still_asked]))
    sides = {"other": other}
    if sum(len(each.test) for each in asked) >= FEWEST_PARAPHRASES:
        sides["asked"] = asked
    elif teachers.bank.pairs is None and teachers.judged is None:
        sides["taught"] = [fold(rows, order[: PROBES // FOLDS])]
    return sides


def choose(
    sides: Mapping[str, Margins], tau: float, may: np.ndarray, behind: float
) -> int:
    """Return the number of the candidate whose soft R@1 gains most over the raw search.

    The gain is the mean of the sides, each less one standard error. Of a log that nobody
    asked twice in other words, held-out targets alone would choose a map far too weak
    for what is asked again: `AGAIN` of the gain of the pairs that taught stands for it.
    A candidate may not be behind the raw search in R@1 on any side, nor behind the
    offsets alone, number 0, which remain where there is no other.

    Args:
        sides: The trials of all candidates, by side.
        tau: The temperature of the margins.
        may: The candidates that may be chosen, bool [c].
        behind: By how many standard errors they may be behind the offsets alone.
    """
    gains = list[np.ndarray]()
    for side, tried in sides.items():
        assert tried.margins is not None
        assert tried.right is not None
        soft = soft_recall(tried.margins, tau)
        gain, error = mean_and_error(soft - soft[RAW])
        if side == "taught":
            gains.append(AGAIN * gain)
            continue
        gains.append(gain - error)
        right = tried.right.mean(axis=1)
        beside, error = mean_and_error(soft - soft[0])
        may = may & (right >= right[RAW]) & (beside >= -behind * error)
    gain = np.where(may, np.mean(gains, axis=0), -np.inf)
    return int(np.argmax(gain)) if may.any() else 0


def mean_and_error(gains: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the means of `gains` [c, p] and their standard errors, [c] each."""
    return gains.mean(axis=1), gains.std(axis=1) / gains.shape[1] ** 0.5


def soft_recall(margins: np.ndarray, tau: float) -> np.ndarray:
    """Return to which degree probes with these `margins` count as right, 0 to 1: a sigmoid of width `SOFTNESS` tau."""
    right: np.ndarray = 1 / (1 + np.exp(np.clip(-margins / (SOFTNESS * tau), -30, 30)))
    return right


def solve_map(
    queries: np.ndarray, answers: np.ndarray, seen: np.ndarray | None, tau: float
) -> np.ndarray:
    """Return W [d, d], one step of ridge regression from queries to their answers.

        W = R' Q (Q' Q + r I)^-1,  r the mean eigenvalue of Q' Q
        R = A - p T,  p = softmax(Q T' / tau): what the cross-entropy asks of the queries
        R = A - Q where `seen` is None

    Float32 products, a float64 solution.

    Args:
        queries: Q [m, d].
        answers: A [m, d], that of each query.
        seen: T [c, d], the targets that an answer is told from, itself among them.
        tau: The temperature.
    """
    residual = answers - queries
    if seen is not None:
        size = max(PRODUCTS // len(seen), 1)
        for start in range(0, len(queries), size):
            rows = slice(start, start + size)
            p = (queries[rows] / np.float32(tau)) @ seen.T
            p -= p.max(axis=1, keepdims=True)
            np.exp(p, out=p)
            expected = (p @ seen) / p.sum(axis=1, keepdims=True)
            residual[rows] = answers[rows] - expected
    gram = (queries.T @ queries).astype(np.float64)
    ridge = np.trace(gram) / len(gram) * np.eye(len(gram))
    product = (queries.T @ residual).astype(np.float64)
    return np.ascontiguousarray(np.linalg.solve(gram + ridge, product).T, np.float32)


def compute_whitening(bank: np.ndarray, gallery: Vectors, metric: Metric) -> np.ndarray:
    """Return Z [d, d], a mild whitening of queries, which needs no answers:

        Z = t (k t I + (1 - k) C)^-1,  C the covariance of `bank` [m, d] and `gallery`, each about its own mean

    t is the mean of the diagonal of C, and k is `KEPT`. The gallery is prepared for `metric`.
    """
    dim = bank.shape[1]
    count = 0
    total = np.zeros(dim)
    products = np.zeros((dim, dim))
    for block in prepare_blocks(gallery, metric):
        products += block.T @ block
        total += block.sum(axis=0, dtype=np.float64)
        count += len(block)
    centred = bank - bank.mean(axis=0)
    products += centred.T @ centred - np.outer(total, total) / count
    covariance = products / (count + len(bank))
    size = max(float(np.trace(covariance)) / dim, 1e-30)
    z = size * np.linalg.inv(KEPT * size * np.eye(dim) + (1 - KEPT) * covariance)
    return np.ascontiguousarray(z, np.float32)


def read_learn(
    learn: object,
    method: str,
    metric: Metric | str,
    targets: object,
    executor: object = None,
) -> bool | Bank:
    """Return `learn` as False, True or a bank of pairs.

    Raises InputError for anything else, and, unless it is False, for arguments of a fit
    under which a map was not measured or would not be applied.
    """
    if not isinstance(learn, (bool, Bank)):
        got = type(learn).__name__
        raise InputError(
            Parameter("learn"),
            f": expected True, False, or pairs as Bank(titles, ids), got {got}",
        )
    if learn is False:
        return False
    if method != "blend":
        raise InputError(
            "learn=True goes with the default method, not with ",
            Parameter("method", method),
        )
    if Metric.parse(metric) is Metric.EUCLIDEAN:
        raise InputError(
            "learn=True is for inner products, not for ",
            Parameter("metric", "euclidean"),
        )
    if targets is None:
        raise InputError(
            "learn=True is tried on the gallery: pass ", Parameter("targets")
        )
    if executor is not None:
        raise InputError(
            "learn=True does not go with ",
            Parameter("executor"),
            ": leave one of the two out",
        )
    return learn
