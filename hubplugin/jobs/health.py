"""Whether a correction is whole and still does what it did when it was fitted: all of it, or samples for a timer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import numpy as np
from pydantic import Field, PlainSerializer, computed_field
from typing_extensions import TypedDict  # that of `typing` has no schema before Python 3.12

from hubplugin.bank import SEEN, Bank, BankLike, own_share
from hubplugin.compute import Compute
from hubplugin.errors import StoreError
from hubplugin.jobs.facts import ToldCorrection, ToldModel
from hubplugin.jobs.naming import Naming
from hubplugin.jobs.suspects import (
    NAMED,
    QUERIES,
    Named,
    Suspects,
    counted_queries,
    examined,
    has_bank,
    ids_as_text,
    most_found,
    name_some,
    outstanding,
    penalties_as_text,
    shares_as_text,
    skewness_of_lists,
    too_much,
)
from hubplugin.jobs.write import Comparison, InvalidVectors, ToldInvalidVectors, compared
from hubplugin.measures.hubness import skewness_by_chance
from hubplugin.measures.significance import standard_error
from hubplugin.methods.robust import BANK_QUERIES
from hubplugin.metric import Metric, normalise
from hubplugin.model import GroupedModel, HubnessAtFit, OffsetModel
from hubplugin.report import Hub, Plot, Report, Reported, Tile, Verdict, bank_tile, plots, share_tile
from hubplugin.report.sections import NEVER, RECALL, WORST
from hubplugin.store import Hits, Id, Store, recorded_of
from hubplugin.trial import OCCURRENCE
from hubplugin.vectors import Vectors

logger = logging.getLogger(__name__)


class SkewnessFacts(TypedDict):
    """Of the 10-occurrence of bank queries."""

    raw: float | None
    corrected: float | None


def _skewness(both: tuple[float, float] | None) -> SkewnessFacts | None:
    return None if both is None else {"raw": both[0], "corrected": both[1]}


def _named(model: OffsetModel) -> str:
    return f"fingerprint {model.fingerprint}, query bank {model.bank_fingerprint}"


HUBS = 20
"""Hubs that a page names."""


@dataclass(frozen=True)
class Inspection(Reported):
    """What `inspect` found: the correction, if any, and of `count` targets how many lack an offset, how many have one
    that their vector no longer gives, and how many carry something else in its place. previous: the model that was
    active before, which `rollback` writes. skewness: of the 10-occurrence of `queries` bank queries over the targets as
    they are now, searched raw and corrected; None where it was not measured. suspects: which targets look planted,
    measured likewise. found_by: by id, how many of these queries find a target, raw and corrected. offsets: edges, and
    how many stored offsets lie between one and the next.

    In JSON `url` is called store, `dim` dimensions, `count` targets, and `queries` queries.
    """

    url: Annotated[str, Field(serialization_alias="store")]
    metric: Metric
    dim: Annotated[int, Field(serialization_alias="dimensions")]
    count: Annotated[int, Field(serialization_alias="targets")]
    correction: ToldCorrection | None
    previous: ToldModel | None = None
    missing: int = 0
    stale: int = 0
    foreign: int = 0
    skewness: Annotated[tuple[float, float] | None, PlainSerializer(_skewness, return_type=SkewnessFacts | None)] = None
    queries: Annotated[int, Field(serialization_alias="queries")] = 0
    notes: Sequence[str] = ()
    invalid_vectors: ToldInvalidVectors = field(default_factory=InvalidVectors)
    suspects: Suspects | None = None
    found_by: Annotated[tuple[Mapping[Id, int], Mapping[Id, int]] | None, Field(exclude=True)] = field(
        default=None, repr=False
    )
    offsets: Annotated[tuple[Sequence[float], Sequence[int]] | None, Field(exclude=True)] = field(
        default=None, repr=False
    )

    @property
    def alarms(self) -> list[str]:
        """What somebody should look at now, a line each."""
        return [] if self.suspects is None else self.suspects.alarms

    def report(self, names: Naming | None = None) -> Report:
        """names: what hubs are called. The searches are for queries of the store's own bank."""
        correction = self.correction
        lines = [f"{self.url}: {self.count} targets, {self.dim} dimensions, {self.metric.value}"]
        if correction is not None:
            model, state = correction.model, "active" if correction.active else "half-written, searches are raw"
            made = f", made {correction.made}" if correction.made else ""
            lines += [f"{model}, {state}{made}", _named(model)]
            if model.gallery is not None:
                lines.append(
                    f"offsets from {model.gallery.smallest:+.4f} to {model.gallery.largest:+.4f}, "
                    f"standard deviation {model.gallery.deviation:.4f}"
                )
            lines += [*self.notes, *([str(self.invalid_vectors)] if self.invalid_vectors.count else [])]
        if self.previous is not None:
            lines.append(f"rollback returns to {self.previous}; {_named(self.previous)}")
        if self.skewness is not None:
            raw, corrected = self.skewness
            chance = skewness_by_chance(self.queries, OCCURRENCE, self.count)
            lines.append(
                f"hubness now: skewness of the {OCCURRENCE}-occurrence of {self.queries} queries {raw:.2f} raw, "
                f"{corrected:.2f} corrected; by chance it would be {chance:.2f}"
            )
        if self.foreign:
            lines.append(f"{self.foreign} with something in the place of offsets that this correction did not write")
        lines += [] if self.suspects is None else self.suspects.lines
        whole = correction is not None and not self.missing + self.stale
        health = (
            f"{self.missing} missing, {self.stale} stale: {'every target has its offset' if whole else 'run refresh'}"
        )
        return Report(
            title="The correction",
            subtitle=f"{self.count:,} targets, {self.dim} dimensions, {self.metric.value}",
            tiles=self._tiles(),
            verdict=Verdict(
                "worse" if self.alarms else "better" if whole else "same" if correction is None else "worse",
                "no correction" if correction is None else health,
                [f"ALARM: {alarm}" for alarm in self.alarms],
            ),
            sentences=lines,
            hubs=self._hubs(names),
            plots=self._plots(),
        )

    def _tiles(self) -> list[Tile]:
        note, unknown = f"of {self.queries} queries of its own bank", "there is no active correction"
        needs_truth = "hubplugin evaluate STORE --queries --truth measures it"
        parts = self.found_by or ({}, {})
        worst = [max(part.values(), default=0) / self.queries if part else None for part in parts]
        never = [1 - len(part) / self.count if part else None for part in parts]
        return [
            Tile(RECALL, "not measured", note=needs_truth),
            share_tile(WORST, *worst, more_is_better=False, note=note, unknown=unknown),
            share_tile(NEVER, *never, more_is_better=False, note=note, unknown=unknown),
            bank_tile(None, None, needs_truth),
        ]

    def _hubs(self, names: Naming | None) -> list[Hub]:
        raw, corrected = self.found_by or ({}, {})
        worst = sorted(raw, key=lambda key: -raw[key])[:HUBS]
        called = names(worst) if names is not None else [None] * len(worst)
        return [
            Hub(
                id=key,
                name=str(key) if name is None else f"{name} [{key}]",
                found_by={"raw": raw[key], "corrected": corrected.get(key, 0)},
            )
            for key, name in zip(worst, called, strict=True)
        ]

    def _plots(self) -> list[Plot]:
        shown = []
        if self.found_by is not None and self.found_by[0]:
            parts = {
                label: {0: self.count - len(part)} | Counter(part.values())
                for label, part in zip(("raw", "corrected"), self.found_by, strict=True)
            }
            even = OCCURRENCE * self.queries / self.count
            shown.append(Plot("How often targets are found", plots.occurrences(parts, even, OCCURRENCE)))
        return [
            *shown,
            *([Plot("Offsets", plots.offsets(*self.offsets), "As they are stored.")] if self.offsets else []),
        ]


