"""The results of the jobs on a store.

`--json` prints their fields, and of a model its facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import computed_field

from hubplugin.guard import Trial, look_like_wrong_clicks
from hubplugin.jobs.versus import OldVersusNew
from hubplugin.learning import LearnedMap
from hubplugin.measures.significance import Side
from hubplugin.metric import Metric
from hubplugin.model import HubnessAtFit, OffsetModel, describe_method
from hubplugin.results import (
    COMPARED,
    CORRECTED,
    NAMED,
    NEVER,
    RAW,
    RECALL,
    SKEWNESS,
    WORST,
    Hub,
    Measures,
    Page,
    Result,
    Section,
    Step,
    compare,
    describe_changes,
    list_hubs,
)
from hubplugin.store import Correction, Id
from hubplugin.validation import OCCURRENCE


@dataclass
class InvalidVectors:
    """The targets that a model could not judge.

    count: The number of such targets.
    named: The fault of each vector, by id, for the first few targets.
    """

    count: int = 0
    named: dict[int | str, str] = field(default_factory=dict)

    def note(
        self, ids: Sequence[int | str], lengths: np.ndarray, rows: np.ndarray
    ) -> None:
        """Count the targets in `rows` of a batch, and name the first few.

        Args:
            ids: The ids of the batch [b].
            lengths: The lengths of its vectors [b].
            rows: The rows of the targets that cannot be judged.
        """
        self.count += len(rows)
        for row in rows[: NAMED - len(self.named)].tolist():
            length = lengths[row]
            reason = f"length {length:.4g}" if np.isfinite(length) else "not finite"
            self.named[ids[row]] = reason

    def __str__(self) -> str:
        if not self.count:
            return ""
        which = ", ".join(f"{name} ({reason})" for name, reason in self.named.items())
        return (
            f"the model cannot judge {self.count} vectors: zero vectors have the offset "
            f"0, others its smallest offset: {which}"
        )


def doubt_clicks(asked: Side | None, other: Side | None) -> str:
    """Return a warning if clicks look wrong, else "".

    Args:
        asked: R@1 of queries that ask again for the target of another query.
        other: R@1 of the other queries.
    """
    if not asked or not other or not look_like_wrong_clicks(asked, other):
        return ""
    return (
        f" Of {asked.queries:,} {asked.what}, only {asked.before:.1%} find their target "
        f"first; of the other queries, {other.before:.1%} do. Their clicks look wrong, "
        "so they say little."
    )


def show_trial(trial: Trial, title: str, lesson: LearnedMap | None = None) -> Section:
    """Return the section `title` with the measurements of the guard's `trial`.

    If a `lesson` is given, the section also has what its query map, with the offsets
    for mapped queries, would gain over the raw search.
    """
    measures: Measures = {RECALL: trial.right, "asked before (R@1)": trial.asked}
    notes = trial.notes
    if lesson is not None:
        learned = {"R@1 with a map": lesson.other, "and asked before": lesson.asked}
        measures = {**measures, **learned}
        notes += tuple(lesson.notes)
    hubness = {
        WORST: (trial.raw.largest, trial.largest),
        NEVER: (trial.raw.never, trial.never),
        SKEWNESS: (trial.raw.skewness, trial.skewness),
    }
    measures = {**measures, **hubness}
    note = f"{trial.queries:,} held-out bank queries; {trial.name}; {trial.bank}."
    note += doubt_clicks(trial.asked, trial.right)
    chart = {RAW: trial.raw.occurrences, CORRECTED: trial.occurrences}
    return Section(title, notes, compare(measures), COMPARED, chart, note)


@dataclass(frozen=True, repr=False)
class Applied(Result):
    """The result of `apply`, `refit`, `refresh` or `rollback`.

    model: The model.
    scanned: The number of targets that were compared with the model.
    missing, stale: The number of targets that had no offset, and the number whose
        offset differed from the model's.
    written: False after a dry run, which only counts targets, or if `sound` is True.
    notes: The changes to the store, or the planned changes after a dry run. If a
        correction was not tried, they also say what to expect of a small bank.
    trial: The guard's measurements; None if the guard did not run.
    invalid_vectors: The targets whose vector the model cannot judge.
    search: Code for a corrected search, and a note on who maps the queries.
    sound: True if there was no hubness to correct.
    versus: The comparison by `refit` of the old and the new correction.
    """

    store: str
    model: OffsetModel
    scanned: int
    missing: int
    stale: int
    written: bool = True
    notes: Sequence[str] = ()
    trial: Trial | None = None
    invalid_vectors: InvalidVectors = field(default_factory=InvalidVectors)
    search: tuple[str, str] = ("", "")
    sound: bool = False
    versus: OldVersusNew | None = None

    def page(self) -> Page:
        counts = (
            f"{self.missing:,} of {self.scanned:,} targets had no offset, and "
            f"{self.stale:,} had another one"
        )
        lines = [counts, *self.notes, str(self.invalid_vectors)]
        sign = 1
        if self.versus is not None:
            lines.insert(
                0, f"from the old correction to the new one {self.versus.figures}"
            )
            if self.versus.objection is not None:
                sign = -1  # the new correction was activated by force
        sections = [Section("What was done", lines, note=_describe(self.model))]
        trial = self.trial
        if trial is None:
            state = "active"
            outcome = f"{self.model.method}; {counts}"
        else:
            state = "applied"
            changes = describe_changes(
                (trial.raw.largest, trial.largest), trial.queries, trial.right
            )
            outcome = f"on held-out bank queries {changes}"
            sections = [show_trial(trial, "On held-out queries"), *sections]
        if self.sound:
            state = "no hubness to correct, so nothing was written"
        elif not self.written:
            state = "nothing was written"
        return Page(f"{state}; {outcome}", sign, "", sections, [*self._next()])

    def _next(self) -> Iterator[Step]:
        """Yield the steps after a correction: search with it, inspect it, remove it."""
        if not self.written:
            return
        code, mapping = self.search
        maps = "" if self.model.query_map is None else f"; {mapping}"
        if code:
            yield Step(f"searches corrected{maps}", text=code)
        yield Step("checks that it is complete, and still helps", job="inspect")
        yield Step("removes it, as if it had never been there", job="remove")


@dataclass(frozen=True, repr=False)
class Removed(Result):
    """The result of `remove`.

    correction: The correction; None if there was none, or if it cannot be read.
    written: False after a dry run, or if there was no correction.
    """

    store: str
    written: bool
    correction: Correction | None = None

    def page(self) -> Page:
        headline = "nothing was changed"
        if self.written:
            headline = "correction removed; searches are raw again"
        description = "there was none that can be read"
        if self.correction is not None:
            description = _describe(self.correction.model)
        return Page(headline, sections=[Section("The correction", [description])])


WRONG = 0.05
"""The tolerated share of targets whose offset is missing or stale.

