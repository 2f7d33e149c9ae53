"""`diagnose`: find what is wrong with a search, and whether a correction would help.

Samples of the found targets and of the gallery tell the causes apart.
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
from hubplugin.compute import Compute
from hubplugin.guard import Trial, judge_by
from hubplugin.jobs.correct import bank_for, read_learn_for
from hubplugin.jobs.hubs import find_hubs, find_targets
from hubplugin.jobs.naming import Naming, call_query, display_names, names_of
from hubplugin.jobs.results import show_lesson, show_trial
from hubplugin.learning import LearnedMap, Teachers, learn_query_map, read_learn
from hubplugin.measures.hubness import (
    Hubness,
    anti_hub_share,
    count_targets,
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

QUERIES, TARGETS = 500, 2_000
"""The most queries and targets in a sample; shares are then within 2 points."""


@dataclass(frozen=True)
class ShareAndChance:
    """A share from 0 to 1, and its value without hubness."""

    share: float
    by_chance: float


@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """The result of `diagnose`.

    targets, queries: The number of targets and of queries.
    hubness: The hubness of the raw search, over all targets and queries.
    most_found: The share of all places that the most found 1 % of the targets take.
    never_found: The share of the targets that no query finds.
    hubs: The targets found most often, and the number of queries that find each among
        their k nearest: raw, and corrected by a fit on these very queries.
    anti_hubs: Some targets that no query finds.
    findings: One finding for each cause that was looked for.
    trial: The changes under the default method, including R@1 if answers are known.
    occurrences: The number of targets with the k-occurrence N, by N.
    lesson: The gain of a query map learned from the bank's answers; None if that was
        not asked for.
    shown: The field that has the names of targets.
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
    shown: str | None = None

    @property
    def helps(self) -> bool | None:
        """True if R@1 would rise beyond chance and the guard passes.

        None without known answers.
        """
        return self.trial.helps

    @property
    def causes(self) -> list[Finding]:
        """The findings of causes that are present."""
        return [finding for finding in self.findings if finding.found]

    @property
    def chance(self) -> float:
        """The skewness by chance for this number of queries and targets."""
        return skewness_by_chance(self.queries, self.hubness.k, self.targets)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def hubby(self) -> bool:
        """True if the search is hubby beyond chance."""
        return self.hubness.skewness - self.chance >= HUBBY

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> str:
        """The verdict in words: hubness, other causes, both or neither."""
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
        headline = self.verdict
        if not self.causes:
            headline += f"; the default correction would {trial.outlook()}"
        lesson = [] if self.lesson is None else [show_lesson(self.lesson)]
        sections = [
            Section("What was seen", self._seen()),
            list_hubs(self.hubs, self.hubness.k, self.anti_hubs, self.shown),
            Section("Is it something else?", [*map(str, self.findings)]),
            show_trial(trial, "A correction would change"),
            *lesson,
            Section("Worth knowing", trial.notes),
        ]
        scene = (
            f"{self.targets:,} targets · {self.queries:,} queries · nothing was changed"
        )
        sign = 0 if self.hubby else 1
        if self.causes or (self.hubby and trial.helps is False):
            sign = -1
        return Page(headline, sign, scene, sections, self._next())

    def _next(self) -> list[Step]:
        """Return the next steps: first against other causes, then those with a gain."""
        steps = [Step(each.says, text=each.advice) for each in self.causes]
        trial = self.trial
        if trial.objections or steps or not (self.hubby or trial.helps):
            return steps
        gain = "whether more right answers come first is not known without --answers"
        if trial.right is not None:
            gain = f"{points(trial.right.change)} points of R@1, held out"
        steps.append(Step(gain, "apply"))
        if self.lesson is not None:
            learned = points(self.lesson.other.change)
            brings = f"{learned} points of R@1 with a map of the query, held out"
            steps.append(Step(brings, "apply", learn=True))
        elif trial.right is not None:
            brings = "measures what a map of the query would bring, which answers teach"
            steps.append(Step(brings, "diagnose", learn=True))
        return steps

    def _seen(self) -> list[str]:
        """Return lines on the hubness that was seen, in the words of a searcher."""
        k = self.hubness.k
        most = most_found(self.targets)
        usual = k * self.queries / self.targets
        filled = self.most_found
        never = self.never_found
        return [
            f"{most:,} targets ({most / self.targets:.1%}) fill {filled.share:.1%} of the "
            f"first {k} places; {filled.by_chance:.1%} would be chance",
            f"the one that comes back most is found by {self.hubness.largest:,} queries; an "
            f"even share would be {usual:.1f}",
            f"{never.share:.1%} are found by no query (chance {never.by_chance:.1%}); "
            f"skewness {self.hubness.skewness:.2f} (chance {self.chance:.2f})",
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
    """Say how hubby a gallery is for some queries, and whether a correction would help.

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
    chosen = Metric.parse(metric)
    examples = Bank.of(bank)
    store = None
    if isinstance(targets, Store):
        store = targets
        learn = read_learn_for(targets, learn, "blend")
        examples = bank_for(targets, bank, learn is not False)
    else:
        learn = read_learn(learn, "blend", chosen, targets)
    teachers = Teachers.read(examples, learn, chosen, compute, targets)
    require_enough(len(teachers.bank.distinct))  # before the gallery is read
    teachers = teachers.against(targets)
    prepared = teachers.bank
    gallery = prepared.require_targets()
    count = gallery.rows
    asked = prepared.query_bank
    queries = len(asked)
    logger.info("diagnosing %d targets by %d queries", count, queries)
    nearest = find_targets(prepared, asked, "finding the hubs")
    occurrence = k_occurrence(nearest, count)
    findings = find_causes(prepared, nearest, seed)
    default = METHODS["blend"]()
    trial = judge_by(prepared, default.resolve(prepared), seed)
    found = {RAW: nearest}
    lesson = model = None
    if learn is not False:
        lesson = learn_query_map(default, teachers)
        model = lesson.model
    elif not trial.objections:
        model = default.fit(prepared)
    if model is not None:
        label = "searching corrected"
        found[CORRECTED] = find_targets(prepared, asked, label, model)
    names = names_of(targets, show)

    def describe(rows: list[int]) -> tuple[list[Id], list[str]]:
        ids = _ids_of(targets, original_rows(gallery)[rows])
        return ids, display_names(ids, names)

    called = [call_query(examples, row) for row in range(queries)]
    right = prepared.clicks if prepared.pairs is None else None
    hubs, never = find_hubs(found, count, describe, called, right)
    k = min(OCCURRENCE, count)
    most = share_of_most_found_by_chance(queries, k, count)
    diagnosis = Diagnosis(
        store=None if store is None else store.url,
        targets=count,
        queries=queries,
        hubness=Hubness.of(occurrence, k),
        most_found=ShareAndChance(share_of_most_found(occurrence), most),
        never_found=ShareAndChance(
            anti_hub_share(occurrence), never_found_by_chance(queries, k, count)
        ),
        hubs=hubs,
        anti_hubs=never,
        findings=findings,
        trial=trial,
        occurrences=count_targets(occurrence),
        lesson=lesson,
        shown=getattr(names, "field", None),
    )
    logger.info("diagnosed")
    return diagnosis


def _ids_of(targets: object, rows: np.ndarray) -> list[Id]:
    """Return the ids in a store of the targets in `rows`; for vectors, the rows."""
    if not isinstance(targets, Scannable):
        return list(rows.tolist())
    wanted = set(rows.tolist())
    every = (key for batch in targets.scan() for key in batch.ids)
    ids = {row: key for row, key in enumerate(every) if row in wanted}
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
