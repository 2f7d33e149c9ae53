"""`diagnose`: find what is wrong with a search, and whether a correction would help.

Samples of the found targets and of the gallery tell the causes apart.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

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
from hubplugin.compute import Compute
from hubplugin.guard import Trial, judge_by
from hubplugin.jobs.correct import bank_for, read_learn_for
from hubplugin.jobs.hubs import find_hubs, find_targets
from hubplugin.jobs.naming import Naming, display_names, display_query, names_of
from hubplugin.jobs.results import show_trial
from hubplugin.learning import LearnedMap, Teachers, learn_query_map, read_learn
from hubplugin.measures.hubness import (
    Hubness,
    k_occurrence,
    most_found,
    never_found_by_chance,
    share_of_most_found,
    share_of_most_found_by_chance,
    skewness_by_chance,
)
from hubplugin.methods import METHODS
from hubplugin.metric import Metric
from hubplugin.results import (
    CORRECTED,
    RAW,
    Hub,
    Page,
    Result,
    Section,
    Step,
    list_hubs,
    points,
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

QUERIES = 500
"""The most queries in a sample; shares are then within 2 points."""

TARGETS = 2_000
"""The most targets in a sample."""


@dataclass(frozen=True)
class Chance:
    """The figures of hubness to expect if queries found targets at random."""

    skewness: float
    most_found: float
    never_found: float

    @classmethod
    def of(cls, queries: int, k: int, targets: int) -> Chance:
        """Return the figures for queries that find `k` of the targets each."""
        return cls(
            skewness_by_chance(queries, k, targets),
            share_of_most_found_by_chance(queries, k, targets),
            never_found_by_chance(queries, k, targets),
        )


@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """The result of `diagnose`.

    targets, queries: The number of targets and of queries.
    hubness: The hubness of the raw search, over all targets and queries.
    most_found: The share of all result places taken by the 1 % of targets found most
        often.
    chance: The same figures, as expected by chance.
    hubs: The targets found most often, and the number of queries that find each among
        their k nearest: raw, and corrected by a fit on the same queries.
    anti_hubs: Some targets that no query finds.
    findings: One finding for each cause that was looked for.
    trial: The changes under the default method, including R@1 if answers are known.
    lesson: The gain of a query map learned from the bank's answers; None if `learn` was
        False.
    shown: The field that contains the names of targets.
    """

    store: str | None
    targets: int
    queries: int
    hubness: Hubness
    most_found: float
    chance: Chance
    hubs: list[Hub]
    anti_hubs: list[str]
    findings: list[Finding]
    trial: Trial
    lesson: LearnedMap | None = None
    shown: str | None = None

    @property
    def causes(self) -> list[Finding]:
        """The findings of causes that are present."""
        return [finding for finding in self.findings if finding.found]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def hubby(self) -> bool:
        """True if the search is hubby beyond chance."""
        return self.hubness.skewness - self.chance.skewness >= HUBBY

    @property
    def is_sound(self) -> bool:
        """True if there is nothing to mend, and nothing to gain from a correction."""
        return not (
            self.hubby or self.causes or self.trial.objections or self.trial.helps
        )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> str:
        """The verdict in words: hubness, other causes, both or neither."""
        causes = ", ".join(finding.cause for finding in self.causes)
        if self.hubby and causes:
            return f"there is hubness, but fix something else first: {causes}"
        if self.hubby:
            return "there is hubness"
        if causes:
            return f"this is not hubness, but another cause: {causes}"
        return "there is no hubness, and no other cause was found"

    def page(self) -> Page:
        trial = self.trial
        headline = self.verdict
        if self.is_sound:
            headline += ": nothing needs to be done"
        elif not self.causes:
            headline += f"; the default correction would {trial.outlook()}"
        sections = [
            Section("Hubness", self._describe_hubness()),
            list_hubs(self.hubs, self.hubness.k, self.anti_hubs, self.shown),
            Section("Is it something else?", [*map(str, self.findings)]),
            show_trial(trial, "A correction would change", self.lesson),
        ]
        subject = (
            f"{self.targets:,} targets · {self.queries:,} queries · nothing was changed"
        )
        sign = 0 if self.hubby else 1
        if self.causes or (self.hubby and trial.objections):
            sign = -1
        return Page(headline, sign, subject, sections, self._next())

    def _next(self) -> list[Step]:
        """Return the next steps: against other causes, or else steps with a gain."""
        steps = [Step(each.says, text=each.advice) for each in self.causes]
        trial = self.trial
        if steps or trial.objections or self.is_sound:
            return steps
        gain = "only --answers can show whether more right answers come first"
        if trial.right is not None:
            gain = f"{points(trial.right.change)} points of R@1, held out"
        steps.append(Step(gain, job="apply"))
        if self.lesson is not None:
            learned = points(self.lesson.other.change)
            reason = f"{learned} points of R@1 over the raw search, held out"
            steps.append(Step(reason, job="apply", learn=True))
        elif trial.right is not None:
            reason = "measures the gain of a query map, which is learned from answers"
            steps.append(Step(reason, job="diagnose", learn=True))
        return steps

    def _describe_hubness(self) -> list[str]:
        """Return lines on the hubness of the raw search, in the words of a searcher."""
        hubness = self.hubness
        most = most_found(self.targets)
        even = hubness.k * self.queries / self.targets
        chance = self.chance
        return [
            f"{most:,} targets ({most / self.targets:.1%}) fill {self.most_found:.1%} of "
            f"the first {hubness.k} places; {chance.most_found:.1%} would be chance",
            f"the one that comes back most is found by {hubness.largest:,} queries; an "
            f"even share would be {even:.1f}",
            f"{hubness.anti_hub_share:.1%} are found by no query (chance "
            f"{chance.never_found:.1%}); skewness {hubness.skewness:.2f} (chance "
            f"{chance.skewness:.2f})",
        ]


def diagnose(
    targets: VectorLike | Store,
    bank: BankLike,
    *,
    metric: Metric | str | None = None,
    learn: bool | Bank = False,
    compute: Compute = Compute(),
    seed: int = 0,
    show: str | Naming | None = None,
) -> Diagnosis:
    """Measure the hubness of a gallery, and whether a correction would help.

    Nothing is changed.

    Args:
        targets: The gallery [n, d], or a store.
        bank: Example queries, as in `hubplugin.fit` or, for a store, in
            `hubplugin.apply`.
        metric: By default the metric of the store, or cosine for vectors.
        learn: Also estimate the gain of a query map (docs/learning.md). With True, the
            bank's answers or a store's recorded clicks teach the map; at least 50
            distinct pairs are needed. Or pass the pairs, as in `hubplugin.apply`.
        compute: Device, memory and progress.
        seed: The seed of the samples.
        show: The names of hubs: a field of the targets in a store, a file of texts by
            id (.txt, where line i belongs to the id i, or .json), or a function from
            ids (rows, if `targets` is not a store) to texts. By default a field that is
            plainly a title or text.

    Raises:
        InputError: An argument cannot be used.
    """
    if metric is None:
        metric = getattr(targets, "metric", Metric.COSINE)
    metric = Metric(metric)
    names = names_of(targets, show)  # raises for a missing file before any work
    examples = Bank.of(bank)
    if isinstance(targets, Store):
        learn = read_learn_for(targets, learn, "blend")
        examples = bank_for(targets, bank, learn is not False)
    else:
        learn = read_learn(learn, "blend", metric, targets)
    teachers = Teachers.read(examples, learn, metric, compute, targets)
    require_enough(len(teachers.bank.distinct))  # before the gallery is read
    teachers = teachers.against(targets)
    prepared = teachers.bank
    gallery = prepared.require_targets()
    count = gallery.rows
    queries = prepared.query_bank
    logger.info("diagnosing %d targets with %d queries", count, len(queries))
    nearest = find_targets(prepared, queries, "finding the hubs")
    occurrence = k_occurrence(nearest, count)
    findings = find_causes(prepared, nearest, seed)
    method = METHODS["blend"]()
    trial = judge_by(prepared, method.resolve(prepared), seed)
    found = {RAW: nearest}
    lesson = model = None
    if learn is not False:
        lesson = learn_query_map(method, teachers)
        model = lesson.model
    elif not trial.objections:
        model = method.fit(prepared)
    if model is not None:
        found[CORRECTED] = find_targets(prepared, queries, "searching corrected", model)

    def describe(rows: list[int]) -> tuple[list[Id], list[str]]:
        """Return the ids and names of the targets in `rows`."""
        ids = _ids_of(targets, original_rows(gallery)[rows])
        return ids, display_names(ids, names)

    query_names = [display_query(examples, row) for row in range(len(queries))]
    # Pairs are rows of the target bank, not of the gallery.
    right = prepared.clicks if prepared.pairs is None else None
    hubs, never = find_hubs(found, count, describe, query_names, right)
    k = min(OCCURRENCE, count)
    diagnosis = Diagnosis(
        store=getattr(targets, "url", None),
        targets=count,
        queries=len(queries),
        hubness=Hubness.of(occurrence, k),
        most_found=share_of_most_found(occurrence),
        chance=Chance.of(len(queries), k, count),
        hubs=hubs,
        anti_hubs=never,
        findings=findings,
        trial=trial,
        lesson=lesson,
        shown=getattr(names, "field", None),
    )
    logger.info("diagnosed")
    return diagnosis


def _ids_of(targets: object, rows: np.ndarray) -> list[Id]:
    """Return the ids in a store of the targets in `rows`. Vectors have rows as ids."""
    if not isinstance(targets, Scannable):
        return list(rows.tolist())
    wanted = set(rows.tolist())
    all_ids = (key for batch in targets.scan() for key in batch.ids)
    ids = {row: key for row, key in enumerate(all_ids) if row in wanted}
    return [ids[row] for row in rows.tolist()]


def find_causes(bank: PreparedBank, nearest: np.ndarray, seed: int) -> list[Finding]:
    """Return a finding for each possible cause of bad searches, present or not.

    Args:
        bank: The queries and the gallery.
        nearest: The rows of the gallery that each query finds, best first [m, k].
        seed: The seed of the samples.
    """
    rng = np.random.default_rng(seed)
    compute = bank.compute.without_progress
    gallery = bank.require_targets()
    drawn = np.sort(rng.permutation(len(nearest))[:QUERIES])
    targets = draw_sample(gallery, TARGETS, bank.metric, rng)
    rows, place = np.unique(nearest[drawn], return_inverse=True)
    found = take_rows(gallery, rows, bank.metric)[place.reshape(-1, nearest.shape[1])]
    queries = bank.query_bank[drawn]
    return [
        check_model(queries, targets, bank.metric, compute, rng),
        check_shift(queries, targets),
        check_copies(found, targets),
        check_lengths(found, targets, bank.metric),
    ]
