"""A linear map of the query from known answers: one closed step, as strong as held-out answers allow."""

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
    Fold,
    Margins,
    OffsetsAndMap,
    change_of,
    cross_validate,
    folds_within,
    make_folds,
    pairs_of,
)
from hubplugin.vectors import (
    Scannable,
    VectorLike,
    Vectors,
    draw_sample,
    prepare_blocks,
    take_rows,
)

FEWEST_PAIRS, FEWEST_TARGETS = 50, 10
"""Different pairs, and different targets in them, below which nothing is learned. From 50 on the map gains in five of
six kinds of data, and loses up to 0.7 points of what nobody asked for in the sixth (benchmarks/learning.py)."""

NEARER = 0.75
"""A bank is refused if a smaller share of its queries is nearer to its own answer than to another's: 0.5 is chance."""

STRENGTHS = 0.0, 0.25, 0.5, 1.0, 1.5, 2.0
"""Strengths of the map that are tried. Beyond 1 each must be ahead of the one before by `ERRORS` standard errors on
every side: where it was, it gained 0.7 points in the mean and lost 0.1 at worst; without that condition it lost 3."""

SHARES = 1.0, 0.5, 0.0
"""Shares of the offsets that are tried. The share is 1 unless a smaller one is ahead by `ERRORS` standard errors on
every side. On ICD's titles, where offsets lose, that gains 2 to 4 points of what nobody asked for."""

FOLDS, PROBES = 3, 1_500
"""Folds of each side, and how many pairs all of them hold out."""

FEWEST_JUDGED = 50
"""Judged pairs, below which they are refused."""

SOFTNESS = 0.4
"""A query counts as right to the degree sigmoid(margin / (SOFTNESS tau))."""

APART, ERRORS = 0.85, 2.0
"""No side may be behind by more than so many standard errors with a whitening or a strength: a few hundred pairs are
too few to show what these gain. Where `own_share` is `APART` or more, as across modalities and languages, all sides
must be ahead by as many, for there held-out pairs do not see all that is lost (docs/measurements/methods.md)."""

WIDER = 1.2
"""How much wider the interval of a change is than that of held-out pairs alone: these choose strength and whitening,
too, and their folds share most of what is learned. So 95 % of 133 tests lie inside, otherwise 89 %
(benchmarks/learning.py)."""

FEW_PROBES = 150
"""Held-out pairs below which a whitening must be ahead by one standard error. With a hundred pairs one passed that lost
half a point of what nobody asked for (ICD)."""

LOOKED_AT = 1_000
"""Pairs that are searched for in the whole gallery, so that a share comes out to 1.3 points."""

