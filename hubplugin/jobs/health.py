"""`inspect`: whether the correction in a store is whole, and whether it still does what it did when it was fitted."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import numpy as np
from pydantic import Field, computed_field

from hubplugin.bank import SEEN, Bank, BankLike, own_share
from hubplugin.compute import Compute, TopK, search
from hubplugin.errors import InputError, StoreError
from hubplugin.jobs.facts import ToldCorrection, ToldModel
from hubplugin.jobs.naming import Naming
from hubplugin.jobs.write import Counts, InvalidVectors, ToldInvalidVectors, compare, require_match
from hubplugin.measures.hubness import k_occurrence, skewness, skewness_by_chance, skewness_of_found
from hubplugin.methods import FitInput
from hubplugin.metric import Metric, normalise
from hubplugin.model import GroupedModel, HubnessAtFit, OffsetModel, group_key
from hubplugin.report import Hub, Plot, Report, Reported, Tile, Verdict, bank_tile, plots, share_tile
from hubplugin.report.sections import NEVER, RECALL, WORST
from hubplugin.store import Correction, Id, Store, recorded_of
from hubplugin.trial import OCCURRENCE
from hubplugin.vectors import Directed, Vectors

logger = logging.getLogger(__name__)

QUERIES = 200
"""Queries that are counted, at the fit and by `inspect`. Skewness depends on how many they are."""

HUBS, NAMED, SHOWN = 20, 10, 3
"""Targets of a kind that a page, the figures and the text name."""

BINS = 40
"""Of the distribution of the stored offsets."""

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

FoundBy: TypeAlias = Mapping[Id, int]
"""By id, how many queries find a target, of those that are found."""

Named: TypeAlias = list[tuple[Id, float]]
"""Targets by id, each with the share of the queries that find it, the most found first."""


@dataclass(frozen=True)
class HubnessNow:
    """Skewness of the 10-occurrence of `queries` queries, searched raw and corrected, and what it is by chance. live:
    whether they are live queries; otherwise they are the bank's. fit: the same of the bank's at the fit, None where
    that was not counted."""

    queries: int
    live: bool
    raw: float
    corrected: float
    chance: float
    fit: HubnessAtFit | None = None
    found_raw: Annotated[FoundBy, Field(exclude=True)] = field(default_factory=dict, repr=False)
    found_corrected: Annotated[FoundBy, Field(exclude=True)] = field(default_factory=dict, repr=False)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def raw_hubs(self) -> Named:
        """The ten targets found most often, each with the share of the queries."""
        return self._most(self.found_raw)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def corrected_hubs(self) -> Named:
        """Likewise, searched corrected."""
        return self._most(self.found_corrected)

    def _most(self, found: FoundBy) -> Named:
        return [(key, count / self.queries) for key, count in Counter(found).most_common(NAMED)]

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
        too_much = min(TIMES * self.fit.largest, (1 + self.fit.largest) / 2)
        if too_often := [each for each in self.corrected_hubs if each[1] > too_much]:
            yield f"found too often ({self.fit.largest:.1%} at most at the fit): {_shares(too_often)}"

    def __str__(self) -> str:
        kind = "live" if self.live else "bank"
        text = (
            f"hubness now: skewness of the {OCCURRENCE}-occurrence of {self.queries} {kind} queries {self.raw:.2f} "
            f"raw, {self.corrected:.2f} corrected; by chance it would be {self.chance:.2f}"
        )
        if self.fit is not None:
            text += f"; at the fit {self.fit.raw:.2f} raw, {self.fit.corrected:.2f} corrected"
        raw, corrected = (_shares(hubs[:SHOWN]) for hubs in (self.raw_hubs, self.corrected_hubs))
        return f"{text}\ntop hubs: {raw} raw; {corrected} corrected"


def _shares(named: Named) -> str:
    return ", ".join(f"{name!r} {share:.1%}" for name, share in named) or "none"


def _fingerprints(model: OffsetModel) -> str:
    return f"fingerprint {model.fingerprint}, query bank {model.bank_fingerprint}"


@dataclass(frozen=True)
class Inspection(Reported):
    """What `inspect` found: the correction, if any, and of `count` targets how many lack an offset, how many have one
    that their vector no longer gives, and how many carry something else in its place; ten ids of the first two.
    previous: the model that was active before, which `rollback` writes.

    shift: the mean of the offsets that the model gives now, in standard deviations of the fit's, 0 at the fit. spread:
    their standard deviation, as a share of that at the fit. Both None for a model that knew no gallery. hubness: None
    where no queries were searched for. drift: own share of live queries and bank, 0.5 where they are of one kind, 1
    where they have nothing in common; None without enough live queries. attention: what somebody should look at, and
    what to do; the exit status is 4 unless it is empty. offsets: edges, and how many stored offsets lie between one and
    the next. told: what the store itself asks attention for.

    In JSON `url` is called store, `dim` dimensions, and `count` targets.
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
    missing_ids: Sequence[Id] = ()
    stale_ids: Sequence[Id] = ()
    invalid_vectors: ToldInvalidVectors = field(default_factory=InvalidVectors)
    shift: float | None = None
    spread: float | None = None
    hubness: HubnessNow | None = None
    drift: float | None = None
    notes: Sequence[str] = ()
    offsets: Annotated[tuple[Sequence[float], Sequence[int]] | None, Field(exclude=True)] = field(
        default=None, repr=False
    )
    told: Annotated[Sequence[str], Field(exclude=True)] = field(default=(), repr=False)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def attention(self) -> list[str]:
        """What somebody should look at, and what to do about it."""
        if self.correction is None:
            return [*self.told]
        if not self.correction.active:
            return ["the correction is half-written, and searches are raw: run apply again, or remove"]
        lines, wrong = [*self.told], self.missing + self.stale
        if not self.count:
            lines.append("no target is left in the store")
        if wrong > WRONG * self.count:
            lines.append(f"{wrong / self.count:.0%} of the targets lack their offset: run refresh")
        if self.foreign:
            lines.append(f"{self.foreign} targets carry something else in the place of offsets: run refresh, or remove")
        if self.shift is not None and abs(self.shift) > SHIFTED:
            lines.append(f"the gallery is no longer that of the fit (mean offset {self.shift:+.2f}): run refit")
        if self.drift is not None and self.drift > DRIFTED:
            lines.append(f"live queries are no longer like the bank ({self.drift:.2f}): run refit on recorded queries")
        return lines if self.hubness is None else [*lines, *self.hubness.attention]

    def report(self, names: Naming | None = None) -> Report:
        """names: what hubs are called."""
        whole = self.correction is not None and not self.missing + self.stale
        health = (
            f"{self.missing} missing, {self.stale} stale: {'every target has its offset' if whole else 'run refresh'}"
        )
        return Report(
            title="The correction",
            subtitle=f"{self.count:,} targets, {self.dim} dimensions, {self.metric.value}",
            tiles=self._tiles(),
            verdict=Verdict(
                "same" if self.correction is None else "better" if whole and not self.attention else "worse",
                "no correction" if self.correction is None else health,
                [f"attention: {each}" for each in self.attention],
            ),
            sentences=list(self._sentences()),
            hubs=self._hubs(names),
            plots=self._plots(),
        )

    def _sentences(self) -> Iterator[str]:
        yield f"{self.url}: {self.count} targets, {self.dim} dimensions, {self.metric.value}"
        if self.correction is None:
            return
        model, state = self.correction.model, "active" if self.correction.active else "half-written, searches are raw"
        yield f"{model}, {state}" + (f", made {self.correction.made}" if self.correction.made else "")
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

    @property
    def _found(self) -> tuple[FoundBy, FoundBy]:
        return ({}, {}) if self.hubness is None else (self.hubness.found_raw, self.hubness.found_corrected)

    def _tiles(self) -> list[Tile]:
        queries = 0 if self.hubness is None else self.hubness.queries
        note, unknown = f"of {queries} queries", "there is no active correction, or no query to search with"
        needs_truth = "hubplugin evaluate STORE --queries --truth measures it"
        worst = [max(part.values(), default=0) / queries if part else None for part in self._found]
        never = [1 - len(part) / self.count if part else None for part in self._found]
        return [
            Tile(RECALL, "not measured", note=needs_truth),
            share_tile(WORST, *worst, more_is_better=False, note=note, unknown=unknown),
            share_tile(NEVER, *never, more_is_better=False, note=note, unknown=unknown),
            bank_tile(None, None, needs_truth),
        ]

    def _hubs(self, names: Naming | None) -> list[Hub]:
        raw, corrected = self._found
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
        if self.hubness is not None and self.hubness.found_raw:
            parts = {
                label: {0: self.count - len(part)} | Counter(part.values())
                for label, part in zip(("raw", "corrected"), self._found, strict=True)
            }
            even = OCCURRENCE * self.hubness.queries / self.count
            shown.append(Plot("How often targets are found", plots.occurrences(parts, even, OCCURRENCE)))
        if self.offsets is not None:
            shown.append(Plot("Offsets", plots.offsets(*self.offsets), "As they are stored."))
        return shown


