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
from hubplugin.jobs.naming import Naming, call_query, display_names, names_of
from hubplugin.jobs.results import show_lesson, show_trial
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
from hubplugin.methods import METHODS
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.results import (
    CORRECTED,
    DIRECTIONS,
    Hub,
    Misled,
    Page,
    Result,
    Section,
    Step,
    list_hubs,
    percent,
    points,
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
        notes = list(trial.notes)
        searches = ["raw"]
        if self.hubs and CORRECTED in self.hubs[0].found_by:
            searches.append(CORRECTED)
        sections = [
            Section("What was seen", rows_of(*self._seen())),
            list_hubs(self.hubs, searches, self.hubness.k, self.anti_hubs, self.shown),
            Section("Is it something else?", [each.row() for each in self.findings]),
            show_trial(trial, "A correction would change"),
        ]
        if self.lesson is not None:
            sections.append(show_lesson(self.lesson))
        sections.append(Section("Worth knowing", rows_of(*notes)))
        scene = f"{self.targets:,} targets · {self.queries:,} queries"
        scene += " · nothing was changed"
        sign = 0 if self.hubby else 1
        if self.causes or (self.hubby and trial.helps is False):
            sign = -1
        return Page(headline, DIRECTIONS[sign], scene, sections, self._next())

    def _next(self) -> list[Step]:
        """Return what to do: first what is wrong besides, then what would gain."""
        steps = [Step(each.says, text=each.advice) for each in self.causes]
        if self.trial.objections or steps or not (self.hubby or self.helps):
            return steps
        gain = "whether more right answers come first is not known without --answers"
        if self.trial.right is not None:
            gain = f"{points(self.trial.right.change)} points of R@1, held out"
        steps.append(Step(gain, "apply"))
        if self.lesson is not None:
            learned = points(self.lesson.other.change)
            brings = f"{learned} points over the offsets alone, held out"
            steps.append(Step(brings, "apply", ["learn"]))
        elif self.trial.right is not None:
            brings = "measures what a map of the query would bring, which answers teach"
            steps.append(Step(brings, "diagnose", ["learn"]))
        return steps

    def _seen(self) -> list[str]:
        """Return what was seen, in the words of whoever searches."""
        k = self.hubness.k
        most = most_found(self.targets)
        usual = k * self.queries / self.targets
        return [
            f"{most:,} targets ({percent(most / self.targets)}) fill {percent(self.most_found.share)} of the first {k} "
            f"places; {percent(self.most_found.by_chance)} would be chance",
            f"the one that comes back most is found by {self.hubness.largest:,} queries; an even share would be "
            f"{usual:.1f}",
            f"{percent(self.never_found.share)} are found by no query (chance {percent(self.never_found.by_chance)}); "
            f"skewness {self.hubness.skewness:.2f} (chance {self.chance:.2f})",
        ]


def diagnose(
    targets: VectorLike | Store,
    bank: BankLike,
    *,
    metric: Metric | str | None = None,
    learn: bool = False,
    compute: Compute = Compute(),
    seed: int = 0,
    show: str | Naming | None = None,
) -> Diagnosis:
    """Say how hubby a gallery is for some queries, and whether these queries as a bank would mend it.

    Nothing is changed.

    Args:
        targets: [n, d], or a store.
        bank: example queries, as for `hubplugin.fit` or, with a store, for `hubplugin.apply`.
        metric: by default the metric of the store, else cosine.
        learn: also say what a query map would gain (docs/learning.md). The answers of the bank teach it, or the
            recorded clicks of a store; it needs at least 50 distinct pairs.
        compute: device, memory and progress.
        seed: the seed of the samples.
        show: what hubs are called by: a field of the targets in a store, a file of texts
            by id (.txt, where line i belongs to the id i, or .json), or a function from ids
            (rows where `targets` is no store) to texts. By default a field that is plainly
            a title or text.

    Raises:
        InputError: an argument cannot be used.
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
    default = METHODS["blend"]()
    trial = judge_by(prepared, default.resolve(prepared), seed)
    lesson = learn_query_map(default, Teachers(prepared)) if learn else None
    model = None
    if lesson is not None:
        model = lesson.model
    elif not trial.objections:
        model = default.fit(prepared)
    named = names_of(targets, show)
    hubs = _find_hubs(targets, prepared, examples, nearest, model, named)
    logger.info("diagnosed")
    never = pick_evenly(np.flatnonzero(occurrence == 0), LISTED)
    never_ids = _ids_of(targets, original_rows(gallery)[never])
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
        hubs=hubs,
        anti_hubs=display_names(never_ids, named),
        findings=causes,
        trial=trial,
        occurrences=count_targets(occurrence),
        lesson=lesson,
        shown=getattr(named, "field", None),
    )


MISLED = 3
"""Queries that a hub is shown with."""


def _find_hubs(
    targets: object,
    bank: PreparedBank,
    asked: Bank,
    nearest: np.ndarray,
    model: OffsetModel | None,
    names: Naming | None,
) -> list[Hub]:
    """Return the targets found most often, with queries for which they come first.

    Args:
        targets: The store, or vectors.
        bank: The queries and the gallery.
        asked: The bank as it was given, with the texts of the queries.
        nearest: The rows that each query finds, best first, [m, k].
        model: The correction; None if the guard objects to it, so hubs have no `misled`.
        names: What targets are called.
    """
    gallery = bank.require_targets()
    lists = {"raw": nearest}
    if model is not None:
        lists[CORRECTED] = _search_corrected(bank, model)
    counts = {label: k_occurrence(rows, gallery.rows) for label, rows in lists.items()}
    most = np.concatenate([hubs(each, LISTED) for each in counts.values()])
    rows = [*dict.fromkeys(most.tolist())]
    first = nearest[:, 0]
    after = lists.get(CORRECTED, nearest)[:, 0]
    right = bank.clicks if bank.pairs is None else None
    misled = {row: _pick_misled(row, first, after, right) for row in rows}
    places = [place for places in misled.values() for place in places]
    shown = [*dict.fromkeys([*rows, *after[places].tolist()])]
    ids = _ids_of(targets, original_rows(gallery)[shown])
    id_of = dict(zip(shown, ids, strict=True))
    name_of = dict(zip(shown, display_names(ids, names), strict=True))

    def tell(place: int) -> Misled:
        found = int(after[place])
        is_right = None if right is None else bool(right[place] == found)
        name = name_of[found].removesuffix(f" [{id_of[found]}]")
        return Misled(call_query(asked, place), name, is_right)

    return [
        Hub(
            id_of[row],
            name_of[row],
            {label: int(each[row]) for label, each in counts.items()},
            [tell(place) for place in misled[row]] if model is not None else [],
        )
        for row in rows
    ]


def _pick_misled(
    hub: int, first: np.ndarray, after: np.ndarray, right: np.ndarray | None
) -> list[int]:
    """Return up to `MISLED` queries for which the target in row `hub` comes first.

    Queries that a correction answers rightly come before those that it only changes. A
    query whose right answer is the hub is not misled; without known answers, only
    queries that a correction changes are.

    Args:
        hub: The row of the target.
        first, after: The row that each query finds first, raw and corrected [m].
        right: The row of the right answer to each query, -1 if unknown [m].
    """
    is_misled = (first == hub) & (after != hub)
    rank = np.where(after != hub, 1, 2)
    if right is not None:
        is_misled = (first == hub) & (right >= 0) & (right != hub)
        rank[after == right] = 0
    order = np.argsort(rank, kind="stable")
    return list(order[is_misled[order]][:MISLED].tolist())


def _search_corrected(bank: PreparedBank, model: OffsetModel) -> np.ndarray:
    """Return the rows that bank queries find under `model`, best first: [m, k]."""
    gallery = bank.require_targets()
    offsets = model.fitted
    if offsets is None or len(offsets) != gallery.rows:
        offsets = model.offsets(gallery, compute=bank.compute.without_progress)
    queries = bank.query_bank
    if model.query_map is not None:
        queries = model.query_map(queries)
    top = TopK(OCCURRENCE)
    search(
        queries,
        gallery,
        bank.metric,
        bank.compute,
        top,
        offsets=offsets[None],
        label="searching corrected",
    )
    corrected: np.ndarray = top.rows[0]
    return corrected


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
    place = place.reshape(-1, nearest.shape[1])
    vectors = take_rows(gallery, rows, bank.metric)
    queries = bank.query_bank[drawn]
    # Half the mean squared distance between two targets.
    variance = float(targets.var(axis=0, dtype=np.float64).sum())
    found = np.linalg.norm(vectors, axis=1)[place.reshape(-1)]
    lengths = np.linalg.norm(targets, axis=1)
    return [
        check_model(queries, targets, bank.metric, compute, rng),
        check_shift(queries, targets),
        check_copies(place, vectors, variance),
        check_lengths(found, lengths, bank.metric),
    ]
