"""What the jobs on a store answer, and what people are shown of it.

The fields are what `--json` prints; of a model the facts stand there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from pydantic import computed_field

from hubplugin.guard import Trial
from hubplugin.methods import Method
from hubplugin.metric import Metric
from hubplugin.model import HubnessAtFit, OffsetModel, Value
from hubplugin.report import (
    NEVER,
    RECALL,
    WORST,
    Histogram,
    Hub,
    KeyFigure,
    Plot,
    Report,
    Result,
    describe_changes,
    plots,
    share_figure,
    sides_figure,
)
from hubplugin.store import Correction, Id
from hubplugin.validation import OCCURRENCE, Figures, Margins, change_of


def key_figures_of(trial: Trial) -> list[KeyFigure]:
    """What the guard saw on held-out queries of the bank."""
    raw = trial.raw
    held_out = (
        f"expected with the correction, on {trial.queries:,} held-out bank queries"
    )
    unknown = "the bank is no log with known answers, or asks for few targets in several wordings"
    return [
        share_figure(
            RECALL, raw.recall, trial.recall, more_is_better=True, change=trial.change, note=held_out,
            unknown="--answers says what queries ask for",
        ),
        share_figure(WORST, raw.largest, trial.largest, more_is_better=False, note=held_out),
        share_figure(NEVER, raw.never, trial.never, more_is_better=False, note=held_out),
        sides_figure("R@1 of what was asked before", [trial.asked], unknown),
    ]  # fmt: skip


NAMED = 10
"""How many targets of a kind are named, and how many of the groups that stay neutral."""


@dataclass
class InvalidVectors:
    """The targets that a model could not judge: how many, and what is wrong with the first of them, by id."""

    count: int = 0
    named: dict[int | str, str] = field(default_factory=dict)

    def note(
        self, ids: Sequence[int | str], vectors: np.ndarray, rows: np.ndarray
    ) -> None:
        self.count += len(rows)
        for row in rows[: NAMED - len(self.named)].tolist():
            length = float(np.linalg.norm(vectors[row].astype(np.float64)))
            self.named[ids[row]] = (
                f"length {length:.4g}" if np.isfinite(length) else "not finite"
            )

    def __str__(self) -> str:
        which = ", ".join(f"{name} ({reason})" for name, reason in self.named.items())
        more = (
            f" and {self.count - len(self.named)} more"
            if self.count > len(self.named)
            else ""
        )
        offsets = "those of length 0 have the offset 0, others its smallest"
        return f"{self.count} with vectors that the model cannot judge, {offsets}: {which}{more}"


@dataclass(frozen=True)
class Applied(Result):
    """What `apply`, `refresh` or `rollback` did: the model, and of `scanned` targets how many had no offset by it
    before, and how many a different one. written: false after a dry run, which only counted them. neutral: the groups
    that have the offset 0, and why. notes: what was done to the store or, after a dry run, would be, and what to expect
    of a small bank that was not tried. trial: what the guard saw before `apply`; None where it was not asked, or each
    group on its own. invalid_vectors: the targets whose vector cannot be judged.
    """

    store: str
    model: OffsetModel
    scanned: int
    missing: int
    stale: int
    written: bool = True
    neutral: Mapping[Value, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    trial: Trial | None = None
    invalid_vectors: InvalidVectors = field(default_factory=InvalidVectors)

    def report(self) -> Report:
        trial = self.trial
        lines = [
            f"{self.scanned} targets, of which {self.missing} had no offset and {self.stale} another one"
        ]
        if self.neutral:
            neutral = (
                f"{value!r}: {why}"
                for value, why in itertools.islice(self.neutral.items(), NAMED)
            )
            more = (
                f"; and {len(self.neutral) - NAMED} more"
                if len(self.neutral) > NAMED
                else ""
            )
            lines.append(f"kept at offset 0: {'; '.join(neutral)}{more}")
        lines += [str(self.invalid_vectors)] if self.invalid_vectors.count else []
        verdict = f"{'active' if self.written else 'nothing was written; would be active'}: {self.model}"
        details = list[str]()
        if trial is not None:
            lines += [f"note: {note}" for note in trial.notes]
            raw, objections = trial.raw, "; ".join(trial.objections)
            details = [
                f"tried on {trial.queries} held-out bank queries:",
                f"  {raw.figures()}",
                f"  {trial.figures()}",
                verdict,
                f"the guard would refuse it: {objections}"
                if objections
                else f"the guard lets it pass; {trial.bank}",
            ]
            worst = raw.largest, trial.largest, trial.queries
            outcome = describe_changes(*worst, raw.recall, trial.recall, trial.change)
            verdict = f"{'applied' if self.written else 'nothing was written'}; on held-out bank queries {outcome}"
        return Report(
            title="The correction",
            subtitle=str(self.model),
            verdict=verdict,
            direction="better",
            key_figures=[] if trial is None else key_figures_of(trial),
            sentences=[*lines, *self.notes],
            details=details,
            facts={"fingerprint": self.model.fingerprint},
        )


WORSE = 0.1
"""The rise of skewness, as a share of that of the raw ranking, from which a new correction is worse where nothing says
what the queries ask for. On eight galleries a bank of twice the size rises by 0.08 at most; every bank that rose by
more than 0.1 lost R@1, up to 2.4 points (benchmarks/keeping.py)."""


@dataclass(frozen=True)
class OldVersusNew:
    """The old and the new correction on held-out queries of the new bank: `old` and `new`; `raw` is no correction.

    gain, error: of R@1 of the new one over the old one, 0 to 1, and its standard error; None without known answers.
    """

    raw: Figures
    old: Figures
    new: Figures
    gain: float | None
    error: float | None

    @classmethod
    def of(cls, margins: Margins, old: OffsetModel, new: Method) -> OldVersusNew:
        """Compare `old` and `new` by the `margins` of no correction, the old and the new one."""
        change = change_of(margins, 1, 2)
        gain, error = (
            (None, None) if change is None else (change.change.value, change.error)
        )
        raw = Figures.of(margins, 0)
        before = Figures.of(margins, 1, old.method, old.parameters)
        after = Figures.of(margins, 2, new.name, new.parameters)
        return cls(raw, before, after, gain, error)

    @property
    def objection(self) -> str | None:
        """Why the new one is worse, with both figures; None if it is not."""
        if self.gain is not None and self.error is not None:
            worse = self.gain < -2 * self.error
        else:
            worse = self.new.skewness - self.old.skewness > WORSE * max(
                self.raw.skewness, 0.0
            )
        return self.figures if worse else None

    @property
    def figures(self) -> str:
        """From the old one to the new one: R@1, or hubness where no answers are known."""
        if self.old.recall is not None and self.new.recall is not None:
            return f"R@1 of held-out queries goes from {100 * self.old.recall:.1f} to {100 * self.new.recall:.1f}"
        return (
            f"hubness (skewness) of held-out queries goes from {self.old.skewness:.2f} to {self.new.skewness:.2f}, "
            f"where it is {self.raw.skewness:.2f} raw"
        )

    def __str__(self) -> str:
        figures = (
            f"{name}  {getattr(self, name).figures()}" for name in ("raw", "old", "new")
        )
        return "\n  ".join(["on held-out queries of the new bank:", *figures])


@dataclass(frozen=True)
class Refitted(Applied):
    """What `refit` did: as of `apply`, and old and new beside each other."""

    versus: OldVersusNew = field(kw_only=True)

    def report(self) -> Report:
        applied = super().report()
        comparison = f"from the old correction to the new one {self.versus.figures}"
        sentences, details = (
            [*applied.sentences, comparison],
            [*applied.details, str(self.versus)],
        )
        return replace(applied, sentences=sentences, details=details)


@dataclass(frozen=True)
class Removed(Result):
    """What `remove` took out: the correction, and the model that was active before, null where there was none or it
    cannot be read. written: false after a dry run, and where there was no correction."""

    store: str
    written: bool
    correction: Correction | None = None
    previous: OffsetModel | None = None

    def report(self) -> Report:
        sentence = "correction removed" if self.written else "there is no correction"
        if self.correction is not None and not self.written:
            sentence = f"nothing was changed; would take out {self.correction.model}"
            sentence += (
                ""
                if self.previous is None
                else f", and {self.previous}, which was active before"
            )
        return Report(title="The correction", sentences=[sentence])


WRONG = 0.05
"""The share of the targets with a missing or stale offset from which on somebody should look: it costs a tenth of
what the correction gains, up to 0.8 points of R@1 (benchmarks/keeping.py)."""

DRIFTED = 0.57
"""Own share of live queries and bank from which on they are no longer of one kind. Queries of one kind have 0.44 to
0.53, other wordings 0.60 and more (benchmarks/keeping.py)."""

SHIFTED = 0.5
"""How far the mean offset may move from 0, where the fit put it, in standard deviations of the offsets. Of
other targets of the same kind it moves by 0.15, of another kind mostly by 0.7 and more (benchmarks/keeping.py)."""

LEFT = 1.2
"""The hubness that a correction leaves, as a share of the raw one, both beyond chance, from which on to look.
Banks of the gallery's own queries leave up to 1.12 where there is little of it, those that cost more than 8 points of
R@1 leave 2.8 to 5.4 (benchmarks/keeping.py)."""

GROWN = 1.0
"""The rise of the corrected skewness since the fit, beyond chance, from which on somebody should look. By other queries
or other targets of the same kind it is 0.5 at most, by one planted target 10 and more, by ten 3 and more
(benchmarks/keeping.py)."""

TIMES = 4.0
"""Somebody should look if a target is found by more than 4 times the largest share of the queries that any had at the
fit. Where that share is already large, halfway from it to 100 %."""

HUBS, SHOWN = 20, 3
"""Hubs that a page names, and targets of a kind that the text does."""


@dataclass(frozen=True)
class HubnessNow:
    """Skewness of the 10-occurrence of `queries` queries, searched raw and corrected, and what it is by chance. live:
    whether they are live queries; otherwise they are the bank's. fit: the same of the bank's at the fit, None where
    that was not counted. hubs: what is found most often, raw or corrected. occurrences: how many targets have the
    10-occurrence N, by N, of the raw search and of the corrected one."""

    queries: int
    live: bool
    raw: float
    corrected: float
    chance: float
    fit: HubnessAtFit | None = None
    hubs: Sequence[Hub] = ()
    occurrences: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    @property
    def attention(self) -> Iterator[str]:
        beyond = self.corrected - self.chance
        if self.raw > 2 * self.chance and beyond > LEFT * (self.raw - self.chance):
            yield f"hubness is worse than raw ({self.corrected:.2f}, raw {self.raw:.2f}): run refit"
        if self.fit is None:
            return
        if beyond - (self.fit.corrected - self.fit.chance) > GROWN:
            yield (
                f"hubness has grown since the fit (skewness {self.corrected:.2f}, {self.fit.corrected:.2f} then): run "
                "refresh, or refit"
            )
        too_many = self.queries * min(
            TIMES * self.fit.largest, (1 + self.fit.largest) / 2
        )
        if too_often := self._most("corrected", NAMED, above=too_many):
            yield f"found too often ({self.fit.largest:.1%} at most at the fit): {too_often}"

    def _most(self, search: str, count: int, above: float = 0.0) -> str:
        """The hubs that more than `above` queries find, the most found first, each with its share of the queries."""
        by_count = sorted(
            ((hub.found_by.get(search, 0), hub) for hub in self.hubs),
            key=lambda pair: -pair[0],
        )
        named = [
            f"{hub.id!r} {times / self.queries:.1%}"
            for times, hub in by_count
            if times > above
        ]
        return ", ".join(named[:count])

    def __str__(self) -> str:
        kind = "live" if self.live else "bank"
        text = (
            f"hubness now: skewness of the {OCCURRENCE}-occurrence of {self.queries} {kind} queries {self.raw:.2f} "
            f"raw, {self.corrected:.2f} corrected; by chance it would be {self.chance:.2f}"
        )
        if self.fit is not None:
            text += f"; at the fit {self.fit.raw:.2f} raw, {self.fit.corrected:.2f} corrected"
        raw, corrected = (
            self._most(search, SHOWN) or "none" for search in ("raw", "corrected")
        )
        return f"{text}.\nTop hubs: {raw} raw; {corrected} corrected"


def _fingerprints(model: OffsetModel) -> str:
    return f"fingerprint {model.fingerprint}, query bank {model.bank_fingerprint}"


@dataclass(frozen=True)
class Inspection(Result):
    """What `inspect` found: the correction, if any, and of `count` targets how many lack an offset, how many have one
    that their vector no longer gives, and how many carry something else in its place; ten ids of the first two.
    previous: the model that was active before, which `rollback` writes.

    shift: the mean of the offsets that the model gives now, in standard deviations of the fit's, 0 at the fit. spread:
    their standard deviation, as a share of that at the fit. Both None for a model that knew no gallery. hubness: None
    where no queries were searched for. drift: own share of live queries and bank, 0.5 where they are of one kind, 1
    where they have nothing in common; None without enough live queries. offsets: those that are stored. warnings: what
    the store itself asks attention for. attention: these, and what else somebody should look at, and what to do; the
    exit status is 4 unless it is empty.
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
    shift: float | None = None
    spread: float | None = None
    hubness: HubnessNow | None = None
    drift: float | None = None
    notes: Sequence[str] = ()
    offsets: Histogram | None = None
    warnings: Sequence[str] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def attention(self) -> list[str]:
        """What somebody should look at, and what to do about it."""
        if self.correction is None:
            return [*self.warnings]
        if not self.correction.active:
            return [
                "the correction is half-written, and searches are raw: run apply again, or remove"
            ]
        lines, wrong = [*self.warnings], self.missing + self.stale
        if not self.count:
            lines.append("no target is left in the store")
        if wrong > WRONG * self.count:
            lines.append(
                f"{wrong / self.count:.0%} of the targets lack their offset: run refresh"
            )
        if self.foreign:
            lines.append(
                f"{self.foreign} targets carry something else in the place of offsets: run refresh, or remove"
            )
        if self.shift is not None and abs(self.shift) > SHIFTED:
            lines.append(
                f"the gallery is no longer that of the fit (mean offset {self.shift:+.2f}): run refit"
            )
        if self.drift is not None and self.drift > DRIFTED:
            lines.append(
                f"live queries are no longer like the bank ({self.drift:.2f}): run refit on recorded queries"
            )
        return lines if self.hubness is None else [*lines, *self.hubness.attention]

    def report(self) -> Report:
        whole, scene = (
            not self.missing + self.stale,
            f"{self.count} targets, {self.dim} dimensions, {self.metric.value}",
        )
        verdict, hubness = "no correction", self.hubness
        if self.correction is not None:
            state = "every target has its offset" if whole else "run refresh"
            verdict = f"{self.missing} missing, {self.stale} stale: {state}"
        pictures = []
        if hubness is not None and hubness.occurrences:
            even = OCCURRENCE * hubness.queries / self.count
            drawn = partial(
                plots.occurrences, parts=hubness.occurrences, even=even, k=OCCURRENCE
            )
            pictures.append(Plot("How often targets are found", drawn))
        if self.offsets is not None:
            drawn = partial(
                plots.offsets, edges=self.offsets.edges, counts=self.offsets.counts
            )
            pictures.append(Plot("Offsets", drawn, "As they are stored."))
        return Report(
            title="The correction",
            subtitle=scene,
            verdict=verdict,
            direction="same"
            if self.correction is None
            else "better"
            if whole and not self.attention
            else "worse",
            more=[f"attention: {line}" for line in self.attention],
            key_figures=self._key_figures(),
            sentences=[scene, *self._sentences()],
            hubs=() if hubness is None else hubness.hubs[:HUBS],
            plots=pictures,
        )

    def _sentences(self) -> Iterator[str]:
        if self.correction is None:
            return
        model, state = (
            self.correction.model,
            "active" if self.correction.active else "half-written, searches are raw",
        )
        yield f"{model}, {state}" + (
            f", made {self.correction.made}" if self.correction.made else ""
        )
        yield _fingerprints(model)
        if model.gallery is not None:
            yield (
                f"offsets from {model.gallery.smallest:+.4f} to {model.gallery.largest:+.4f}, "
                f"standard deviation {model.gallery.deviation:.4f}"
            )
        yield from self.notes
        if self.invalid_vectors.count:
            yield str(self.invalid_vectors)
        if self.previous is not None:
            yield f"rollback returns to {self.previous}; {_fingerprints(self.previous)}"
        if self.foreign:
            yield f"{self.foreign} with something in the place of offsets that this correction did not write"
        for kind, ids in (("missing", self.missing_ids), ("stale", self.stale_ids)):
            if ids:
                yield f"{kind}: {', '.join(map(repr, ids[:SHOWN]))}"
        if self.shift is not None and self.spread is not None:
            yield f"gallery: mean offset {self.shift:+.2f}, spread {self.spread:.2f}; at the fit 0 and 1"
        if self.hubness is not None:
            yield str(self.hubness)
        if self.drift is not None:
            yield f"drift of live queries: {self.drift:.2f} (0.5: as the bank; 1: apart)"

    def _key_figures(self) -> list[KeyFigure]:
        hubness = self.hubness
        queries, parts = (
            (0, {}) if hubness is None else (hubness.queries, hubness.occurrences)
        )
        note, unknown = (
            f"of {queries} queries",
            "there is no active correction, or no query to search with",
        )
        needs_truth = "hubplugin evaluate STORE --queries --truth measures it"
        both = [parts.get(search) for search in ("raw", "corrected")]
        worst = [max(part) / queries if part else None for part in both]
        never = [part.get(0, 0) / self.count if part else None for part in both]
        return [
            KeyFigure(RECALL, note=needs_truth),
            share_figure(
                WORST, *worst, more_is_better=False, note=note, unknown=unknown
            ),
            share_figure(
                NEVER, *never, more_is_better=False, note=note, unknown=unknown
            ),
            KeyFigure(
                "R@1 of targets that the bank finds first / of others", note=needs_truth
            ),
        ]
