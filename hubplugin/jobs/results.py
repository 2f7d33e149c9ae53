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
from hubplugin.validation import OCCURRENCE, Figures


@dataclass
class InvalidVectors:
    """The targets that a model could not judge.

    count: The number of such targets.
    named: The fault of the first few vectors, by id.
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
        if self.count > len(self.named):
            which += f" and {self.count - len(self.named)} more"
        return (
            f"{self.count} with vectors that the model cannot judge, those of length 0 "
            f"have the offset 0, others its smallest: {which}"
        )


def doubt_clicks(asked: Side | None, other: Side | None) -> str:
    """Return a warning if clicks of queries `asked` before look wrong, else ""."""
    if not asked or not other or not look_like_wrong_clicks(asked, other):
        return ""
    return (
        f" Asked before are {asked.queries:,} {asked.what}, right for "
        f"{asked.before:.1%} while the rest is right for {other.before:.1%}: "
        "they look like wrong clicks, and say little."
    )


def measure_hubness(*sides: Figures) -> Measures:
    """Return the measures of hubness, with one value for each of `sides`."""
    return {
        WORST: [side.largest for side in sides],
        NEVER: [side.never for side in sides],
        SKEWNESS: [side.skewness for side in sides],
    }


ASKED_BEFORE = "asked before (R@1)"


def show_trial(trial: Trial, title: str) -> Section:
    """Return the section `title` with the measurements of the guard's `trial`."""
    recall = {RECALL: trial.right, ASKED_BEFORE: trial.asked}
    measures = {**recall, **measure_hubness(trial.raw, trial)}
    note = f"{trial.queries:,} held-out bank queries; {trial.name}; {trial.bank}."
    note += doubt_clicks(trial.asked, trial.right)
    chart = {RAW: trial.raw.occurrences, CORRECTED: trial.occurrences}
    return compare(title, measures, chart=chart, note=note)


def show_lesson(lesson: LearnedMap) -> Section:
    """Return the section that shows the gain of a query map over the raw search."""
    title = "A map of the query would change"
    measures = {"not asked before (R@1)": lesson.other, ASKED_BEFORE: lesson.asked}
    columns = ("", RAW, "learned", COMPARED[3])
    note = ". ".join([*lesson.notes, ""])
    return compare(title, measures, columns=columns, note=note)


@dataclass(frozen=True, repr=False)
class Applied(Result):
    """The result of `apply`, `refit`, `refresh` or `rollback`.

    model: The model.
    scanned: The number of targets that were compared with the model.
    missing, stale: The numbers of targets without an offset before, and of targets
        whose offset differed from the model's.
    written: False after a dry run, which only counts, or if there was nothing to mend.
    notes: The changes to the store, or the planned changes after a dry run. For a small
        bank that was not tried, also what to expect of it.
    trial: The guard's measurements; None if the guard was not asked.
    invalid_vectors: The targets whose vector the model cannot judge.
    search: Code for a corrected search, and a note on who maps the queries.
    sound: True if there was nothing to mend.
    versus: The comparison of the old and the new correction by `refit`.
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
        counts = f"{self.missing:,} had no offset and {self.stale:,} another one"
        counts = f"of {self.scanned:,} targets {counts}"
        lines = [counts, *self.notes, str(self.invalid_vectors)]
        sections = [Section("What was done", lines, note=_describe(self.model))]
        state = "active"
        outcome = f"{self.model.method}; {counts}"
        trial = self.trial
        if trial is not None:
            state = "applied"
            worst = (trial.raw.largest, trial.largest)
            changes = describe_changes(worst, trial.queries, trial.right)
            outcome = f"on held-out bank queries {changes}"
            notes = Section("Worth knowing", trial.notes)
            sections = [show_trial(trial, "On held-out queries"), notes, *sections]
        if self.versus is not None:
            sections.insert(0, show_versus(self.versus))
        if self.sound:
            state = "nothing to mend, and nothing was written"
        elif not self.written:
            state = "nothing was written"
        return Page(f"{state}; {outcome}", 1, "", sections, [*self._next()])

    def _next(self) -> Iterator[Step]:
        """Yield the steps after a correction: search, inspect it, remove it."""
        if not self.written:
            return
        code, mapping = self.search
        maps = "" if self.model.query_map is None else f"; {mapping}"
        if code:
            yield Step(f"searches corrected{maps}", text=code)
        yield Step("says whether it is whole, and still helps", "inspect")
        yield Step("takes it out, as if it had never been there", "remove")


def show_versus(versus: OldVersusNew) -> Section:
    """Return the section that compares the raw, the old and the new search."""
    sides = (versus.raw, versus.old, versus.new)
    measures = {RECALL: [side.recall for side in sides], **measure_hubness(*sides)}
    note = f"From the old correction to the new one {versus.figures}."
    return compare("Old and new", measures, columns=("", RAW, "old", "new"), note=note)


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
        lines = []
        if self.correction is not None:
            lines.append(_describe(self.correction.model))
        headline = "there is no correction"
        steps = []
        if self.written:
            headline = "correction removed; searches are raw again"
        elif lines:
            headline = "nothing was changed"
            steps.append(Step("takes it out", "remove"))
        return Page(headline, 0, "", [Section("The correction", lines)], steps)


WRONG = 0.05
"""The tolerated share of targets whose offset is missing or stale.