def inspect(
    store: Store, live: BankLike | None = None, *, queries: int = QUERIES, compute: Compute = Compute()
) -> Inspection:
    """Whether every target of `store` has the offset that its vector gives, and whether hubness is still lower by it.

    live: queries that people ask now [m, d]; by default those that were recorded since the correction was made. Those
    that are in the bank count for nothing. It searches, raw and corrected, for `queries` of them drawn at random, or
    for queries of the bank where fewer than 100 are live; 0 searches for none. Reads the whole store, and changes
    nothing.

    Raises StoreError for live queries and a store without an active correction, InputError for queries that cannot be
    used.
    """
    correction = store.correction()
    if live is not None and (correction is None or not correction.active):
        raise StoreError(f"{store.url} has no active correction; apply one first")
    logger.info("%s: inspecting", store.url)
    found: dict[str, Any] = {}
    if correction is not None:
        require_match(correction.model, store)  # a store that was made anew may have other vectors
        asked = _live(store, correction, live, compute) if correction.active and queries else None
        found = _stored(store, correction.model, compute)
        if asked is not None:
            found |= _searched(store, correction.model, asked, queries, compute)
    logger.info("%s: inspected", store.url)
    own = (store.url, store.metric, store.dim, store.count(), correction, store.previous())
    return Inspection(*own, notes=store.notes(), told=store.attention(), **found)