def inspect(store: Store, *, queries: int = BANK_QUERIES, compute: Compute = Compute()) -> Inspection:
    """What correction lies in `store`, whether every target has the offset that its vector gives, and what it does to
    hubness now, seen by searching for `queries` queries of the bank; 0 searches for none."""
    correction = store.correction()
    logger.info("%s: inspecting", store.url)
    health: dict[str, Any] = {}
    if correction is not None and correction.active and queries and has_bank(correction.model):
        named, beside = examined(store, correction.model, compute, queries)
        health = {"skewness": named.skewness, "queries": named.queries, "suspects": named, "found_by": named.found_by}
    elif correction is not None:
        beside = compared(store, correction.model, compute, "checking offsets")
    if correction is not None:
        health |= {name: getattr(beside, name) for name in ("missing", "stale", "foreign", "invalid_vectors")}
        if beside.edges is not None and beside.counts is not None:
            health["offsets"] = (beside.edges.tolist(), beside.counts.tolist())
    logger.info("%s: inspected", store.url)
    own = (store.url, store.metric, store.dim, store.count(), correction, store.previous())
    return Inspection(*own, notes=store.notes(), **health)


TARGETS = 2_000
"""How many targets are looked at: a request for each few hundred of them."""

SHOWN = 3
"""How many targets of a kind the text names; the figures have ten."""