At this share a tenth of the correction's gain is lost, up to 0.8 points of R@1
(benchmarks/keeping.py)."""

DRIFTED = 0.57
"""The tolerated own share of live queries and bank; above it their kinds differ.

Queries of one kind have 0.44 to 0.53, and other wordings have 0.60 or more
(benchmarks/keeping.py)."""

TOLERATED_SKEWNESS = 1.2
"""The tolerated ratio of corrected to raw skewness, each less the skewness by chance.

Banks of queries to this gallery reach up to 1.12 if raw hubness is small; banks that
cost more than 8 points of R@1 reach 2.8 to 5.4 (benchmarks/keeping.py)."""

TOLERATED_RISE = 4.0
"""The tolerated ratio of a target's share of the queries to the worst hub's at the fit.

If the share at the fit is large, the limit is halfway from it to 100 % instead."""


@dataclass(frozen=True)
class HubnessNow:
    """The skewness of the 10-occurrence in the store's present searches.

    queries: The number of queries that were searched for.
    live: True if these are live queries, False if they come from the bank.
    raw, corrected, chance: The skewness raw, corrected and by chance.
    fit: The counts at the fit; None if nothing was counted.
    hubs: The targets found most often, raw or corrected.
    occurrences: How many targets have the 10-occurrence N, by N, for either search.
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
        if raw > self.chance and corrected > TOLERATED_SKEWNESS * raw:
            figures = f"{self.corrected:.2f}, raw {self.raw:.2f}"
            yield Step(f"hubness is worse than raw ({figures})", "refit")
        if self.fit is None:
            return
        at_fit = self.fit.largest
        tolerated = min(TOLERATED_RISE * at_fit, (1 + at_fit) / 2)
        found_too_often = []
        for hub in self.hubs:
            share = hub.found_by[CORRECTED] / self.queries
            if share > tolerated:
                found_too_often.append(f"{hub.id!r} {share:.1%}")
        if found_too_often:
            named = ", ".join(found_too_often[:NAMED])
            says = f"found too often ({at_fit:.1%} at most at the fit): {named}"
            yield Step(says, "refresh")

    def sections(self, field: str | None) -> list[Section]:
        """Return two sections: hubness at the fit and now, and the hubs.

        `field` has the names of the targets.
        """
        measures = {f"{SKEWNESS} now": [self.raw, self.corrected]}
        if self.fit is not None:
            measures[f"{SKEWNESS} at the fit"] = [self.fit.raw, self.fit.corrected]
        kind = "live" if self.live else "bank"
        note = f"{self.queries} {kind} queries; by chance {self.chance:.2f}."
        hubness = compare("Hubness", measures, chart=self.occurrences, note=note)
        return [hubness, list_hubs(self.hubs, OCCURRENCE, field=field)]


