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
"""Queries and targets that are looked at, drawn at random: shares come out to within 2 points."""


@dataclass(frozen=True)
class ShareAndChance:
    """A share from 0 to 1, and what it would be without hubness."""

    share: float
    by_chance: float


@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """The result of `diagnose`.

    targets, queries: How many there are.
    hubness: Hubness of the raw search, over all targets and queries.
    most_found: The share of all places that the most found 1 % of the targets take.
    never_found: The share of the targets that no query finds.
    hubs: The targets found most often, and how many queries find each among their k
        nearest: raw, and corrected by a fit on these very queries.
    anti_hubs: Some targets that no query finds.
    findings: The causes looked for.
    trial: What the default method would change, R@1 included if answers are known.
    occurrences: How many targets have the k-occurrence N, by N.
    lesson: What the answers of the bank would teach beside the default; None if that was
        not asked.
    shown: The field that targets are called by.
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
        """Return what to do: first what is wrong besides, then what would gain."""
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
            brings = f"{learned} points over the offsets alone, held out"
            steps.append(Step(brings, "apply", learn=True))
        elif trial.right is not None:
            brings = "measures what a map of the query would bring, which answers teach"
            steps.append(Step(brings, "diagnose", learn=True))
        return steps

    def _seen(self) -> list[str]:
        """Return what was seen, in the words of whoever searches."""
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
        targets: [n, d], or a store.
        bank: example queries, as for `hubplugin.fit` or, with a store, for
            `hubplugin.apply`.
        metric: by default the metric of the store, else cosine.
        learn: also say what a query map would gain (docs/learning.md). With True the
            answers of the bank teach it, or the recorded clicks of a store; it needs at
            least 50 distinct pairs. Or the pairs that teach, as in `hubplugin.apply`.
        compute: device, memory and progress.
        seed: the seed of the samples.
        show: what hubs are called by: a field of the targets in a store, a file of texts
            by id (.txt, where line i belongs to the id i, or .json), or a function from
            ids (rows where `targets` is no store) to texts. By default a field that is
            plainly a title or text.

    Raises:
        InputError: an argument cannot be used.
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
    """Return the ids of the targets in `rows`: those in a store, else the rows."""
    if not isinstance(targets, Scannable):
        return list(rows.tolist())
    wanted = set(rows.tolist())
    every = (key for batch in targets.scan() for key in batch.ids)
    ids = {row: key for row, key in enumerate(every) if row in wanted}
    return [ids[row] for row in rows.tolist()]


def find_causes(bank: PreparedBank, nearest: np.ndarray, seed: int) -> list[Finding]:
    """Return a finding for each cause of bad searches, whether it is there or not.

    Args:
        bank: The queries and the gallery.
        nearest: The rows that each query finds in the gallery, best first, [m, k].
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