WRONG = 0.05
"""The share of the targets with a missing or stale offset from which on somebody should look: it costs a tenth of
what the correction gains, up to 0.8 points of R@1 (benchmarks/keeping.py)."""

DRIFTED, FEWEST_LIVE = 0.57, 100
"""Own share of live queries and bank from which on they are no longer of one kind, and how many of them it takes
to see it. Queries of one kind have 0.44 to 0.53, other wordings 0.60 and more (benchmarks/keeping.py)."""

SHIFTED = 0.5
"""How far the mean offset may move from 0, where the fit put it, in standard deviations of the offsets. Of
other targets of the same kind it moves by 0.15, of another kind mostly by 0.7 and more (benchmarks/keeping.py)."""

LEFT = 1.2
"""The hubness that a correction leaves, as a share of the raw one, both beyond chance, above which it no longer helps.
Banks of the gallery's own queries leave up to 1.12 where there is little of it, those that cost more than 8 points of
R@1 leave 2.8 to 5.4 (benchmarks/keeping.py)."""

GROWN = 1.0
"""The rise of the corrected skewness since the fit, beyond chance, from which on somebody should look. By other queries
or other targets of the same kind it is 0.5 at most, by one planted target 10 and more, by ten 3 and more
(benchmarks/keeping.py)."""


class RecallFacts(TypedDict):
    """From 0 to 1."""

    recall_at_1: float
    recall_at_10: float


def _recalls(both: tuple[float, float]) -> RecallFacts:
    return {"recall_at_1": both[0], "recall_at_10": both[1]}


ToldRecalls: TypeAlias = Annotated[tuple[float, float], PlainSerializer(_recalls, return_type=RecallFacts)]


@dataclass(frozen=True)
class Gain:
    """R@1 and R@10 of `queries` whose targets are known, 0 to 1, raw and corrected, searched in the store. error: the
    standard error of the change of R@1."""

    queries: int
    raw: ToldRecalls
    corrected: ToldRecalls
    error: float

    def __str__(self) -> str:
        first, ten = (f"{100 * raw:.1f} -> {100 * new:.1f}" for raw, new in zip(self.raw, self.corrected, strict=True))
        return f"R@1 {first} (+- {196 * self.error:.1f}), R@10 {ten}, on {self.queries} clicks"


@dataclass(frozen=True)
class Offsets:
    """The offsets of `looked_at` targets: how many are missing, stale or foreign, and of how many targets the model
    cannot judge the vector. shift: their mean, in standard deviations of the fit's offsets, 0 at the fit. spread: their
    standard deviation, as a share of that at the fit. Both None for a model that knew no gallery. By id, ten at most:
    missing_ids, stale_ids, and penalised, whose penalty lies beyond median + 4 MAD of those looked at, the worst first.
    """

    looked_at: int
    missing: int
    stale: int
    foreign: int
    invalid_vectors: int
    shift: float | None = None
    spread: float | None = None
    missing_ids: Sequence[Id] = ()
    stale_ids: Sequence[Id] = ()
    penalised: Named = field(default_factory=list)


@dataclass(frozen=True)
class HubnessNow:
    """Skewness of the 10-occurrence of `queries` queries, searched raw and corrected, and what it is by chance. live:
    whether they are live queries; otherwise they are the bank's. fit: the same of the bank's at the fit, None where
    that was not counted. raw_hubs, corrected_hubs: the ten targets found most often, each with the share of the
    queries."""

    queries: int
    live: bool
    raw: float
    corrected: float
    chance: float
    fit: HubnessAtFit | None = None
    raw_hubs: Named = field(default_factory=list)
    corrected_hubs: Named = field(default_factory=list)

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
                "refresh, inspect what looks planted, or refit"
            )
        too_often = [each for each in self.corrected_hubs if each[1] > too_much(self.fit.largest)]
        if too_often:
            named = shares_as_text(too_often)
            yield f"found too often ({self.fit.largest:.1%} at most at the fit): {named}; run inspect"

    def __str__(self) -> str:
        kind = "live" if self.live else "bank"
        text = (
            f"hubness: skewness {self.raw:.2f} raw, {self.corrected:.2f} corrected, by {self.queries} {kind} queries; "
            f"{self.chance:.2f} by chance"
        )
        if self.fit is not None:
            text += f"; at the fit {self.fit.raw:.2f} raw, {self.fit.corrected:.2f} corrected"
        raw, corrected = (shares_as_text(hubs[:SHOWN]) for hubs in (self.raw_hubs, self.corrected_hubs))
        return f"{text}\ntop hubs: {raw} raw; {corrected} corrected"