def _stored(store: Store, model: OffsetModel, compute: Compute) -> dict[str, Any]:
    """The fields of an inspection that tell what lies in `store` beside what `model` gives."""
    seen, gallery = Counts(), model.gallery
    missing, stale = list[Id](), list[Id]()
    total = squares = 0.0
    edges = np.zeros(2) if gallery is None else np.linspace(gallery.smallest, gallery.largest, BINS + 1)
    counts = np.zeros(len(edges) - 1, np.int64)
    batches = store.scan(group_key(model))
    for batch, by_model, wrong in compare(store, model, batches, seen, compute, "checking offsets"):
        total, squares = total + by_model.sum(dtype=np.float64), squares + np.square(by_model, dtype=np.float64).sum()
        absent = np.isnan(batch.offsets)
        counts += np.histogram(np.clip(batch.offsets[np.isfinite(batch.offsets)], edges[0], edges[-1]), edges)[0]
        for ids, which in ((missing, absent), (stale, wrong & ~absent)):
            ids += [batch.ids[row] for row in np.flatnonzero(which)[: NAMED - len(ids)].tolist()]
    told = {name: getattr(seen, name) for name in ("missing", "stale", "foreign", "invalid_vectors")}
    told |= {"missing_ids": missing, "stale_ids": stale}
    count = seen.scanned
    if gallery is not None:
        told["offsets"] = (edges.tolist(), counts.tolist())
    if gallery is not None and gallery.deviation > 0 and count > 1 and not isinstance(model, GroupedModel):
        mean = total / count
        told["shift"] = mean / gallery.deviation
        told["spread"] = max(squares / count - mean * mean, 0.0) ** 0.5 / gallery.deviation
    return told