At this share a tenth of the correction's gain is lost, up to 0.8 points of R@1
(benchmarks/keeping.py)."""

DRIFTED = 0.57
"""The tolerated own share of live queries and bank; above it, their kinds differ.

Queries of one kind have 0.44 to 0.53, and other wordings have 0.60 or more
(benchmarks/keeping.py)."""

TOLERATED_SKEWNESS = 1.2
"""The tolerated ratio of corrected to raw skewness, each less the skewness by chance.

Banks of queries to this gallery reach up to 1.12 if raw hubness is small; banks that
cost more than 8 points of R@1 reach 2.8 to 5.4 (benchmarks/keeping.py)."""

TOLERATED_RISE = 4.0
"""The tolerated ratio of a target's share of the queries to the worst hub's at the fit.

The limit is never more than halfway from the share at the fit to 100 %."""


@dataclass(frozen=True)
class HubnessNow:
    """The skewness of the 10-occurrence in the store's current searches.

    queries: The number of queries that were run.
    live: True if these are live queries, False if they come from the bank.
    raw, corrected, chance: The skewness of the raw and of the corrected search, and by
        chance.
    fit: The figures at the time of the fit; None if none were measured.
    hubs: The targets found most often, raw or corrected.
    occurrences: The number of targets with the 10-occurrence N, by N, for each search.
    """

    queries: int
    live: bool
    raw: float
    corrected: float
    chance: float
    fit: HubnessAtFit | None = None
    hubs: Sequence[Hub] = ()
    occurrences: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    def attention(self) -> Iterator[Step]:
        """Yield each problem, with the job that may solve it."""
        raw = self.raw - self.chance
        corrected = self.corrected - self.chance
        # Raw skewness of less than twice that by chance is too small for a ratio.
        if raw > self.chance and corrected > TOLERATED_SKEWNESS * raw:
            figures = f"{self.corrected:.2f}, raw {self.raw:.2f}"
            yield Step(f"hubness is worse than raw ({figures})", job="refit")
        if self.fit is None or not self.hubs:
            return
        at_fit = self.fit.largest
        tolerated = min(TOLERATED_RISE * at_fit, (1 + at_fit) / 2)
        worst = max(self.hubs, key=lambda hub: hub.found_by[CORRECTED])
        share = worst.found_by[CORRECTED] / self.queries
        if share > tolerated:
            yield Step(
                f"found too often ({at_fit:.1%} at most at the fit): {worst.name} "
                f"{share:.1%}",
                job="refresh",
            )

    def sections(self, field: str | None) -> list[Section]:
        """Return two sections: hubness at the fit and now, and the hubs.

        `field` has the names of the targets.
        """
        measures = {f"{SKEWNESS} now": (self.raw, self.corrected)}
        if self.fit is not None:
            measures[f"{SKEWNESS} at the fit"] = (self.fit.raw, self.fit.corrected)
        kind = "live" if self.live else "bank"
        note = f"{self.queries} {kind} queries; by chance {self.chance:.2f}."
        rows = compare(measures)
        columns = (RAW, CORRECTED, "")
        hubness = Section("Hubness", (), rows, columns, self.occurrences, note)
        return [hubness, list_hubs(self.hubs, OCCURRENCE, field=field)]


def _describe(model: OffsetModel) -> str:
    """Describe a model in one sentence, for a note."""
    method = describe_method(model.method, model.parameters)
    parts = [f"{method}, from {len(model.terms[0].bank):,} queries"]
    if model.query_map is not None:
        parts.append(str(model.query_map))
    parts.append(f"fingerprint {model.fingerprint}, bank {model.bank_fingerprint}")
    return f"{'; '.join(parts)}."


@dataclass(frozen=True, repr=False)
class Inspection(Result):
    """The result of `inspect`.

    count: The number of targets.
    correction: The correction in the store, if any.
    previous: The previously active model, if any; `rollback` restores it.
    missing: The number of targets without an offset.
    stale: The number of targets whose offset no longer matches their vector.
    foreign: The number of targets with something else in place of an offset.
    missing_ids, stale_ids: The ids of some of these targets.
    invalid_vectors: The targets whose vector the model cannot judge.
    hubness: The hubness of current searches; None if no queries were run.
    drift: The own share of live queries and bank: 0.5 if they are of the same kind, 1
        if they have nothing in common. None if there are too few live queries.
    notes: Facts about the correction, from the store.
    warnings: Warnings from the store.
    attention: The warnings and all other problems, each with what to do about it. The
        exit status is 4 if there are any.
    shown: The field that contains the names of targets.
    """

    store: str
    metric: Metric
    dim: int
    count: int
    correction: Correction | None
    previous: OffsetModel | None = None
    missing: int = 0
    stale: int = 0
    foreign: int = 0
    missing_ids: Sequence[Id] = ()
    stale_ids: Sequence[Id] = ()
    invalid_vectors: InvalidVectors = field(default_factory=InvalidVectors)
    hubness: HubnessNow | None = None
    drift: float | None = None
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    shown: str | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def attention(self) -> list[str]:
        """The problems, one line each, with what to do about them."""
        return [*map(str, self._problems())]

    def _problems(self) -> Iterator[Step]:
        """Yield the problems, each with the job that mends it."""
        yield from map(Step, self.warnings)
        if self.correction is None:
            yield Step("no correction, and searches are raw", job="apply")
            return
        if not self.correction.active:
            yield Step(
                "the correction is half-written, and searches are raw", job="apply"
            )
            return
        wrong = self.missing + self.stale
        if not self.count:
            yield Step("no target is left in the store")
        if wrong > WRONG * self.count:
            yield Step(
                f"{wrong / self.count:.0%} of the targets lack their offset",
                job="refresh",
            )
        if self.foreign:
            yield Step(
                f"{self.foreign} targets carry a foreign value in the place of "
                "their offset",
                job="refresh",
            )
        if self.drift is not None and self.drift > DRIFTED:
            yield Step(
                f"live queries are no longer like the bank ({self.drift:.2f})",
                job="refit",
            )
        if self.hubness is not None:
            yield from self.hubness.attention()

    def page(self) -> Page:
        steps = [*self._problems()]
        sign = 1
        wrong = self.missing + self.stale
        if steps:
            sign = -1
        elif wrong:
            # So few wrong offsets are worth a refresh, but the news stays good.
            reason = f"{wrong:,} of {self.count:,} targets lack their offset"
            steps.append(Step(reason, job="refresh"))
        headline = "; ".join(step.reason for step in steps) or "everything is in order"
        sections = [] if self.hubness is None else self.hubness.sections(self.shown)
        if self.correction is not None:
            note = f"{_describe(self.correction.model)} Made {self.correction.made}."
            if self.previous is not None:
                note += f" Before: {_describe(self.previous)}"
            sections.append(Section("The correction", [*self._facts()], note=note))
        subject = f"{self.count:,} targets, {self.dim} dimensions, {self.metric.value}"
        # Steps without a job are only in the headline.
        return Page(headline, sign, subject, sections, [s for s in steps if s.job])

    def _facts(self) -> Iterator[str]:
        """Yield the state of offsets, vectors and live queries, one line each."""
        yield f"{self.missing} targets without an offset, {self.stale} with a stale one"
        yield from self.notes
        for kind, ids in (("missing", self.missing_ids), ("stale", self.stale_ids)):
            if ids:
                yield f"{kind}, for instance: {', '.join(map(repr, ids))}"
        yield str(self.invalid_vectors)
        if self.drift is not None:
            yield (
                f"drift of live queries: {self.drift:.2f} (0.5: like the bank; 1: "
                "nothing in common)"
            )