FOUND = 0.8
"""Share of the pairs found by the raw search from which they are refused: titles that stand in their own documents say
nothing of other queries. Titles that taught something were found for 40 to 55 %, and those that did harm for 88 %."""

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
    shift = np.random.default_rng(0).integers(1, len(targets), len(answer))
    other = (answer + shift) % len(targets)
    ahead = (queries * (targets[answer] - targets[other])).sum(axis=1)
    # Where two targets are equal, neither is nearer.
    nearer = float(np.heaviside(ahead, 0.5).mean())
    if nearer < NEARER:
        raise CorrectionRefused(
            f"the answers of {name} do not belong to its queries: {nearer:.0%} of these are nearer to their own than "
            f"to another's ({NEARER:.0%} is needed, 50% is chance); nothing was changed: pass answers of this gallery, "
            "and queries that its own model embedded"
        )
    return rows


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
    pairs: They teach beside those of a fold.
    """

    method: Blend
    strength: float
    tau: float
    whitening: np.ndarray | None = None
    share: float = 1.0
    pairs: PreparedBank | None = None

    def whiten(self, queries: np.ndarray) -> np.ndarray:
        return queries if self.whitening is None else queries @ self.whitening.T

    def compose_map(self, w: np.ndarray, pairs: int) -> QueryMap | None:
        """Return (I + s W) Z, with W = `w` [d, d] of `pairs` pairs and Z the whitening. None for I."""
        if not self.strength and self.whitening is None:
            return None
        eye = np.eye(len(w), dtype=np.float32)
        z = eye if self.whitening is None else self.whitening
        step = (eye + np.float32(self.strength) * w) @ z - eye
        return QueryMap(step, self.strength, pairs, self.whitening is not None)

    def learn(
        self, queries: np.ndarray, answer: np.ndarray, targets: np.ndarray
    ) -> QueryMap | None:
        """Return the map that pairs teach, from `queries`, `answer` and `targets` as in `solve_map`."""
        dim = queries.shape[1]
        w = np.zeros((dim, dim), np.float32)
        if self.strength:
            w = solve_map(self.whiten(queries), answer, targets, self.tau)
        return self.compose_map(w, len(queries))

    @property
    def offsets(self) -> Method:
        """The method with the share of its offsets."""
        assert self.method.strength is not None, "it is resolved"
        strength = self.share * self.method.strength
        return self.method.model_copy(update={"strength": strength})

    def fit(self, bank: PreparedBank, query_map: QueryMap | None) -> OffsetModel:
        """Fit the method behind `query_map`. The model holds the bank as it was before the map."""
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

    def try_all_strengths(
        self, train: PreparedBank, bank: PreparedBank, teach: np.ndarray
    ) -> list[OffsetsAndMap]:
        """Return all strengths of a map, each with all shares of the offsets that the bank has without a strength."""
        queries, answer, targets = pairs_of(bank, teach)
        whitened = replace(train, query_bank=self.whiten(train.query_bank))
        offsets = self.method.raw_offsets(whitened)
        w = solve_map(self.whiten(queries), answer, targets, self.tau)
        tried = list[OffsetsAndMap]()
        for strength in STRENGTHS:
            query_map = replace(self, strength=strength).compose_map(w, len(queries))
            tried += [(share * offsets, query_map) for share in SHARES]
        return tried

    def __call__(
        self, train: PreparedBank, bank: PreparedBank, teach: np.ndarray
    ) -> list[OffsetsAndMap]:
        """Return the map that the pairs of a fold teach, and the offsets of its mapped bank."""
        if self.pairs is not None:
            added = len(bank.query_bank) + np.arange(len(self.pairs.query_bank))
            bank = bank.with_pairs(self.pairs)
            teach = np.concatenate([teach, added])
        query_map = self.learn(*pairs_of(bank, teach))
        model = self.fit(train, query_map)
        return [(model.raw_offsets(train.require_targets(), train.compute), query_map)]


NOTHING = "the pairs taught nothing beyond the offsets: queries are not mapped"
UNASKED = (
    "that is R@1 of held-out pairs, such as titles, which nobody asks by: real queries gained 0 to 6 points over the "
    "offsets alone (docs/titles.md)"
)


@dataclass(frozen=True)
class LearnedMap:
    """The map that the known answers of a bank taught, and what it gains.

    model: has a query map, unless held-out answers gain nothing by it. how: the method, and what was chosen. asked: R@1
    without and with the map, of held-out paraphrases whose target stays asked for; None where there are few. other: R@1
    of held-out pairs whose target nobody else asks for. unasked: whether pairs that nobody asked, such as titles, were
    held out.
    """

    model: OffsetModel
    how: Annotated[InstanceOf[MapFit], Field(exclude=True)]
    asked: Side | None
    other: Side
    unasked: Annotated[bool, Field(exclude=True)] = False

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
        if self.model.query_map is None:
            return [NOTHING]
        changes = f"not asked before: {self.other}"
        if self.asked is not None:
            changes = f"asked before: {self.asked}; {changes}"
        share = f", with {self.how.share:g} of the offsets"
        offsets = {1.0: "", 0.0: ", without offsets"}.get(self.how.share, share)
        notes = [f"{self.model.query_map}{offsets}; over the offsets alone, {changes}"]
        return [*notes, UNASKED] if self.unasked else notes


def learn_query_map(configuration: Method, teachers: Teachers) -> LearnedMap:
    """Fit `configuration` on a bank, with the query map that known answers teach.

    Args:
        configuration: The method of the offsets, `blend`.
        teachers: With their gallery. What is judged chooses strength and whitening. Otherwise the answers of the bank
            choose: all of them where they alone teach, or, beside pairs, if there are 50. Otherwise the pairs choose.

    Raises:
        InputError: One of the banks has too few answers.
        CorrectionRefused: The answers do not belong to the queries, or pairs that must choose are unlike the queries or
            found already.
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
    subset = draw_sample(gallery, len(bank.query_bank), bank.metric, rng)
    apart = own_share(bank.query_bank, subset, bank.compute, rng) >= APART
    bases = []
    for z in (None, compute_whitening(bank.query_bank, gallery, bank.metric)):
        whitened = bank
        if z is not None:
            whitened = replace(bank, query_bank=bank.query_bank @ z.T)
        method = configuration.resolve(whitened)
        assert method.tau is not None
        bases.append(MapFit(method, 0.0, method.tau, z, pairs=pairs))
    margins = {
        side: cross_validate(
            [base.try_all_strengths for base in bases], teachers.together, folds
        )
        for side, folds in draw_sides(teachers, rows, held).items()
    }
    by_base = [split_by_base(part) for part in margins.values()]
    base, strength, share = choose(by_base, bases[0].tau, ERRORS if apart else -ERRORS)
    if unasked:  # titles cannot tell of hubs among the queries
        share = 0
    number = (base * len(STRENGTHS) + strength) * len(SHARES) + share
    changes = {
        side: widen(change_of(part, 0, number, LABELS[side]))
        for side, part in margins.items()
    }
    how = replace(bases[base], strength=STRENGTHS[strength], share=SHARES[share])
    query_map = how.learn(*pairs_of(teachers.together, rows))
    if query_map is not None:
        mapped = replace(bank, query_bank=query_map.of_bank(bank.query_bank))
        how = replace(how, method=configuration.resolve(mapped))
    model = how.fit(bank, query_map)
    return LearnedMap(model, how, changes.get("asked"), changes["other"], unasked)


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
    numbers, place = np.unique(pairs.clicks[rows], return_inverse=True)
    answers = take_rows(gallery, numbers, pairs.metric)[place.reshape(-1)]
    own = (queries * answers).sum(axis=1)
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


