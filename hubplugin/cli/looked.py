"""What `diagnose`, `inspect`, `explain`, `bank`, `quarantine` and `switch` print with `--json`, as types."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, cast

from typing_extensions import NotRequired, TypedDict

from hubplugin.cli.figures import CandidateFigures, ModelFigures, of_candidate, of_model

if TYPE_CHECKING:
    from hubplugin.jobs.diagnosis import Diagnosis
    from hubplugin.jobs.inspection import Inspection
    from hubplugin.quarantine import Quarantine
    from hubplugin.selection import Judgement


class RawHubnessFigures(TypedDict):
    """Statistics of the k-occurrence of the raw search; `robin_hood` and `anti_hub_share` from 0 to 1."""

    k: int
    skewness: float | None
    kurtosis: float | None
    mean_absolute_error: float
    largest: int
    robin_hood: float | None
    anti_hub_share: float


class BesideChanceFigures(TypedDict):
    """A share from 0 to 1, and what it would be without hubness."""

    share: float
    by_chance: float


class NamedFigures(TypedDict):
    """A target, by its id in the store. name: null where nobody has named it."""

    id: int | str
    name: str | None


class NamedHubFigures(NamedFigures):
    """A target and how many queries found it."""

    found_by: int


class CauseFigures(TypedDict):
    """A cause that was looked for. found: null where that cannot be told. says: what was seen. figures: what it was
    told by."""

    cause: str
    found: bool | None
    says: str
    advice: str
    figures: dict[str, float | None]


class ChoiceFigures(TypedDict):
    """The method that would be fitted."""

    method: str
    parameters: dict[str, float | str | None]


class SideFigures(TypedDict):
    """R@1 of so many probes, 0 to 1, before and after, and the standard error of the change. what: what they are."""

    before: float
    after: float
    error: float | None
    probes: int
    what: str


class SidesFigures(TypedDict):
    """What the bank asks for, and what it does not. offset: mean offset of the one less that of the other.
    known: whether clicks or pairs say what a query asks for."""

    asked: SideFigures
    other: SideFigures
    offset: float | None
    known: bool


class JudgementFigures(TypedDict):
    """What the guard saw. gain: of R@1, and its standard error; null without pairs or clicks. sides: null of a bank
    that is no log."""

    would_help: bool
    objections: list[str]
    notes: list[str]
    bank: str
    held_out_queries: int
    uncorrected: CandidateFigures
    corrected: CandidateFigures
    gain: float | None
    gain_error: float | None
    sides: SidesFigures | None


class CurveFigures(TypedDict):
    """A fit on so many bank queries, as far as pairs or clicks tell."""

    queries: int
    skewness: float | None
    recall: float | None
    gain: float | None
    error: float | None


class DiagnoseFigures(TypedDict):
    """hubby: whether searches are hubby beyond chance. most_found: of all places, what the most found 1 % of the
    targets take; never_found: of the targets. curve: empty without --curve."""

    store: str
    targets: int
    queries: int
    hubby: bool
    verdict: str
    hubness: RawHubnessFigures
    most_found: BesideChanceFigures
    never_found: BesideChanceFigures
    hubs: list[NamedHubFigures]
    anti_hubs: list[NamedFigures]
    causes: list[CauseFigures]
    choice: ChoiceFigures
    judgement: JudgementFigures
    curve: list[CurveFigures]


class CorrectionFigures(ModelFigures):
    """active: false of one that is half-written; searches are raw then."""

    active: bool


class SkewnessFigures(TypedDict):
    """Of the 10-occurrence of bank queries."""

    raw: float | None
    corrected: float | None


class SuspectsFigures(TypedDict):
    """Targets that look planted, ten of a kind at most, each as [id, figure]: the share of the bank queries that find
    it, its penalty, or its mean similarity to its nearest. skewness: raw and corrected. alarms: exit status 4 unless
    it is empty."""

    probes: int
    skewness: list[float | None]
    raw_hubs: list[list[int | str | float]]
    corrected_hubs: list[list[int | str | float]]
    cluster_hubs: list[list[int | str | float]]
    missing: list[int | str]
    stale: list[int | str]
    penalised: list[list[int | str | float]]
    outstanding: int
    far: list[list[int | str | float]]
    alarms: list[str]


class InspectFigures(TypedDict):
    """Of so many targets, how many have no offset, a stale one, something else in its place, or a vector that cannot
    be judged. queries: those of the bank that were searched for."""

    store: str
    metric: str
    dimensions: int
    targets: int
    correction: CorrectionFigures | None
    missing: int
    stale: int
    foreign: int
    unjudged: int
    queries: int
    skewness: SkewnessFigures | None
    notes: list[str]
    suspects: SuspectsFigures | None


class ExplainFigures(TypedDict):
    """The request. A shard in somebody's own process has no method and no path."""

    method: NotRequired[str]
    path: NotRequired[str]
    body: dict[str, Any]