@dataclass(frozen=True)
class Monitored(Reported):
    """What `monitor` saw of the active correction of a store with `count` targets.

    hubness: None where a model keeps no queries and there are no live ones. drift: own share of live queries and bank,
    0.5 where they are of one kind, 1 where they have nothing in common; None without enough live queries. gain: on
    recent clicks, None without them. attention: what somebody should look at, and what to do; exit status 4 unless it
    is empty. In JSON `url` is called store, `correction` active, and `count` targets.
    """

    url: Annotated[str, Field(serialization_alias="store")]
    correction: Annotated[ToldCorrection, Field(serialization_alias="active")]
    count: Annotated[int, Field(serialization_alias="targets")]
    offsets: Offsets
    hubness: HubnessNow | None
    drift: float | None
    gain: Gain | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def attention(self) -> list[str]:
        """What somebody should look at, and what to do about it."""
        seen, lines = self.offsets, []
        wrong = seen.missing + seen.stale
        if wrong > WRONG * seen.looked_at:
            lines.append(f"{wrong / seen.looked_at:.0%} of the targets lack their offset: run refresh")
        if seen.foreign:
            lines.append(f"{seen.foreign} targets carry something else in the place of offsets: run refresh, or remove")
        if seen.shift is not None and abs(seen.shift) > SHIFTED:
            lines.append(f"the gallery is no longer that of the fit (mean offset {seen.shift:+.2f}): run refit")
        if self.drift is not None and self.drift > DRIFTED:
            lines.append(f"live queries are no longer like the bank ({self.drift:.2f}): run refit on recorded queries")
        if self.gain is not None and self.gain.corrected[0] - self.gain.raw[0] < -2 * self.gain.error:
            lines.append(f"the correction does harm: {self.gain}: run rollback or refit")
        return lines if self.hubness is None else [*lines, *self.hubness.attention]

    def report(self) -> Report:
        seen = self.offsets
        lines = [
            f"{self.url}: {self.count} targets, {self.correction.model}",
            f"offsets of {seen.looked_at} targets: {seen.missing} missing, {seen.stale} stale, {seen.foreign} foreign",
        ]
        if seen.shift is not None and seen.spread is not None:
            lines.append(f"gallery: mean offset {seen.shift:+.2f}, spread {seen.spread:.2f}; at the fit 0 and 1")
        named = {"missing": ids_as_text(seen.missing_ids[:SHOWN]), "stale": ids_as_text(seen.stale_ids[:SHOWN])}
        named["largest penalties"] = penalties_as_text(seen.penalised[:SHOWN])
        lines += [f"{what}: {which}" for what, which in named.items() if which]
        lines += [] if self.hubness is None else [str(self.hubness)]
        drift = "too few live queries" if self.drift is None else f"{self.drift:.2f} (0.5: as the bank; 1: apart)"
        lines.append(f"drift of live queries: {drift}")
        lines += [] if self.gain is None else [f"gain: {self.gain}"]
        lines += [f"attention: {each}" for each in self.attention or ["nothing"]]
        return Report(title="The correction, by samples", sentences=lines)


def monitor(store: Store, queries: BankLike | None = None, *, compute: Compute = Compute()) -> Monitored:
    """Whether the active correction of `store` is whole and still helps.

    queries: live queries [m, d]; by default those that were recorded since the correction was made. A
    `hubplugin.Bank` also says which id in the store each of them led to. Looks at 2,000 targets and searches for 200
    queries, drawn at random, whatever the size of the store. Changes nothing.
    It names targets of those it looked at and found: `inspect` reads the whole store, and names what looks planted.

    Raises StoreError for a store without an active correction, InputError for queries that cannot be used.
    """
    active = store.correction()
    if active is None or not active.active:
        raise StoreError(f"{store.url} has no active correction; apply one first")
    rng = np.random.default_rng()
    bank = None if queries is None else Bank.of(queries, "queries")
    vectors = recorded_of(store, _seconds(active.made)) if bank is None else bank.vectors(store, compute.progress)
    clicks = None if bank is None or vectors is None else bank.clicks(vectors.rows)
    live, at_fit = _live(vectors, active.model, rng), _bank(active.model)
    logger.info("%s: looking at samples, with %d live queries and %d of the bank", store.url, len(live), len(at_fit))
    is_live = len(live) >= FEWEST_LIVE
    queries_now = rng.permutation(live)[:QUERIES] if is_live else counted_queries(active.model)
    return Monitored(
        store.url,
        active,
        store.count(),
        offsets=_offsets(store, active.model, compute),
        hubness=_hubness(store, queries_now, is_live, active.model.hubness_at_fit) if len(queries_now) > 1 else None,
        drift=own_share(live, at_fit, compute, rng) if min(len(live), len(at_fit)) >= FEWEST_LIVE else None,
        gain=None if clicks is None or vectors is None else _gain(store, vectors, clicks.tolist(), rng),
    )


