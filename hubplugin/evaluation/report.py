"""The report of an evaluation: every method, side by side."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import numpy as np

from hubplugin._version import __version__
from hubplugin.errors import InputError, install
from hubplugin.evaluation import plots
from hubplugin.evaluation.result import Example, Hub, MethodResult, Results, Share, StoreEvaluation, p_told
from hubplugin.jobs.diagnose import Diagnosis
from hubplugin.jobs.health import Inspection
from hubplugin.jobs.naming import Naming
from hubplugin.jobs.write import Applied
from hubplugin.measures.significance import Figure
from hubplugin.store import Id
from hubplugin.trial import OCCURRENCE, Judgement
from hubplugin.trial.guard import Sides

Direction = Literal["better", "worse", "same", "unknown"]

SAME = 5e-4
"""Shares that differ by less look the same on a page."""

PACKAGES = ("numpy", "torch", "faiss-cpu", "qdrant-client", "qdrant-edge-py")


@dataclass(frozen=True)
class Tile:
    """One figure of the first screen. shown: as it is now; before: what it was, where there is a before."""

    title: str
    shown: str
    direction: Direction = "unknown"
    before: str = ""
    note: str = ""


@dataclass(frozen=True)
class HubLine:
    """A target, and how many queries find it: raw, and after a correction."""

    name: str
    raw: int
    after: int | None = None


@dataclass(frozen=True)
class Plot:
    title: str
    svg: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """rows: the cells of each, a text or (text, small text). marked: the rows that stand out."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | tuple[str, str]]]
    marked: Sequence[int] = ()
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """What the guard says, or a diagnosis: one line, and what else."""

    good: bool
    line: str
    more: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """What a report shows, in this order; what is empty is left out. k: of the k-occurrence. after: what the figures
    behind the raw ones are called."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    k: int = 10
    verdict: Verdict | None = None
    sentences: Sequence[str] = ()
    causes: Sequence[object] = ()
    examples: Sequence[Example] = ()
    examples_note: str = ""
    hubs: Sequence[HubLine] = ()
    after: str = "corrected"
    anti_hubs: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    facts: Sequence[tuple[str, str]] = field(default_factory=tuple)


def render(page: Page, command: str | None = None) -> str:
    """The page as HTML. command: what was typed. Raises InputError where Jinja2 is missing."""
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError as error:
        raise InputError(f"the report needs {error.name}; {install('evaluation')}") from None
    environment = Environment(
        loader=PackageLoader("hubplugin.evaluation", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    facts = [*page.facts, *([("command", command)] if command else []), *made()]
    text: str = environment.get_template("report.html").render(p=page, facts=facts)
    return text


def write(page: Page, path: str | os.PathLike[str], command: str | None = None) -> None:
    """Writes the page. Raises InputError where `path` cannot be written."""
    write_text(path, render(page, command))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {os.fspath(path)!r}: {error.strerror}") from None


def made() -> list[tuple[str, str]]:
    """When and by what a page was made."""
    versions = [f"hubplugin {__version__}", f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return [("versions", ", ".join(versions)), ("date", datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"))]


def share_tile(
    title: str, before: float | None, after: float | None, *, more_is_better: bool, note: str = "", unknown: str = ""
) -> Tile:
    """A tile of a share, 0 to 1. before: of the raw search; after: None where there is no correction. unknown: what is
    said where it was not measured."""
    if before is None:
        return Tile(title, "not measured", note=unknown)
    if after is None:
        return Tile(title, percent(before), note=note)
    gained = after - before if more_is_better else before - after
    direction: Direction = "same" if abs(gained) < SAME else "better" if gained > 0 else "worse"
    return Tile(title, percent(after), direction, percent(before), note)


@dataclass(frozen=True)
class SideChange:
    """R@1 of some of the queries, before and after, and the 95 % interval of its change. name: which queries."""

    name: str
    before: float
    after: float
    interval: tuple[float, float]

    @property
    def shown(self) -> str:
        low, high = self.interval
        return "same" if low <= 0 <= high else f"{100 * (self.after - self.before):+.1f}"

    def __str__(self) -> str:
        low, high = (f"{100 * end:+.1f}" for end in self.interval)
        return f"{self.name}: {percent(self.before)} → {percent(self.after)} ({low} to {high})"


def sides_tile(title: str, sides: Sequence[SideChange | None], unknown: str) -> Tile:
    """The change of R@1 for two parts of the queries. What is none beyond chance has no direction."""
    known = [side for side in sides if side is not None]
    if not known:
        return Tile(title, "not measured", note=unknown)
    worse, better = any(side.interval[1] < 0 for side in known), any(side.interval[0] > 0 for side in known)
    shown = " / ".join("?" if side is None else side.shown for side in sides)
    direction: Direction = "worse" if worse else "better" if better else "same"
    return Tile(title, shown, direction, note="; ".join(map(str, known)))


def bank_tile(found_first: Share | None, others: Share | None, unknown: str) -> Tile:
    """`sides_tile` of queries whose true target some bank query finds first, and of the others."""
    sides = [
        None if share is None else SideChange(name, share.before, share.after, (share.change.low, share.change.high))
        for name, share in (("found first by the bank", found_first), ("others", others))
    ]
    return sides_tile("R@1 of targets that the bank finds first / of others", sides, unknown)


def percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


RECALL, WORST, NEVER = "True target first (R@1)", "Queries that find the worst hub", "Targets that are never found"

NEEDS_BANK = "pass example queries (--bank)"


def page_of(evaluation: Results) -> Page:
    """What the report of `evaluation` shows."""
    shown, k = evaluation.shown, evaluation.k
    told = evaluation.sentences()
    return Page(
        title="Hubness: every method side by side",
        subtitle=_subtitle(evaluation),
        tiles=_tiles(evaluation, shown),
        k=k,
        verdict=_verdict(evaluation),
        sentences=told,
        examples=evaluation.examples,
        hubs=_lines_of(evaluation.hubs, None if shown is None else shown.label),
        after="corrected" if shown is None else shown.label,
        anti_hubs=evaluation.anti_hubs,
        plots=_plots(evaluation, shown),
        tables=[_every_method(evaluation), _hubness(evaluation)],
        facts=[("seed", str(evaluation.seed))],
    )


def _subtitle(e: Results) -> str:
    judged = f" ({e.judged:,} with a known true target)" if e.judged != e.queries else ""
    bank = f", a bank of {e.query_bank:,} queries" if e.query_bank else ""
    second = f" and {e.target_bank:,} targets" if e.target_bank else ""
    return f"{e.queries:,} queries{judged}, {e.targets:,} targets, {e.metric} similarity{bank}{second}"


def _tiles(e: Results, shown: MethodResult | None) -> list[Tile]:
    by = "" if shown is None else f"by {shown.label}"
    raw, after = e.raw.hubness, None if shown is None else shown.hubness
    return [
        share_tile(
            RECALL, e.raw.recall[1].value, None if shown is None else shown.recall[1].value,
            more_is_better=True, note=by or NEEDS_BANK,
        ),
        share_tile(
            WORST, raw.largest / e.queries,
            None if after is None else after.largest / e.queries,
            more_is_better=False, note=f"in their top {e.k}; even: {100 * e.k / e.targets:.1f} %",
        ),
        share_tile(
            NEVER, raw.anti_hub_share, None if after is None else after.anti_hub_share,
            more_is_better=False, note="by none of these queries",
        ),
        bank_tile(e.found_first, e.not_found_first, NEEDS_BANK),
    ]  # fmt: skip


def _verdict(e: Results) -> Verdict | None:
    if all(method.transductive for method in e.methods[1:]):
        return None
    if e.best is None:
        return Verdict(False, "No correction: none is better than the raw search beyond chance")
    versus = e[e.best].versus_raw
    assert versus is not None
    return Verdict(True, f"{e.best} puts more true targets first: {versus.won} queries won, {versus.lost} lost")


def _plots(e: Results, shown: MethodResult | None) -> list[Plot]:
    transductive = any(method.transductive for method in e.methods)
    found = [
        Plot(
            "True target in the first place",
            plots.recall(e.methods, e.best),
            "Bars are 95 % bootstrap intervals over the queries; the dashed line is the raw search."
            + (" Grey squares need every query beforehand: no search can use them." if transductive else ""),
        ),
        Plot(
            "How often targets are found",
            plots.occurrences(
                {"raw": e.raw.occurrences, **({} if shown is None else {shown.label: shown.occurrences})},
                e.k * e.queries / e.targets,
                e.k,
            ),
        ),
    ]
    if e.offsets is not None:
        found.append(Plot("Offsets", plots.offsets(e.offsets.edges, e.offsets.counts), f"Of {e.offsets.label}."))
    return found


def _every_method(e: Results) -> Table:
    at = [k for k in e.raw.recall if k > 1]
    columns = ["method", "R@1", "- raw", "won", "lost", "p", *(f"R@{k}" for k in at)]
    columns += ["median rank", "mean rank", f"mAP@{e.k}", f"nDCG@{e.k}", "skewness"]
    rows = []
    for m in e.methods:
        versus = m.versus_raw
        against: list[str | tuple[str, str]] = ["", "", "", ""]
        if versus is not None:
            change = versus.difference
            interval = f"{100 * change.low:+.1f} to {100 * change.high:+.1f}"
            told = p_told(m.adjusted_p).removeprefix("= ")
            against = [(f"{100 * change.value:+.1f}", interval), str(versus.won), str(versus.lost), told]
        name = m.label if m.described == m.label else (m.label, m.described[len(m.label) :])
        figures = [
            *(_figure(m.recall[k], 100, 1) for k in at),
            *(_figure(f, 1, 1) for f in (m.median_rank, m.mean_rank)),
        ]
        figures += [_figure(f, 100, 1) for f in (m.mean_average_precision, m.ndcg)]
        rows.append([name, _figure(m.recall[1], 100, 1), *against, *figures, _figure(m.skewness, 1, 2)])
    return Table(
        "Every method", columns, rows, _marked(e),
        "R@k: per cent of the queries with a true target among the first k. Small figures are 95 % bootstrap "
        "intervals. Ties count by their expected rank. p: McNemar's exact test against the raw search, corrected for "
        "the number of methods (Benjamini-Hochberg).",
    )  # fmt: skip


def _hubness(e: Results) -> Table:
    rows = [
        [
            m.label, f"{m.hubness.skewness:.2f}", f"{m.hubness.kurtosis:.2f}", f"{m.hubness.mean_absolute_error:.2f}",
            str(m.hubness.largest), f"{100 * m.hubness.robin_hood:.1f} %", f"{100 * m.hubness.anti_hub_share:.1f} %",
        ]
        for m in e.methods
    ]  # fmt: skip
    return Table(
        "Hubness of every method",
        ["method", "skewness", "kurtosis", "mean abs. error", "largest", "Robin Hood", "anti-hubs"],
        rows,
        _marked(e),
        f"Of the {e.k}-occurrence: the number of queries that have a target among their first {e.k}. Robin Hood: share "
        "of all finds that would have to move for an even search. Anti-hubs: targets that no query finds.",
    )


def _marked(e: Results) -> list[int]:
    return [row for row, method in enumerate(e.methods) if method.label == e.best]


def _figure(figure: Figure, scale: float, digits: int) -> tuple[str, str]:
    value, low, high = (f"{scale * part:.{digits}f}" for part in (figure.value, figure.low, figure.high))
    return value, f"{low} to {high}"


NEEDS_TRUTH = "hubplugin evaluate STORE --queries --truth measures it"
NEEDS_CLICKS = "--clicks says what queries ask for"
NO_LOG = "the bank is no log of this gallery, or too small to tell"

HUBS = 20


def page_of_diagnosis(found: Diagnosis, store: str) -> Page:
    """What `diagnose` saw. Its tiles are of held-out queries, raw and with the correction that it would fit."""
    even = found.hubness.k * found.queries / found.targets
    return Page(
        title=f"What is wrong with the searches of {store}",
        subtitle=f"{found.targets:,} targets, {found.queries:,} queries; nothing was changed",
        tiles=_tiles_of(found.judgement),
        k=found.hubness.k,
        verdict=Verdict(not (found.hubby or found.causes), _capital(found.verdict), _told(found.judgement)),
        sentences=[_capital(sentence) + "." for sentence in found.sentences()],
        causes=found.findings,
        hubs=[HubLine(found.called(key), count) for key, count in found.hubs],
        anti_hubs=[found.called(key) for key in found.anti_hubs],
        plots=[_occurrences({"raw": found.occurrences}, even, found.hubness.k)],
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
        verdict=_store_verdict(found),
        sentences=found.sentences(),
        examples=found.examples,
        hubs=_lines_of(found.hubs, "corrected"),
        plots=[_occurrences(parts, found.k * found.queries / found.targets, found.k)],
        facts=[("store", found.store), ("correction", found.method or "none")],
    )


def _tiles_of_rankings(found: StoreEvaluation) -> list[Tile]:
    before, after, top = found.raw, found.corrected, f"in their top {found.k}"
    recall, worst, never = (None, None, None) if after is None else (after.recall[1].value, after.worst, after.never)
    uncounted = "a store does not say how many targets a filter lets through"
    return [
        share_tile(RECALL, before.recall[1].value, recall, more_is_better=True),
        share_tile(WORST, before.worst, worst, more_is_better=False, note=top),
        share_tile(NEVER, before.never, never, more_is_better=False, unknown=uncounted),
        bank_tile(found.found_first, found.not_found_first, "there is no active correction, or its bank is not kept"),
    ]


def _store_verdict(found: StoreEvaluation) -> Verdict:
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
        _tile_of_sides(sides),
    ]


def _tile_of_sides(sides: Sides | None) -> Tile:
    """What the guard saw of a log, by clicks and pairs or by a guess."""
    guess = "" if sides is None or sides.known else ", by a guess"
    changes = (
        []
        if sides is None
        else [
            SideChange(name, side.before, side.after, side.interval)
            for name, side in (("asked before", sides.asked), ("not asked", sides.other))
        ]
    )
    return sides_tile(f"R@1, asked before / not asked{guess}", changes, NO_LOG)


def _tiles_of_finds(found: Inspection, raw: Mapping[Id, int], corrected: Mapping[Id, int]) -> list[Tile]:
    note = f"of {found.probes} queries of its own bank"
    worst = [max(part.values(), default=0) / found.probes if part else None for part in (raw, corrected)]
    never = [1 - len(part) / found.count if part else None for part in (raw, corrected)]
    return [
        Tile(RECALL, "not measured", note=NEEDS_TRUTH),
        share_tile(WORST, *worst, more_is_better=False, note=note, unknown="there is no active correction"),
        share_tile(NEVER, *never, more_is_better=False, note=note, unknown="there is no active correction"),
        bank_tile(None, None, NEEDS_TRUTH),
    ]


def _told(judgement: Judgement) -> list[str]:
    """What the guard says."""
    if judgement.objections:
        return ["The guard would refuse a correction: " + "; ".join(judgement.objections), *judgement.notes]
    return [f"The guard lets {judgement.candidate.name} pass; {judgement.bank}", *judgement.notes]


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


def _lines_of(hubs: Sequence[Hub], after: str | None) -> list[HubLine]:
    return [HubLine(hub.name, hub.found_by["raw"], hub.found_by.get(after or "")) for hub in hubs]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


class Evaluation(Results):
    """What `evaluate` returns: the results, which are printed as a table and written as JSON or HTML."""

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes everything but the single queries' ranks. Raises InputError where `path` cannot be written."""
        write_text(path, self.model_dump_json(indent=1) + "\n")

    def to_html(self, path: str | os.PathLike[str], command: str | None = None) -> None:
        """Writes the report: one file, which refers to nothing outside itself. command: what was typed, which the
        report then names. Raises as `to_json` does."""
        write(page_of(self), path, command)
