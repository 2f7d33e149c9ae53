"""The trial before anything is fitted: what is wrong with a search, who the hubs are, could a bank mend it, what next.

The causes are told apart by samples of what the search found, and of the gallery.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
from pydantic import computed_field

from hubplugin.bank import Bank, BankLike, PreparedBank
from hubplugin.causes import (
    FEWEST,
    HUBBY,
    Finding,
    check_collapse,
    check_copies,
    check_cut_off,
    check_lengths,
    check_model,
    check_shift,
    check_short_texts,
)
from hubplugin.compute import Compute, TopK, search
from hubplugin.errors import InputError, Parameter
from hubplugin.guard import Trial, judge_by
from hubplugin.jobs.correct import bank_for, require_learnable_in
from hubplugin.jobs.naming import Naming, display_names
from hubplugin.jobs.results import key_figures_of
from hubplugin.learning import (
    FEWEST_PAIRS,
    LearnedMap,
    Teachers,
    learn_query_map,
    require_learnable,
)
from hubplugin.measures.hubness import (
    Hubness,
    count_targets,
    hubs,
    k_occurrence,
    most_found,
    never_found_by_chance,
    pick_evenly,
    share_of_most_found,
    share_of_most_found_by_chance,
    skewness_by_chance,
)
from hubplugin.methods import configure
from hubplugin.metric import Metric
from hubplugin.report import Hub, Plot, Report, Result, percent, plots, points
from hubplugin.store import Id, Store
from hubplugin.validation import OCCURRENCE, require_enough
from hubplugin.vectors import (
    Scannable,
    VectorLike,
    draw_sample,
    original_rows,
    take_rows,
)

logger = logging.getLogger(__name__)

DEEP = 50
"""How many of the nearest are looked at for each query: five answers of ten."""

QUERIES, TARGETS, TEXTS = 500, 2_000, 1_000
"""Queries, targets and texts that are looked at, drawn at random: shares come out to within 2 points."""

LISTED = 20
"""How many hubs, and targets that are never found, are named."""

LEARNED = {"asked": (5.48, 1.42), "not asked": (1.95, -0.42)}
"""Points of R@1 that a map learned from clicks gains over the raw search, mean and worst of the settings: the column
"map over raw" of docs/learning.md, by what is tested on."""


@dataclass(frozen=True)
class ShareAndChance:
    """A share from 0 to 1, and what it would be without hubness, or between a query and the answer of another."""

    share: float
    by_chance: float


@dataclass(frozen=True)
class NextStep:
    """Something to do next, and what it would bring.

    says: what it changes R@1 by, one sentence. source: whether that was measured on this bank, is typical by a table of
    the documentation, or cannot be known, where `says` names what would tell. figures: the numbers behind it.
    """

    step: str
    says: str
    source: Literal["measured", "table", "unknown"]
    figures: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.step}: {self.says}"


@dataclass(frozen=True)
class Diagnosis(Result):
    """What `diagnose` found.

    targets, queries: how many. hubness: of the raw search, over all targets and queries. most_found, never_found: the
    share of all places that the most found 1 % of the targets take, and the share of the targets that no query finds.
    hubs: the targets found most often, and how many queries found each among their k nearest. anti_hubs: some that no
    query found. findings: the causes looked for. trial: what the default method would change, R@1 where answers are
    known. occurrences: how many targets have the k-occurrence N, by N. lesson: what the answers of the bank would teach
    beside the default, None where that was not asked. next_steps: what the default, clicks and BM25 would each bring.
    """

    store: str | None
    targets: int
    queries: int
    hubness: Hubness
    most_found: ShareAndChance
    never_found: ShareAndChance
    hubs: list[Hub]
    anti_hubs: list[str]
    findings: list[Finding]
    trial: Trial
    occurrences: Mapping[int, int] = field(repr=False)
    next_steps: list[NextStep]
    lesson: LearnedMap | None = None

    @property
    def helps(self) -> bool | None:
        """Whether more right answers would come first, beyond chance, and the guard would let it pass; None where no
        answers are known."""
        return self.trial.helps

    @property
    def causes(self) -> list[Finding]:
        """The findings that are there."""
        return [finding for finding in self.findings if finding.found]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def hubby(self) -> bool:
        """Whether the search is hubby beyond chance."""
        return (
            self.hubness.skewness
            - skewness_by_chance(self.queries, self.hubness.k, self.targets)
            >= HUBBY
        )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> str:
        """What it is, and what to do first."""
        causes = ", ".join(finding.cause for finding in self.causes)
        if self.hubby:
            also = (
                f", and there is more than that: {causes}; mend that first"
                if causes
                else ""
            )
            return f"there is hubness{also}"
        return (
            f"this is not hubness, but: {causes}"
            if causes
            else "there is no hubness, and no other cause was found"
        )

    def sentences(self) -> list[str]:
        """What was seen, in the words of whoever searches."""
        k, most, never = (
            self.hubness.k,
            most_found(self.targets),
            round(self.never_found.share * self.targets),
        )
        usual = k * self.queries / self.targets
        return [
            f"{self.targets:,} documents, {self.queries:,} queries",
            f"{percent(most / self.targets)} of your documents ({most:,}) take {percent(self.most_found.share)} of "
            f"all places in the top {k}; by chance it would be {percent(self.most_found.by_chance)}",
            f"{never:,} documents ({percent(self.never_found.share)}) are found by no query; by chance it would be "
            f"{percent(self.never_found.by_chance)}",
            f"the document that is found most often comes back for {self.hubness.largest:,} queries "
            f"({percent(self.hubness.largest / self.queries)}), where {usual:.1f} are usual",
        ]

    def report(self) -> Report:
        """The key figures are of held-out queries, raw and with the correction that would be fitted."""
        trial, hubness = self.trial, self.hubness
        chance = skewness_by_chance(self.queries, hubness.k, self.targets)
        even, parts = hubness.k * self.queries / self.targets, {"raw": self.occurrences}
        return Report(
            title="What is wrong with these searches",
            subtitle=f"{self.targets:,} targets, {self.queries:,} queries; nothing was changed",
            verdict=self.verdict,
            direction="worse" if self.hubby or self.causes else "better",
            more=[
                str(trial.bank),
                f"the default: {trial.name}",
                f"expected with a bank of this size: {trial.change_of_skewness()}",
                *trial.notes,
                f"it would {trial.outlook()}",
                *(
                    []
                    if self.lesson is None
                    else [f"with learn: {note}" for note in self.lesson.notes]
                ),
                f"what next: {'; '.join(map(str, self.next_steps))}",
            ],
            key_figures=key_figures_of(trial),
            sentences=[
                *self.sentences(),
                f"hubness: {'YES' if self.hubby else 'no'}. skewness {hubness.skewness:.2f} ({chance:.2f} by chance)",
            ],
            causes=self.findings,
            hubs=self.hubs,
            anti_hubs=self.anti_hubs,
            k=hubness.k,
            plots=[
                Plot(
                    "How often targets are found",
                    partial(plots.occurrences, parts=parts, even=even, k=hubness.k),
                )
            ],
            facts={"method": trial.name},
        )


def diagnose(
    targets: VectorLike | Store,
    bank: BankLike,
    *,
    metric: Metric | str | None = None,
    learn: bool = False,
    compute: Compute = Compute(),
    seed: int = 0,
    names: Naming | None = None,
    texts: Naming | None = None,
) -> Diagnosis:
    """Says how hubby a gallery is for some queries, who the hubs are, whether these queries as a bank would mend it,
    and what else would. Nothing is changed.

    Args:
        targets: [n, d], or a store.
        bank: example queries, as for `hubplugin.fit`, or for `hubplugin.apply` of a store.
        metric: by default that of the store, else cosine.
        learn: also, what a query map would gain that the answers of the bank teach (docs/learning.md), or the recorded
            clicks of a store; it needs at least 50 different pairs.
        compute: where it is computed.
        seed: of the samples.
        names: a function from ids (rows where `targets` is no store) to what hubs are called, as
            `hubplugin.jobs.naming` makes it.
        texts: a function from ids to the texts of documents. It finds short ones, and the words that queries share
            with their answers; for these, names will do.

    Raises:
        InputError: for anything that cannot be used.
    """
    chosen = Metric.parse(
        metric if metric is not None else getattr(targets, "metric", Metric.COSINE)
    )
    if not isinstance(learn, bool):
        got = type(learn).__name__
        raise InputError(
            Parameter("learn"),
            f": expected True or False, got {got}; apply(..., dry_run=True) tries pairs",
        )
    if learn and isinstance(targets, Store):
        require_learnable_in(targets, "blend", None)
    elif learn:
        require_learnable("blend", chosen, targets)
    examples = (
        bank_for(targets, bank, learn) if isinstance(targets, Store) else Bank.of(bank)
    )
    prepared = examples.prepare(chosen, compute, targets)
    require_enough(len(prepared.distinct))  # before the gallery is read
    prepared = prepared.against(targets)
    gallery = prepared.require_targets()
    logger.info(
        "diagnosing %d targets by %d queries", gallery.rows, len(prepared.query_bank)
    )
    top = TopK(DEEP)
    search(prepared.query_bank, gallery, chosen, compute, top, label="finding the hubs")
    nearest = top.rows[0]
    occurrence = k_occurrence(nearest[:, :OCCURRENCE], gallery.rows)

    def ids_of(rows: np.ndarray) -> list[Id]:
        return _ids_of(targets, original_rows(gallery)[rows])

    causes = find_causes(prepared, nearest, texts, ids_of, seed)
    default = configure("blend")
    trial = judge_by(prepared, default.resolve(prepared), seed)
    lesson = learn_query_map(default, Teachers(prepared)) if learn else None
    pairs = (
        0
        if prepared.known_answers is None
        else int(np.count_nonzero(prepared.known_answers >= 0))
    )
    learnable = chosen is not Metric.EUCLIDEAN and getattr(
        targets, "maps_queries", True
    )
    shared = shared_words(examples, prepared, texts or names, ids_of, seed)
    logger.info("diagnosed")
    rows, never = (
        hubs(occurrence, LISTED),
        pick_evenly(np.flatnonzero(occurrence == 0), LISTED),
    )
    ids = ids_of(np.concatenate([rows, never]))
    shown = display_names(ids, names)
    count, queries, k = (
        gallery.rows,
        len(prepared.query_bank),
        min(OCCURRENCE, gallery.rows),
    )
    return Diagnosis(
        store=targets.url if isinstance(targets, Store) else None,
        targets=count,
        queries=queries,
        hubness=Hubness.of(occurrence, k),
        most_found=ShareAndChance(
            share_of_most_found(occurrence),
            share_of_most_found_by_chance(queries, k, count),
        ),
        never_found=ShareAndChance(
            float(np.mean(occurrence == 0)), never_found_by_chance(queries, k, count)
        ),
        hubs=[
            Hub(key, name, {"raw": times})
            for key, name, times in zip(
                ids, shown, occurrence[rows].tolist(), strict=False
            )  # not of those never found
        ],
        anti_hubs=shown[len(rows) :],
        findings=causes,
        trial=trial,
        occurrences=count_targets(occurrence),
        next_steps=[
            step_default(trial),
            step_clicks(lesson, learnable, pairs),
            step_keywords(shared),
        ],
        lesson=lesson,
    )


def _ids_of(targets: object, rows: np.ndarray) -> list[Id]:
    """The ids of the targets in these rows: those of a store, else their numbers."""
    if not isinstance(targets, Scannable):
        return list(rows.tolist())
    wanted = set(rows.tolist())
    every = (key for batch in targets.scan() for key in batch.ids)
    ids = {row: key for row, key in enumerate(every) if row in wanted}
    return [ids[row] for row in rows.tolist()]


IdsOf = Callable[[np.ndarray], Sequence[Id]]
"""From rows of the gallery to the ids of the targets in them."""


def find_causes(
    bank: PreparedBank,
    nearest: np.ndarray,
    texts: Naming | None,
    ids_of: IdsOf,
    seed: int,
) -> list[Finding]:
    """Looks for all causes.

    Args:
        bank: the queries, and the gallery.
        nearest: the rows that each of them finds in the gallery, best first, [m, DEEP].
        texts: from ids to texts.
        ids_of: from rows to ids.
        seed: of the samples.
    """
    rng, compute = np.random.default_rng(seed), bank.compute.without_progress
    gallery = bank.require_targets()
    drawn = np.sort(rng.permutation(len(nearest))[:QUERIES])
    targets = draw_sample(gallery, TARGETS, bank.metric, rng)
    lists = nearest[drawn, :OCCURRENCE]
    rows, place = np.unique(lists, return_inverse=True)
    place = place.reshape(lists.shape)
    vectors = take_rows(gallery, rows, bank.metric)
    queries = bank.query_bank[drawn]
    variance = float(
        targets.var(axis=0, dtype=np.float64).sum()
    )  # half the mean squared distance of any two
    length_found, length_drawn = (
        np.linalg.norm(part, axis=1) for part in (vectors, targets)
    )
    unit = (
        targets / np.maximum(length_drawn, 1e-30)[:, None]
        if bank.metric is Metric.DOT
        else targets
    )
    return [
        check_model(queries, targets, bank.metric, compute, rng),
        check_shift(queries, targets),
        check_copies(
            place,
            vectors,
            _spacing(targets[: len(targets) // 4 + 1], replace(bank, compute=compute)),
            variance,
        ),
        check_collapse(unit),
        check_lengths(length_found[place.reshape(-1)], length_drawn, bank.metric),
        _check_short_texts(lists, gallery.rows, texts, ids_of, rng),
        check_cut_off(_ranks(bank, nearest), OCCURRENCE, nearest.shape[1]),
    ]


def _spacing(targets: np.ndarray, bank: PreparedBank) -> np.ndarray:
    """Half the squared distance of each of `targets` [s, d], of the gallery, to its nearest other."""
    metric = bank.metric if bank.metric is Metric.COSINE else Metric.EUCLIDEAN
    nearest = TopK(2)
    search(targets, bank.require_targets(), metric, bank.compute, nearest)
    scores = nearest.scores[0]
    distance = (1 - scores if metric is Metric.COSINE else -scores)[:, -1]
    spacing: np.ndarray = np.maximum(distance, 0.0)
    return spacing


def _check_short_texts(
    lists: np.ndarray,
    count: int,
    texts: Naming | None,
    ids_of: IdsOf,
    rng: np.random.Generator,
) -> Finding:
    """`check_short_texts` of what is in `lists` [m, k], rows of a gallery of `count`."""
    if texts is None:
        return check_short_texts([], [])
    places, drawn = (
        rng.permutation(lists.reshape(-1))[:TEXTS],
        rng.permutation(count)[:TEXTS],
    )
    both = _texts_in(np.concatenate([places, drawn]), texts, ids_of)
    return check_short_texts(both[: len(places)], both[len(places) :])


def _texts_in(rows: np.ndarray, texts: Naming, ids_of: IdsOf) -> list[str | None]:
    """The text of the target in each of `rows` [r], None for one that has none. Each is asked for once."""
    different, place = np.unique(rows, return_inverse=True)
    known = texts(list(ids_of(different)))
    return [known[row] for row in place.reshape(-1).tolist()]


def _ranks(bank: PreparedBank, nearest: np.ndarray) -> np.ndarray | None:
    """The rank of what each query clicked, from 1; one more than are looked at where it is not among them. None where
    nothing was clicked: the targets of pairs are outside of the gallery."""
    if bank.clicks is None:
        return None
    clicked = np.flatnonzero(bank.clicks >= 0)
    hit = nearest[clicked] == bank.clicks[clicked, None]
    ranks: np.ndarray = np.where(
        hit.any(axis=1), hit.argmax(axis=1) + 1, nearest.shape[1] + 1
    )
    return ranks


WORD = re.compile(r"[^\W_]+")
"""Of a text in lower case. A keyword search that splits words elsewhere counts others."""


def shared_words(
    examples: Bank, bank: PreparedBank, texts: Naming | None, ids_of: IdsOf, seed: int
) -> ShareAndChance | None:
    """The share of a query's different words that are in its answer, in the mean; by chance: in another query's answer.

    None where texts of fewer than 50 queries and of what they clicked are known.

    Args:
        examples: the queries as they were given, which may be texts.
        bank: the same as vectors, and what they clicked.
        texts: from ids to texts.
        ids_of: from rows to ids.
        seed: of the sample.
    """
    queries = (
        examples.texts.texts
        if examples.texts is not None
        else getattr(examples.queries, "texts", None)
    )
    if (
        queries is None
        or texts is None
        or bank.clicks is None
        or len(queries) != len(bank.clicks)
    ):
        return None
    clicked = (
        np.random.default_rng(seed)
        .permutation(np.flatnonzero(bank.clicks >= 0))[:TEXTS]
        .tolist()
    )
    clicked = [row for row in clicked if queries[row] is not None]
    answers = _texts_in(bank.clicks[clicked], texts, ids_of)
    pairs = [
        (words, frozenset(WORD.findall(answer.casefold())))
        for row, answer in zip(clicked, answers, strict=True)
        if answer is not None
        and (words := frozenset(WORD.findall(queries[row].casefold())))
    ]
    if len(pairs) < FEWEST:
        return None
    asked, answered = zip(*pairs, strict=True)
    return ShareAndChance(
        _mean_share(asked, answered), _mean_share(asked, [*answered[1:], answered[0]])
    )


def _mean_share(
    queries: Sequence[frozenset[str]], answers: Sequence[frozenset[str]]
) -> float:
    """Of the words of each query, that are in the answer beside it."""
    return float(
        np.mean(
            [
                len(words & answer) / len(words)
                for words, answer in zip(queries, answers, strict=True)
            ]
        )
    )


def step_default(trial: Trial) -> NextStep:
    """What the default would bring on this bank: measured where answers are known."""
    step, right = "as it is", trial.right
    if right is None:
        says = "not known without answers (--answers): fifty queries show a large change of R@1, 500 one of 2 points"
        return NextStep(step, says, "unknown")
    says = f"R@1 changes by {points(right.change)}, measured on {right.queries:,} held-out queries"
    return NextStep(step, says, "measured", vars(right.change))


def step_clicks(lesson: LearnedMap | None, learnable: bool, pairs: int) -> NextStep:
    """What a map of the query would bring: measured by `lesson`, else typical of the settings of docs/learning.md.

    Args:
        lesson: what the answers of the bank teach, None where that was not asked.
        learnable: whether metric and store allow a map.
        pairs: of how many queries the answer is known, from which it can be learned.
    """
    if lesson is not None:
        sides = [("not asked before", lesson.other), ("asked before", lesson.asked)]
        changes = [
            f"{points(side.change)} of what was {name}"
            for name, side in sides
            if side is not None
        ]
        says = f"over the offsets alone R@1 changes by {' and '.join(changes)}, measured on held-out pairs"
        return NextStep("with learn", says, "measured", vars(lesson.other.change))
    if not learnable:
        return NextStep(
            "with learn",
            "not here: a map needs cosine or dot product, and a store that holds it",
            "unknown",
        )
    step = (
        "with learn (--learn)"
        if pairs >= FEWEST_PAIRS
        else f"with {FEWEST_PAIRS} clicks or more and learn"
    )
    asked, other = (
        f"{mean:+.1f} points (worst {worst:+.1f})" for mean, worst in LEARNED.values()
    )
    says = (
        f"R@1 typically changes by {asked} where people ask again for what was asked before, and by {other} where they "
        "ask for something new: other banks, by the table of docs/learning.md"
    )
    says += (
        ""
        if pairs >= FEWEST_PAIRS
        else "; where documents have titles, these can teach it (docs/titles.md)"
    )
    return NextStep(
        step, says, "table", {name: mean for name, (mean, _) in LEARNED.items()}
    )


def step_keywords(shared: ShareAndChance | None) -> NextStep:
    """What tells whether BM25 would help beside the search: the words that queries share with their answers."""
    step = "BM25 beside it"
    if shared is None:
        return NextStep(
            step,
            "not known without clicks, and the texts of queries and documents",
            "unknown",
        )
    says = (
        f"your queries share {percent(shared.share)} of their words with their answers, measured, and "
        f"{percent(shared.by_chance)} with those of others (docs/comparison.md)"
    )
    return NextStep(step, says, "measured", vars(shared))