class SwitchFigures(TypedDict):
    """on: as it is now or, after a dry run, would be."""

    store: str
    written: bool
    on: bool


class BankCommandFigures(TypedDict):
    """What is recorded now: so many queries and, unless there are none, their dimensions, how many were asked (seen),
    about how many of these differ, and when the first and the last was asked. written: whether any went."""

    store: str
    folder: str
    written: bool
    queries: int
    dim: NotRequired[int]
    seen: NotRequired[int]
    different: NotRequired[int]
    first: NotRequired[str]
    last: NotRequired[str]
    texts: NotRequired[bool]


class EventFigures(TypedDict):
    """A decision about a target: who, when (UTC, ISO 8601) and why."""

    what: Literal["add", "remove"]
    id: int | str
    when: str
    who: str
    why: str


class QuarantineFigures(TypedDict):
    """All decisions, the oldest first, as they are now or, after a dry run, would be. format: of the list."""

    store: str
    written: bool
    format: int
    events: list[EventFigures]


def of_diagnosis(url: str, found: Diagnosis) -> DiagnoseFigures:
    return {
        "store": url,
        "targets": found.targets,
        "queries": found.queries,
        "hubby": found.hubby,
        "verdict": found.verdict(),
        "hubness": cast(RawHubnessFigures, asdict(found.hubness)),
        "most_found": {"share": found.most_found, "by_chance": found.most_found_by_chance},
        "never_found": {"share": found.never_found, "by_chance": found.never_found_by_chance},
        "hubs": [{"id": key, "name": found.names.get(key), "found_by": count} for key, count in found.hubs],
        "anti_hubs": [{"id": key, "name": found.names.get(key)} for key in found.anti_hubs],
        "causes": [
            cast(CauseFigures, {**asdict(finding), "figures": dict(finding.figures)}) for finding in found.findings
        ],
        "choice": {"method": found.choice.winner.name, "parameters": dict(found.choice.winner.parameters)},
        "judgement": of_judgement(found.judgement),
        "curve": [cast(CurveFigures, asdict(point)) for point in found.curve],
    }


def of_judgement(judgement: Judgement) -> JudgementFigures:
    """What the guard saw."""
    return {
        "would_help": not judgement.objections,
        "objections": judgement.objections,
        "notes": judgement.notes,
        "bank": judgement.bank.kind,
        "held_out_queries": judgement.probes,
        "uncorrected": of_candidate(judgement.uncorrected),
        "corrected": of_candidate(judgement.candidate),
        "gain": judgement.candidate.gain,
        "gain_error": judgement.candidate.error,
        "sides": None if judgement.sides is None else cast(SidesFigures, asdict(judgement.sides)),
    }


def of_inspection(found: Inspection) -> InspectFigures:
    correction = found.correction
    return {
        "store": found.url,
        "metric": found.metric.value,
        "dimensions": found.dim,
        "targets": found.count,
        "correction": None if correction is None else {"active": correction.active, **of_model(correction.model)},
        "missing": found.missing,
        "stale": found.stale,
        "foreign": found.foreign,
        "unjudged": found.unjudged.count,
        "queries": found.probes,
        "skewness": None if found.skewness is None else {"raw": found.skewness[0], "corrected": found.skewness[1]},
        "notes": list(found.notes),
        "suspects": None if found.suspects is None else cast(SuspectsFigures, found.suspects.figures),
    }


def of_quarantine(url: str, listed: Quarantine, written: bool) -> QuarantineFigures:
    return cast(QuarantineFigures, {"store": url, "written": written, **listed.model_dump(mode="json")})
