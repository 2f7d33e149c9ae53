"""The trial before anything is fitted: what is wrong with a search, who the hubs are, could a bank mend it, what next.

The causes are told apart by samples of what the search found, and of the gallery.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from pydantic import computed_field

from hubplugin.bank import Bank, BankLike, PreparedBank
from hubplugin.causes import (
    HUBBY,
    Finding,
    check_copies,
    check_lengths,
    check_model,
    check_shift,
)
from hubplugin.compute import Compute, TopK, search
from hubplugin.errors import InputError, Parameter
from hubplugin.guard import Trial, judge_by
from hubplugin.jobs.correct import bank_for, read_learn_for
from hubplugin.jobs.naming import Naming, display_names
from hubplugin.jobs.results import show_trial
from hubplugin.learning import (
    LearnedMap,
    Teachers,
    learn_query_map,
    read_learn,
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
from hubplugin.results import (
    DIRECTIONS,
    Hub,
    Page,
    Result,
    Section,
    chart_occurrences,
    list_hubs,
    percent,
    rows_of,
)
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

QUERIES, TARGETS = 500, 2_000
"""Queries and targets that are looked at, drawn at random: shares come out to within 2 points."""

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
        """True if R@1 would rise beyond chance and the guard passes. None without known answers."""
        return self.trial.helps

    @property
    def causes(self) -> list[Finding]:
        """The findings that are there."""
        return [finding for finding in self.findings if finding.found]

    @property
    def chance(self) -> float:
        """The skewness that so many queries and targets have by chance."""
        return skewness_by_chance(self.queries, self.hubness.k, self.targets)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def hubby(self) -> bool:
        """Whether the search is hubby beyond chance."""
        return self.hubness.skewness - self.chance >= HUBBY

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> str:
        """What it is, and what to do first."""
        causes = ", ".join(finding.cause for finding in self.causes)
        if self.hubby and causes:
            return f"there is hubness, and there is more than that: {causes}; mend that first"
        if self.hubby:
            return "there is hubness"
        if causes:
            return f"this is not hubness, but: {causes}"
        return "there is no hubness, and no other cause was found"

    def page(self) -> Page:
        trial = self.trial
        headline = f"{self.verdict}; the default correction would {trial.outlook()}"
        sound = not self.hubby and not self.causes
        notes = [trial.change_of_skewness(), *trial.notes]
        if self.lesson is not None:
            notes += [f"with learn: {note}" for note in self.lesson.notes]
        sections = [
            Section("What was seen", rows_of(*self._seen())),
            list_hubs(self.hubs, ("raw",), self.hubness.k, self.anti_hubs),
            Section("Is it something else?", [each.row() for each in self.findings]),
            show_trial(trial, "A correction would change"),
            Section("Worth knowing", rows_of(*notes)),
            chart_occurrences({"raw": self.occurrences}, self.hubness.k),
        ]
        scene = f"{self.targets:,} targets · {self.queries:,} queries"
        direction = DIRECTIONS[1 if sound else -1]
        return Page(headline, direction, f"{scene} · nothing was changed", sections)

    def _seen(self) -> list[str]:
        """Return what was seen, in the words of whoever searches."""
        k = self.hubness.k
        most = most_found(self.targets)
        usual = k * self.queries / self.targets
        share = self.hubness.largest / self.queries
        hubby = "YES" if self.hubby else "no"
        return [
            f"{percent(most / self.targets)} of your documents ({most:,}) take {percent(self.most_found.share)} of all "
            f"places in the top {k}; by chance it would be {percent(self.most_found.by_chance)}",
            f"{percent(self.never_found.share)} of your documents are found by no query; by chance it would be "
            f"{percent(self.never_found.by_chance)}",
            f"the document that is found most often comes back for {self.hubness.largest:,} queries "
            f"({percent(share)}), where {usual:.1f} are usual",
            f"hubness: {hubby}. skewness {self.hubness.skewness:.2f} ({self.chance:.2f} by chance)",
        ]


def diagnose(
    targets: VectorLike | Store,
    bank: BankLike,
    *,
    metric: Metric | str | None = None,
    learn: bool = False,
    compute: Compute = Compute(),
    seed: int = 0,
    names: Naming | None = None,
) -> Diagnosis:
    """Say how hubby a gallery is for some queries, who the hubs are, and whether these queries as a bank would mend it.

    Nothing is changed.

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

    Raises:
        InputError: for anything that cannot be used.
    """
    chosen = Metric.parse(
        metric if metric is not None else getattr(targets, "metric", Metric.COSINE)
    )
    if isinstance(learn, Bank):
        raise InputError(
            Parameter("learn"),
            ": expected True or False; apply(..., dry_run=True) tries pairs",
        )
    if isinstance(targets, Store):
        read_learn_for(targets, learn, "blend")
    else:
        read_learn(learn, "blend", chosen, targets)
    examples = (
        bank_for(targets, bank, learn) if isinstance(targets, Store) else Bank.of(bank)
    )
    prepared = examples.prepare(chosen, compute, targets)
    require_enough(len(prepared.distinct))  # before the gallery is read
    prepared = prepared.against(targets)
    gallery = prepared.require_targets()
    queries = len(prepared.query_bank)
    logger.info("diagnosing %d targets by %d queries", gallery.rows, queries)
    top = TopK(OCCURRENCE)
    search(prepared.query_bank, gallery, chosen, compute, top, label="finding the hubs")
    nearest = top.rows[0]
    occurrence = k_occurrence(nearest, gallery.rows)
    causes = find_causes(prepared, nearest, seed)
    default = configure("blend")
    trial = judge_by(prepared, default.resolve(prepared), seed)
    lesson = learn_query_map(default, Teachers(prepared)) if learn else None
    logger.info("diagnosed")
    found = hubs(occurrence, LISTED)
    never = pick_evenly(np.flatnonzero(occurrence == 0), LISTED)
    rows = original_rows(gallery)[np.concatenate([found, never])]
    ids = _ids_of(targets, rows)
    shown = display_names(ids, names)
    times = occurrence[found].tolist()
    count = gallery.rows
    k = min(OCCURRENCE, count)
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
            Hub(target, name, {"raw": hits})
            for target, name, hits in zip(ids, shown, times, strict=False)
        ],
        anti_hubs=shown[len(found) :],
        findings=causes,
        trial=trial,
        occurrences=count_targets(occurrence),
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


def find_causes(bank: PreparedBank, nearest: np.ndarray, seed: int) -> list[Finding]:
    """Look for all causes.

    Args:
        bank: the queries, and the gallery.
        nearest: the rows that each of them finds in the gallery, best first, [m, k].
        seed: of the samples.
    """
    rng = np.random.default_rng(seed)
    compute = bank.compute.without_progress
    gallery = bank.require_targets()
    drawn = np.sort(rng.permutation(len(nearest))[:QUERIES])
    targets = draw_sample(gallery, TARGETS, bank.metric, rng)
    rows, place = np.unique(nearest[drawn], return_inverse=True)
    place = place.reshape(-1, nearest.shape[1])
    vectors = take_rows(gallery, rows, bank.metric)
    queries = bank.query_bank[drawn]
    # Half the mean squared distance of any two.
    variance = float(targets.var(axis=0, dtype=np.float64).sum())
    found = np.linalg.norm(vectors, axis=1)[place.reshape(-1)]
    lengths = np.linalg.norm(targets, axis=1)
    return [
        check_model(queries, targets, bank.metric, compute, rng),
        check_shift(queries, targets),
        check_copies(place, vectors, variance),
        check_lengths(found, lengths, bank.metric),
    ]