def _seconds(made: str | None) -> float | None:
    return None if made is None else datetime.fromisoformat(made).timestamp()


def _bank(model: OffsetModel) -> np.ndarray:
    """The queries that the model keeps [m, d]: one at most where it keeps no more than a mean."""
    return model.terms[0].bank[:: max(len(model.terms[0].bank) // SEEN, 1)]


def _live(queries: Vectors | None, model: OffsetModel, rng: np.random.Generator) -> np.ndarray:
    """A sample of `queries` as the bank has its own, without those that are in the bank, which say nothing new."""
    if queries is None:
        return np.zeros((0, model.dim), np.float32)
    rows = np.sort(rng.permutation(queries.rows)[: 2 * SEEN])
    live = queries.some(rows)
    if model.metric is Metric.COSINE:
        live = normalise(live, queries.name)
    known = {row.tobytes() for row in np.asarray(model.terms[0].bank, np.float32).round(5) + 0.0}
    new = [row for row, each in enumerate(np.asarray(live, np.float32).round(5) + 0.0) if each.tobytes() not in known]
    return live[new]


def _offsets(store: Store, model: OffsetModel, compute: Compute) -> Offsets:
    """What a sample of the targets has, beside what the model gives."""
    comparison = Comparison(store, model, compute, "looking at offsets")
    parts, all_ids, missing, stale = [np.zeros(0, np.float32)], list[Id](), list[Id](), list[Id]()
    for batch in store.sample(TARGETS):
        by_model, wrong = comparison.offsets(batch)
        parts.append(by_model)
        all_ids += batch.ids
        name_some(batch, wrong, missing, stale)
        comparison.done(batch)
    offsets, gallery = np.concatenate(parts).astype(np.float64), model.gallery
    shift = spread = None
    if gallery is not None and gallery.deviation > 0 and len(offsets) > 1 and not isinstance(model, GroupedModel):
        shift, spread = float(offsets.mean() / gallery.deviation), float(offsets.std() / gallery.deviation)
    counted = (
        comparison.scanned,
        comparison.missing,
        comparison.stale,
        comparison.foreign,
        comparison.invalid_vectors.count,
    )
    rows = outstanding(-offsets) if len(offsets) else np.zeros(0, np.int64)
    worst = rows[np.argsort(offsets[rows], kind="stable")][:NAMED].tolist()
    return Offsets(*counted, shift, spread, missing, stale, [(all_ids[row], float(-offsets[row])) for row in worst])


def _hubness(store: Store, queries: np.ndarray, live: bool, fit: HubnessAtFit | None) -> HubnessNow:
    count = store.count()
    raw, corrected = (store.search(queries, OCCURRENCE, raw=which).ids for which in (True, False))
    chance = skewness_by_chance(len(queries), OCCURRENCE, count)
    skewness = (skewness_of_lists(raw, count), skewness_of_lists(corrected, count))
    return HubnessNow(len(queries), live, *skewness, chance, fit, most_found(raw), most_found(corrected))


def _gain(store: Store, queries: Vectors, clicks: list[Id], rng: np.random.Generator) -> Gain | None:
    clicked = np.array([row for row, each in enumerate(clicks) if str(each) != "-1"], np.int64)
    rows = np.sort(rng.permutation(clicked)[:QUERIES])
    if len(rows) < 2:
        return None
    sample, own = queries.some(rows), [clicks[row] for row in rows.tolist()]

    def hit(hits: Hits, first: int) -> np.ndarray:
        return np.array([key in line[:first] for key, line in zip(own, hits.ids, strict=True)], np.float64)

    raw, corrected = (store.search(sample, OCCURRENCE, raw=which) for which in (True, False))
    recalls = [tuple(float(hit(hits, k).mean()) for k in (1, OCCURRENCE)) for hits in (raw, corrected)]
    error = standard_error(hit(corrected, 1) - hit(raw, 1))
    return Gain(len(rows), (recalls[0][0], recalls[0][1]), (recalls[1][0], recalls[1][1]), error)
