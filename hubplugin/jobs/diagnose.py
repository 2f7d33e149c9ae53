"""The trial before anything is fitted: what is wrong with a search, who the hubs are, could a bank mend it.

The causes are told apart by samples of what the search found, and of the gallery.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from pydantic import computed_field

from hubplugin.bank import Bank, BankLike, PreparedBank
from hubplugin.causes import HUBBY, Finding, collapsed, copies, cut_off, lengths, other_model, shifted, short_texts
from hubplugin.compute import Compute, TopK, search
from hubplugin.guard import Trial, judge_by
from hubplugin.jobs.correct import bank_for, require_learnable_in
from hubplugin.jobs.naming import Naming, display_names
from hubplugin.jobs.results import key_figures_of
from hubplugin.learning import LearnedMap, learn_query_map, require_learnable
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
from hubplugin.methods import FitInput, configure
from hubplugin.metric import Metric
from hubplugin.report import Hub, Plot, Report, Result, percent, plots, points
from hubplugin.store import Id, Store
from hubplugin.validation import OCCURRENCE, require_enough
from hubplugin.vectors import Scannable, VectorLike, draw_sample, take_rows

DEEP = 50
"""How many of the nearest are looked at for each query: five answers of ten."""

QUERIES, TARGETS, TEXTS = 500, 2_000, 1_000
"""Queries, targets and texts that are looked at, drawn at random: shares come out to within 2 points."""


def findings(
    bank: PreparedBank,
    nearest: np.ndarray,
    texts: Naming | None,
    ids_of: Callable[[np.ndarray], Sequence[Id]],
    seed: int,
) -> list[Finding]:
    """All causes, looked for. found [m, DEEP]: the rows that each bank query finds in the gallery, best first. ids_of:
    the ids of some rows, by which `texts` knows them."""
    rng, quiet = np.random.default_rng(seed), replace(bank, compute=bank.compute.without_progress)
    asking = np.sort(rng.permutation(len(nearest))[:QUERIES])
    targets = draw_sample(bank.require_targets("blend"), TARGETS, bank.metric, rng)
    lists = nearest[asking, :OCCURRENCE]
    rows, place = np.unique(lists, return_inverse=True)
    place = place.reshape(lists.shape)
    vectors = take_rows(bank.require_targets("blend"), rows, bank.metric)
    queries = bank.query_bank[asking]
    variance = float(targets.var(axis=0, dtype=np.float64).sum())  # half the mean squared distance of any two
    long = [np.linalg.norm(part, axis=1) for part in (vectors, targets)]
    return [
        other_model(queries, targets, quiet.metric, quiet.compute, rng),
        shifted(queries, targets),
        copies(place, vectors, _spacing(targets[: len(targets) // 4 + 1], quiet), variance),
        collapsed(targets / np.maximum(long[1], 1e-30)[:, None] if bank.metric is Metric.DOT else targets),
        lengths(long[0][place.reshape(-1)], long[1], bank.metric),
        _short(lists, bank, texts, ids_of, rng),
        cut_off(_ranks(bank, nearest), OCCURRENCE, nearest.shape[1]),
    ]


def _short(
    lists: np.ndarray,
    bank: FitInput,
    texts: Naming | None,
    ids_of: Callable[[np.ndarray], Sequence[Id]],
    rng: np.random.Generator,
) -> Finding:
    if texts is None:
        return short_texts([], [])
    places = rng.permutation(lists.reshape(-1))[:TEXTS]
    drawn = rng.permutation(bank.require_targets("blend").rows)[:TEXTS]
    rows, place = np.unique(np.concatenate([places, drawn]), return_inverse=True)
    known = texts(list(ids_of(rows)))
    each = [known[row] for row in place.reshape(-1).tolist()]
    return short_texts(each[: len(places)], each[len(places) :])


def _spacing(targets: np.ndarray, bank: FitInput) -> np.ndarray:
    """Half the squared distance of each of `targets` [s, d], of the gallery, to its nearest other."""
    metric = bank.metric if bank.metric is Metric.COSINE else Metric.EUCLIDEAN
    nearest = TopK(2)
    search(targets, bank.require_targets("blend"), metric, bank.compute, nearest)
    scores = nearest.scores[0]
    distance = (1 - scores if metric is Metric.COSINE else -scores)[:, -1]
    spacing: np.ndarray = np.maximum(distance, 0.0)
    return spacing


def _ranks(bank: PreparedBank, nearest: np.ndarray) -> np.ndarray | None:
    """The rank of what each query clicked, from 1; one more than are looked at where it is not among them. None where
    nothing was clicked: the targets of pairs are outside of the gallery."""
    if bank.clicks is None:
        return None
    known = np.flatnonzero(bank.clicks >= 0)
    hit = nearest[known] == bank.clicks[known, None]
    ranks: np.ndarray = np.where(hit.any(axis=1), hit.argmax(axis=1) + 1, nearest.shape[1] + 1)
    return ranks


logger = logging.getLogger(__name__)

LISTED = 20
"""How many hubs, and targets that are never found, are named."""


@dataclass(frozen=True)
class ShareAndChance:
    """A share from 0 to 1, and what it would be without hubness."""

    share: float
    by_chance: float


@dataclass(frozen=True)
class Diagnosis(Result):
    """What `diagnose` found.

    targets, queries: how many. hubness: of the raw search, over all targets and queries. most_found, never_found: the
    share of all places that the most found 1 % of the targets take, and the share of the targets that no query finds.
    hubs: the targets found most often, and how many queries found each among their k nearest. anti_hubs: some that no
    query found. findings: the causes looked for. trial: what the default method would change, R@1 where answers are
    known. occurrences: how many targets have the k-occurrence N, by N. lesson: what the answers of the bank would teach
    beside the default, None where that was not asked.
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
    lesson: LearnedMap | None = None

    @property
    def helps(self) -> bool | None:
        """Whether more right answers would come first, beyond chance, and the guard would let it pass; None where no
        answers are known."""
        return self.trial.helps

    @property
    def causes(self) -> list[Finding]:
        """Those of the findings that are there."""
        return [finding for finding in self.findings if finding.found]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def hubby(self) -> bool:
        """Whether the search is hubby beyond chance."""
        return self.hubness.skewness - skewness_by_chance(self.queries, self.hubness.k, self.targets) >= HUBBY

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> str:
        """What it is, and what to do first."""
        listed = ", ".join(finding.cause for finding in self.causes)
        if self.hubby:
            also = f", and there is more than that: {listed}; mend that first" if listed else ""
            return f"there is hubness{also}"
        return f"this is not hubness, but: {listed}" if listed else "there is no hubness, and no other cause was found"

    def sentences(self) -> list[str]:
        """What was seen, in the words of whoever searches."""
        k, most, never = self.hubness.k, most_found(self.targets), round(self.never_found.share * self.targets)
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
        after, hubness = self.trial, self.hubness
        chance = skewness_by_chance(self.queries, hubness.k, self.targets)
        expected = f"expected with a bank of this size: {after.change_of_skewness()}"
        expected += "" if after.change is None else f", R@1 changes by {points(after.change)}"
        even, parts = hubness.k * self.queries / self.targets, {"raw": self.occurrences}
        return Report(
            title="What is wrong with these searches",
            subtitle=f"{self.targets:,} targets, {self.queries:,} queries; nothing was changed",
            verdict=self.verdict,
            direction="worse" if self.hubby or self.causes else "better",
            more=[
                str(after.bank),
                f"the default: {after.name}",
                expected,
                *after.notes,
                f"it would {after.outlook()}",
                *([] if self.lesson is None else [f"with learn: {note}" for note in self.lesson.notes]),
            ],
            key_figures=key_figures_of(after),
            sentences=[
                *self.sentences(),
                f"hubness: {'YES' if self.hubby else 'no'}. skewness {hubness.skewness:.2f} ({chance:.2f} by chance)",
            ],
            causes=self.findings,
            hubs=self.hubs,
            anti_hubs=self.anti_hubs,
            k=hubness.k,
            plots=[
                Plot("How often targets are found", partial(plots.occurrences, parts=parts, even=even, k=hubness.k))
            ],
            facts={"method": after.name},
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
    """How hubby a gallery is for some queries, who the hubs are, and whether these queries as a bank would mend it.

    targets: [n, d], or a store, whose metric is then the default; otherwise that is cosine. bank: example
    queries, as for `hubplugin.fit`, or for `hubplugin.apply` of a store. Nothing is changed. names, texts: functions
    from ids (rows where `targets` is no store) to what hubs are called, and to the texts of documents, by which short
    ones are found; `hubplugin.jobs.naming` makes them. learn: also, what a query map would gain that the answers of the
    bank teach (docs/learning.md), or the recorded clicks of a store; it needs at least 50 different pairs.

    Raises InputError for anything that cannot be used.
    """
    chosen = Metric.parse(metric if metric is not None else getattr(targets, "metric", Metric.COSINE))
    if learn and isinstance(targets, Store):
        require_learnable_in(targets, learn, "blend", None, None)
    elif learn:
        require_learnable(learn, "blend", chosen, targets)
    asking = bank_for(targets, bank, learn) if isinstance(targets, Store) else Bank.of(bank)
    prepared = asking.prepare(chosen, compute, targets)
    require_enough(len(prepared.distinct))  # before the gallery is read
    prepared = prepared.against(targets)
    gallery = prepared.require_targets("blend")
    logger.info("diagnosing %d targets by %d queries", gallery.rows, len(prepared.query_bank))
    nearest = TopK(DEEP)
    search(prepared.query_bank, gallery, chosen, compute, nearest, label="finding the hubs")
    found = nearest.rows[0]
    occurrence = k_occurrence(found[:, :OCCURRENCE], gallery.rows)
    causes = findings(prepared, found, texts, lambda rows: _ids_of(targets, rows), seed)
    default = configure("blend")
    trial = judge_by(prepared, default.resolve(prepared), seed)
    lesson = learn_query_map(default, prepared) if learn else None
    logger.info("diagnosed")
    rows, never = hubs(occurrence, LISTED), pick_evenly(np.flatnonzero(occurrence == 0), LISTED)
    ids = _ids_of(targets, np.concatenate([rows, never]))
    shown = display_names(ids, names)
    count, queries, k = gallery.rows, len(prepared.query_bank), min(OCCURRENCE, gallery.rows)
    return Diagnosis(
        store=targets.url if isinstance(targets, Store) else None,
        targets=count,
        queries=queries,
        hubness=Hubness.of(occurrence, k),
        most_found=ShareAndChance(share_of_most_found(occurrence), share_of_most_found_by_chance(queries, k, count)),
        never_found=ShareAndChance(float(np.mean(occurrence == 0)), never_found_by_chance(queries, k, count)),
        hubs=[
            Hub(key, name, {"raw": times})
            for key, name, times in zip(ids, shown, occurrence[rows].tolist(), strict=False)  # not of those never found
        ],
        anti_hubs=shown[len(rows) :],
        findings=causes,
        trial=trial,
        occurrences=count_targets(occurrence),
        lesson=lesson,
    )


def _ids_of(targets: object, rows: np.ndarray) -> list[Id]:
    """The ids of some rows: their own where `targets` is a store, else their numbers."""
    if not isinstance(targets, Scannable):
        return list(rows.tolist())
    wanted = set(rows.tolist())
    every = (key for batch in targets.scan() for key in batch.ids)
    ids = {row: key for row, key in enumerate(every) if row in wanted}
    return [ids[row] for row in rows.tolist()]
