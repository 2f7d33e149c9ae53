"""The reports of what is done with a store: looked at before, corrected, looked at afterwards, measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hubplugin.evaluation import plots
from hubplugin.evaluation.page import HubLine, Page, Plot, Tile, Verdict, share_tile, sides_tile
from hubplugin.evaluation.result import Share
from hubplugin.evaluation.store_result import StoreEvaluation
from hubplugin.jobs.diagnosis import Diagnosis
from hubplugin.jobs.inspection import Inspection
from hubplugin.jobs.naming import Naming
from hubplugin.jobs.writing import Applied
from hubplugin.selection import CurvePoint, Judgement
from hubplugin.selection.trials import OCCURRENCE
from hubplugin.store import Id

RECALL, WORST, NEVER = "True target first (R@1)", "Queries that find the worst hub", "Targets that are never found"

NEEDS_TRUTH = "hubplugin evaluate STORE --queries --truth measures it"
NEEDS_CLICKS = "--clicks says what queries ask for"
NO_LOG = "the bank is no log of this gallery, or too small to tell"

HUBS = 20


def page_of_diagnosis(found: Diagnosis, store: str) -> Page:
    """What `diagnose` saw. Its tiles are of held-out queries, raw and with the correction that it would fit."""
    even = found.hubness.k * found.queries / found.targets
    curve = [_curve(found.curve)] if found.curve else []
    return Page(
        title=f"What is wrong with the searches of {store}",
        subtitle=f"{found.targets:,} targets, {found.queries:,} queries; nothing was changed",
        tiles=_tiles_of(found.judgement),
        k=found.hubness.k,
        verdict=Verdict(not (found.hubby or found.causes), _capital(found.verdict()), _told(found.judgement)),
        sentences=[_capital(sentence) + "." for sentence in found.sentences()],
        causes=found.findings,
        hubs=[HubLine(found.called(key), count) for key, count in found.hubs],
        anti_hubs=[found.called(key) for key in found.anti_hubs],
        plots=[*curve, _occurrences({"raw": found.occurrences}, even, found.hubness.k)],
        facts=[("store", store), ("candidate", f"{found.judgement.candidate.name}, {found.choice.reason}")],
    )


def page_of_applied(applied: Applied, found: Inspection | None, store: str, names: Naming | None = None) -> Page:
    """What `apply` did. found: the store as it is now; None after a dry run."""
    page = (
        Page(f"The correction of {store}", str(applied.model), [])
        if found is None
        else page_of_inspection(found, names)
    )
    judgement, model = applied.judgement, applied.model
    lines = str(applied).splitlines()
    state = "was applied" if applied.written else "would be applied (dry run)"
    verdict = Verdict(
        True, f"{model.method} {state}", ["the guard was not asked"] if judgement is None else _told(judgement)
    )
    return Page(
        title=f"The correction of {store}",
        subtitle=str(model),
        tiles=page.tiles if judgement is None else _tiles_of(judgement),
        verdict=verdict,
        sentences=lines,
        hubs=page.hubs,
        anti_hubs=page.anti_hubs,
        plots=page.plots,
        facts=[("store", store), ("fingerprint", model.fingerprint)],
    )


def page_of_inspection(found: Inspection, names: Naming | None = None) -> Page:
    """What `inspect` saw: the store, searched raw and corrected for some queries of its bank."""
    raw, corrected = found.finds if found.finds is not None else ({}, {})
    whole = found.correction is not None and not found.missing + found.stale
    line = "Every target has its offset" if whole else f"{found.missing} offsets are missing, {found.stale} stale"
    if found.correction is None:
        line = "There is no correction"
    plot = [_occurrences(_by_number(raw, corrected, found.count), OCCURRENCE * found.probes / found.count, OCCURRENCE)]
    offsets = [Plot("Offsets", plots.offsets(*found.offsets), "As they are stored.")] if found.offsets else []
    return Page(
        title=f"The correction in {found.url}",
        subtitle=f"{found.count:,} targets, {found.dim} dimensions, {found.metric.value}",
        tiles=_tiles_of_finds(found, raw, corrected),
        verdict=Verdict(whole and not found.alarms, line, found.alarms),
        sentences=str(found).splitlines(),
        hubs=_hub_lines(raw, corrected, names),
        plots=[*(plot if raw else []), *offsets],
        facts=[("store", found.url)],
    )


def page_of_evaluation(found: StoreEvaluation) -> Page:
    """A store, searched raw and corrected for queries whose true targets are known."""
    before, after = found.raw, found.corrected
    parts = {"raw": before.occurrences} | ({} if after is None else {"corrected": after.occurrences})
    return Page(
        title=f"{found.store}: raw and corrected",
        subtitle=f"{found.queries:,} queries, {found.judged:,} with a known true target, {found.targets:,} targets"
        + (f"; filter {found.condition}" if found.condition else ""),
        tiles=_tiles_of_rankings(found),
        k=found.k,
        verdict=_verdict(found),
        sentences=found.sentences(),
        examples=found.examples,
        hubs=[HubLine(hub.name, hub.raw, hub.corrected) for hub in found.hubs],
        plots=[_occurrences(parts, found.k * found.queries / found.targets, found.k)],
        facts=[("store", found.store), ("correction", found.method or "none")],
    )


def _tiles_of_rankings(found: StoreEvaluation) -> list[Tile]:
    before, after, top = found.raw, found.corrected, f"in their top {found.k}"
    recall, worst, never = (None, None, None) if after is None else (after.recall[1].value, after.worst, after.never)
    nobody = "a filter leaves nobody knows how many"
    return [
        share_tile(RECALL, before.recall[1].value, recall, more_is_better=True),
        share_tile(WORST, before.worst, worst, more_is_better=False, note=top),
        share_tile(NEVER, before.never, never, more_is_better=False, unknown=nobody),
        sides_tile(
            _pair(found.asked), _pair(found.not_asked), "there is no active correction, or its bank is not kept"
        ),
    ]


def _pair(share: Share | None) -> tuple[float, float] | None:
    return None if share is None else (share.before, share.after)


def _verdict(found: StoreEvaluation) -> Verdict:
    if found.versus is None:
        return Verdict(False, "There is no active correction: this is the raw search alone")
    change = found.versus.difference
    interval = (
        f"R@1 {100 * change.value:+.1f} points, 95 % interval {100 * change.low:+.1f} to {100 * change.high:+.1f}"
    )
    line = (
        "It helps" if change.low > 0 else "It does harm" if change.high < 0 else "Neither help nor harm beyond chance"
    )
    return Verdict(change.low > 0, line, [f"{interval}; {found.versus.won} queries won, {found.versus.lost} lost"])


def _tiles_of(judgement: Judgement) -> list[Tile]:
    """What the guard saw on held-out queries of the bank."""
    before, after, sides = judgement.uncorrected, judgement.candidate, judgement.sides
    held_out = f"expected with the correction, on {judgement.probes:,} held-out bank queries"
    return [
        share_tile(RECALL, before.recall, after.recall, more_is_better=True, note=held_out, unknown=NEEDS_CLICKS),
        share_tile(WORST, before.largest, after.largest, more_is_better=False, note=held_out),
        share_tile(NEVER, before.never, after.never, more_is_better=False, note=held_out),
        sides_tile(
            None if sides is None else (sides.asked.before, sides.asked.after),
            None if sides is None else (sides.other.before, sides.other.after),
            NO_LOG,
        ),
    ]


def _tiles_of_finds(found: Inspection, raw: Mapping[Id, int], corrected: Mapping[Id, int]) -> list[Tile]:
    note = f"of {found.probes} queries of its own bank"
    worst = [max(part.values(), default=0) / found.probes if part else None for part in (raw, corrected)]
    never = [1 - len(part) / found.count if part else None for part in (raw, corrected)]
    return [
        Tile(RECALL, "not measured", note=NEEDS_TRUTH),
        share_tile(WORST, *worst, more_is_better=False, note=note, unknown="there is no active correction"),
        share_tile(NEVER, *never, more_is_better=False, note=note, unknown="there is no active correction"),
        sides_tile(None, None, NEEDS_TRUTH),
    ]


def _told(judgement: Judgement) -> list[str]:
    """What the guard says."""
    if judgement.objections:
        return ["The guard would refuse a correction: " + "; ".join(judgement.objections), *judgement.notes]
    return [f"The guard lets {judgement.candidate.name} pass; {judgement.bank}", *judgement.notes]


def _curve(points: Sequence[CurvePoint]) -> Plot:
    known = points[-1].gain is not None
    what = "gain of R@1 on held-out queries" if known else "skewness of what held-out queries find; less is better"
    return Plot(
        "What size of bank helps how much", plots.curve(points), f"The default method: {what}. Dashed: no correction."
    )


def _occurrences(parts: Mapping[str, Mapping[int, int]], even: float, k: int) -> Plot:
    return Plot("How often targets are found", plots.occurrences(parts, even, k))


def _by_number(raw: Mapping[Id, int], corrected: Mapping[Id, int], count: int) -> dict[str, dict[int, int]]:
    """How many targets are found by how many queries."""
    parts = {}
    for label, finds in (("raw", raw), ("corrected", corrected)):
        values, times = np.unique([*finds.values()], return_counts=True)
        numbers = dict(zip(values.astype(int).tolist(), times.tolist(), strict=True))
        parts[label] = {0: count - len(finds)} | numbers
    return parts


def _hub_lines(raw: Mapping[Id, int], corrected: Mapping[Id, int], names: Naming | None) -> list[HubLine]:
    worst = sorted(raw, key=lambda key: -raw[key])[:HUBS]
    called = names(worst) if names is not None else [None] * len(worst)
    return [
        HubLine(str(key) if name is None else f"{name} [{key}]", raw[key], corrected.get(key, 0))
        for key, name in zip(worst, called, strict=True)
    ]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