def _live(store: Store, correction: Correction, live: BankLike | None, compute: Compute) -> np.ndarray:
    """A sample of the live queries [m, d], as the bank has its own, without those that are in the bank, which say
    nothing new."""
    model, made = correction.model, correction.made
    if live is None:
        asked: Vectors | None = recorded_of(store, None if made is None else datetime.fromisoformat(made).timestamp())
    else:
        bank = Bank.of(live, "live queries")
        if bank.answers is not None:
            raise InputError("live queries are searched without answers; evaluate measures R@1 on known ones")
        asked = bank.vectors(store, compute.progress)
    if asked is None:
        return np.zeros((0, model.dim), np.float32)
    asked = Directed.of(asked, model.metric)
    some = asked.some(np.sort(np.random.default_rng().permutation(asked.rows)[: 2 * SEEN]))
    if model.metric is Metric.COSINE:
        some = normalise(some, asked.name)
    known = {row.tobytes() for row in np.asarray(model.terms[0].bank, np.float32).round(5) + 0.0}
    rows = np.asarray(some, np.float32).round(5) + 0.0
    new: np.ndarray = some[[row.tobytes() not in known for row in rows]]
    if live is not None and len(new) < FEWEST_LIVE:
        logger.warning(
            "of the live queries %d are not in the bank, and %d are needed: the bank's are looked at",
            len(new),
            FEWEST_LIVE,
        )
    return new


def _searched(store: Store, model: OffsetModel, live: np.ndarray, queries: int, compute: Compute) -> dict[str, Any]:
    """The fields of an inspection that tell what live queries find, or those of the bank."""
    rng, bank = np.random.default_rng(), model.terms[0].bank
    at_fit = bank[:: max(len(bank) // SEEN, 1)]
    told: dict[str, Any] = {}
    is_live = len(live) >= FEWEST_LIVE
    if is_live and len(at_fit) >= FEWEST_LIVE:
        told["drift"] = own_share(live, at_fit, compute, rng)
    asked = rng.permutation(live)[:queries] if is_live else of_bank(model, queries)
    count = store.count()
    if len(asked) < 2 or not count:  # of a model that keeps no more than the mean of its bank; nothing to be found
        return told
    lists = (store.search(asked, OCCURRENCE, raw=which).ids for which in (True, False))
    raw, corrected = (Counter(itertools.chain.from_iterable(each)) for each in lists)
    before, after = (skewness_of_found(np.array([*found.values()]), count) for found in (raw, corrected))
    chance, fit = skewness_by_chance(len(asked), OCCURRENCE, count), model.hubness_at_fit
    return told | {"hubness": HubnessNow(len(asked), is_live, before, after, chance, fit, raw, corrected)}


def of_bank(model: OffsetModel, count: int = QUERIES) -> np.ndarray:
    """So many queries of the bank of `model` at most, the same ones each time: [q, d]."""
    bank = model.terms[0].bank
    queries: np.ndarray = bank[np.linspace(0, len(bank) - 1, min(len(bank), count)).astype(int)]
    return queries


def counted(model: OffsetModel, bank: FitInput) -> OffsetModel:
    """`model`, fitted on the banks and targets of `bank`, with what its bank found in them."""
    targets, queries = bank.require_targets(model.method), of_bank(model)
    if len(queries) < 2 or targets.rows <= OCCURRENCE:
        return model
    quiet = bank.compute.quiet
    offsets = model.fitted
    if offsets is None or len(offsets) != targets.rows:  # which lack zero vectors
        offsets = model.offsets(targets, compute=quiet)
    both, nearest = np.stack([np.zeros_like(offsets), offsets]), TopK(OCCURRENCE)
    search(queries, targets, model.metric, bank.compute, nearest, offsets=both, what="counting hubs")
    rows_of_both = list(nearest.rows)
    if model.query_map is not None:
        learned = TopK(OCCURRENCE)
        search(model.query_map(queries), targets, model.metric, quiet, learned, offsets=offsets)
        rows_of_both[1] = learned.rows[0]
    raw, corrected = (k_occurrence(rows, targets.rows) for rows in rows_of_both)
    chance = skewness_by_chance(len(queries), OCCURRENCE, targets.rows)
    largest = float(corrected.max() / len(queries))
    return model.having(hubness_at_fit=HubnessAtFit(len(queries), skewness(raw), skewness(corrected), chance, largest))