def _describe(model: OffsetModel) -> str:
    """Describe a model in one sentence, for a note."""
    method = describe_method(model.method, model.parameters)
    parts = [f"{method}, from {len(model.terms[0].bank):,} queries"]
    if model.query_map is not None:
        parts.append(str(model.query_map))
    if model.gallery is not None:
        ends = f"{model.gallery.smallest:+.4f} to {model.gallery.largest:+.4f}"
        parts.append(f"offsets {ends}, deviation {model.gallery.deviation:.4f}")
    parts.append(f"fingerprint {model.fingerprint}, bank {model.bank_fingerprint}")
    return f"{'; '.join(parts)}."


@dataclass(frozen=True, repr=False)
class Inspection(Result):
    """The result of `inspect`.

    count: The number of targets.
    correction: The correction in the store, if any.
    previous: The model that was active before, if any; `rollback` writes it.
    missing: The number of targets without an offset.
    stale: The number of targets whose offset no longer fits their vector.
    foreign: The number of targets with something else in place of an offset.
    missing_ids, stale_ids: Some ids of such targets.
    invalid_vectors: The targets whose vector the model cannot judge.
    hubness: The hubness of present searches; None if no queries were searched for.
    drift: The own share of live queries and bank: 0.5 if they are of one kind, 1 if
        they have nothing in common. None without enough live queries.
    notes: Facts about the correction, from the store.
    warnings: Warnings from the store.
    attention: The warnings and all other problems, each with what to do about it. The
        exit status is 4 if there are any.
    shown: The field that has the names of targets.
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
        return [*map(str, self._reasons())]

    def _reasons(self) -> Iterator[Step]:
        yield from map(Step, self.warnings)
        if self.correction is None:
            yield Step("no correction, and searches are raw", "apply")
            return
        if not self.correction.active:
            yield Step("the correction is half-written, and searches are raw", "apply")
            return
        wrong = self.missing + self.stale
        if not self.count:
            yield Step("no target is left in the store")
        if wrong > WRONG * self.count:
            yield Step(
                f"{wrong / self.count:.0%} of the targets lack their offset", "refresh"
            )
        if self.foreign:
            yield Step(
                f"{self.foreign} targets carry something else in the place of offsets",
                "refresh",
            )
        if self.drift is not None and self.drift > DRIFTED:
            yield Step(
                f"live queries are no longer like the bank ({self.drift:.2f})", "refit"
            )
        if self.hubness is not None:
            yield from self.hubness.attention()

    def page(self) -> Page:
        steps = [*self._reasons()]
        sign = -1 if steps else 1
        wrong = self.missing + self.stale
        if wrong and not steps:
            says = f"{wrong:,} of {self.count:,} targets lack their offset"
            steps.append(Step(says, "refresh"))
        headline = "; ".join(step.brings for step in steps) or "everything is in order"
        sections = [] if self.hubness is None else self.hubness.sections(self.shown)
        if self.correction is not None:
            note = f"{_describe(self.correction.model)} Made {self.correction.made}."
            if self.previous is not None:
                note += f" Before: {_describe(self.previous)}"
            sections.append(Section("The correction", [*self._facts()], note=note))
        scene = f"{self.count:,} targets, {self.dim} dimensions, {self.metric.value}"
        return Page(headline, sign, scene, sections, [s for s in steps if s.job])

    def _facts(self) -> Iterator[str]:
        yield f"{self.missing} targets without an offset, {self.stale} with an outdated one"
        yield from self.notes
        for kind, ids in (("missing", self.missing_ids), ("stale", self.stale_ids)):
            if ids:
                yield f"{kind}, for instance: {', '.join(map(repr, ids))}"
        yield str(self.invalid_vectors)
        if self.drift is not None:
            yield f"drift of live queries: {self.drift:.2f} (0.5: as the bank; 1: apart)"