def split_by_base(margins: Margins) -> np.ndarray:
    """Return the margins as [bases, strengths, shares, probes]."""
    assert margins.margins is not None
    probes = margins.margins.shape[1]
    return margins.margins.reshape(-1, len(STRENGTHS), len(SHARES), probes)


def draw_sides(
    teachers: Teachers, rows: np.ndarray, held: np.ndarray | None = None
) -> dict[str, list[Fold]]:
    """Return the folds of `teachers.together` by side.

    In "other" the target of a held-out query was never among the learned. In "asked", which is there if it has enough
    queries, held-out queries are paraphrases: their target stays asked for.

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
        count = FOLDS if teachers.judged is None else 1
        for tested in np.array_split(order[:PROBES], count):
            taught = rows[~np.isin(bank.same[rows], bank.same[tested])]
            still_asked = np.isin(answers[tested], answers[taught])
            asked.append(fold(taught, tested[still_asked]))
    enough = sum(len(each.test) for each in asked) >= FEWEST_PARAPHRASES
    return {"other": other, "asked": asked} if enough else {"other": other}


def choose(sides: list[np.ndarray], tau: float, errors: float) -> tuple[int, int, int]:
    """Choose base, strength and share of a map.

    Base and strength are the last whose soft R@1, with all of the offsets, is ahead of the first base without a map on
    every side. The folds of a log with one wording a target say nothing of queries that are asked again, and there the
    strongest map gains most. A strength above 1 must be ahead of the one before by `ERRORS`, and less of the offsets,
    beside a map, ahead of all of them.

    Args:
        sides: the margins of each side [bases, strengths, shares, probes].
        tau: the temperature of the margins.
        errors: by how many standard errors they must be ahead; if it is negative, they may be behind by so many, but
            for a whitening that fewer than `FEW_PROBES` try.

    Returns:
        Their numbers.
    """
    soft = [soft_recall(margins, tau) for margins in sides]

    def ahead(
        this: tuple[int, int, int], other: tuple[int, int, int], errors: float
    ) -> bool:
        return all(is_ahead(each[this] - each[other], errors) for each in soft)

    first = (0, 0, 0)
    to_whiten = max(errors, 1.0) if soft[0].shape[-1] < FEW_PROBES else errors
    base = 0
    for number in range(1, len(soft[0])):
        if ahead((number, 0, 0), first, to_whiten):
            base = number
    full = STRENGTHS.index(1.0)
    strength = 0
    for number in range(1, full + 1):
        if ahead((base, number, 0), first, errors):
            strength = number
    for number in range(full + 1, len(STRENGTHS)):
        before = (base, number - 1, 0)
        if strength == number - 1 and ahead((base, number, 0), before, ERRORS):
            strength = number
    share = 0
    if base or strength:  # without a map there is nothing beside the offsets
        for number in range(1, len(SHARES)):
            before = (base, strength, share)
            if ahead((base, strength, number), before, ERRORS):
                share = number
    return base, strength, share


def soft_recall(margins: np.ndarray, tau: float) -> np.ndarray:
    """Return to which degree probes with these `margins` count as right, 0 to 1: a sigmoid of width `SOFTNESS` tau."""
    right: np.ndarray = 1 / (1 + np.exp(np.clip(-margins / (SOFTNESS * tau), -30, 30)))
    return right


def is_ahead(gains: np.ndarray, errors: float) -> bool:
    """Return True if the mean of `gains` [p] is at least `errors` standard errors of it; equal ones are not ahead."""
    return bool(gains.mean() >= errors * gains.std() / len(gains) ** 0.5) and (
        errors < 0 or bool(gains.any())
    )


def solve_map(
    queries: np.ndarray, answer: np.ndarray, targets: np.ndarray, tau: float
) -> np.ndarray:
    """Return W [d, d] of one step of ridge regression from queries to what their cross-entropy asks of them.

        p = softmax(Q T' / tau),  R = T[answer] - p T,  W = R' Q (Q' Q + r I)^-1,  r the mean eigenvalue of Q' Q

    Float32 products, a float64 solution.

    Args:
        queries: Q [m, d].
        answer: The row of each one's answer in `targets` [m].
        targets: T [c, d], those that were asked for, and no others: with the whole gallery, what nobody asked for would
            only ever be pushed away.
        tau: The temperature.
    """
    residual = np.empty_like(queries)
    size = max(PRODUCTS // len(targets), 1)
    for start in range(0, len(queries), size):
        rows = slice(start, start + size)
        p = (queries[rows] / np.float32(tau)) @ targets.T
        p -= p.max(axis=1, keepdims=True)
        np.exp(p, out=p)
        expected = (p @ targets) / p.sum(axis=1, keepdims=True)
        residual[rows] = targets[answer[rows]] - expected
    gram = (queries.T @ queries).astype(np.float64)
    ridge = np.trace(gram) / len(gram) * np.eye(len(gram))
    solution = np.linalg.solve(gram + ridge, (queries.T @ residual).astype(np.float64))
    return np.ascontiguousarray(solution.T, np.float32)


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
