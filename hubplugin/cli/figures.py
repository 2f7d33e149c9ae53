"""What commands print with `--json`, as types; docs/reference/json.md is made from them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal, cast

from typing_extensions import NotRequired, TypedDict  # that of `typing` has no schema before Python 3.12

if TYPE_CHECKING:
    from hubplugin.jobs.monitoring import Monitored
    from hubplugin.jobs.refitting import Refitted
    from hubplugin.jobs.versions import RolledBack
    from hubplugin.jobs.writing import Applied
    from hubplugin.model import OffsetModel
    from hubplugin.selection.trials import Candidate
    from hubplugin.store import StoredVersion


class ModelFigures(TypedDict):
    """A fitted model: its method, and the fingerprints that name it and its banks."""

    method: str
    parameters: dict[str, float | str | None]
    fingerprint: str
    bank_fingerprint: str


class VersionFigures(ModelFigures):
    """A version of a correction. made: when it was begun, null where that is not known."""

    number: int
    state: Literal["active", "kept", "half-written"]
    made: str | None


class CandidateFigures(TypedDict):
    """A configuration on held-out bank queries: skewness of the 10-occurrence, its cost in similarity, R@1 from 0 to 1
    and the geometric mean rank of the queries' own targets, null without pairs or clicks."""

    method: str
    parameters: dict[str, float | str | None]
    skewness: float | None
    cost: float | None
    recall_at_1: float | None
    mean_rank: float | None


class TriedFigures(TypedDict):
    """What the guard saw: so many held-out queries, without and with the correction."""

    queries: int
    uncorrected: CandidateFigures
    corrected: CandidateFigures
    notes: list[str]


class AppliedFigures(TypedDict):
    """Of so many targets, how many had no offset, a stale one, or a vector that cannot be judged.
    written: false after a dry run. neutral_groups: groups whose offsets stay 0. tried: not after refresh or --force."""

    store: str
    written: bool
    targets: int
    missing: int
    stale: int
    unjudged: int
    neutral_groups: int
    model: ModelFigures
    tried: NotRequired[TriedFigures]


class BesideFigures(TypedDict):
    """No correction, the old and the new one on held-out queries of the new bank. gain: of R@1, new less old, and
    its standard error; null without pairs or clicks."""

    raw: CandidateFigures
    old: CandidateFigures
    new: CandidateFigures
    gain: float | None
    error: float | None


class RefitFigures(AppliedFigures):
    """As of apply, and old and new beside each other."""

    beside: BesideFigures


class RemoveFigures(TypedDict):
    """What was taken out. written: false after a dry run, or where there was nothing."""

    store: str
    written: bool
    versions: list[VersionFigures]


class VersionsFigures(TypedDict):
    """The versions in the order of their numbers. deleted: how many --keep deleted or, after a dry run, would delete;
    written: whether it did."""

    store: str
    written: bool
    deleted: int
    versions: list[VersionFigures]


class RollbackFigures(TypedDict):
    """The version that was left, null if searches were raw, and the one that is active now. quarantined: targets that
    came into quarantine after it was made, and may have their old offset until a refresh."""

    store: str
    written: bool
    left: VersionFigures | None
    active: VersionFigures
    quarantined: int


class OffsetsFigures(TypedDict):
    """Offsets of a sample of the targets. shift, spread: mean and standard deviation beside those of the fit, 0 and 1;
    null for a model that knew no gallery. By id, ten at most: missing_ids, stale_ids, and penalised, as [id, penalty],
    whose penalty lies beyond median + 4 MAD of those looked at."""

    looked_at: int
    missing: int
    stale: int
    foreign: int
    unjudged: int
    shift: float | None
    spread: float | None
    missing_ids: list[int | str]
    stale_ids: list[int | str]
    penalised: list[list[int | str | float]]


class FitHubnessFigures(TypedDict):
    """The same of the bank's queries at the fit. largest: the share of them that found the worst hub, corrected."""

    queries: int
    raw: float | None
    corrected: float | None
    chance: float | None
    largest: float


class HubnessFigures(TypedDict):
    """Skewness of the 10-occurrence of so many queries, searched raw and corrected, and by chance. live: whether
    they are live queries, or the bank's. fit: null where that was not counted. raw_hubs, corrected_hubs: the targets
    found most often, ten at most, each as [id, share of the queries]."""

    queries: int
    live: bool
    raw: float | None
    corrected: float | None
    chance: float | None
    fit: FitHubnessFigures | None
    raw_hubs: list[list[int | str | float]]
    corrected_hubs: list[list[int | str | float]]


class RecallFigures(TypedDict):
    """From 0 to 1."""

    recall_at_1: float
    recall_at_10: float


class GainFigures(TypedDict):
    """Clicks, searched raw and corrected. error: the standard error of the change of R@1."""

    queries: int
    raw: RecallFigures
    corrected: RecallFigures
    error: float


class MonitorFigures(TypedDict):
    """drift: own share of live queries and bank, 0.5 where they are of one kind, 1 where they lie apart, null
    with fewer than 100 live queries. attention: what to look at, and what to do; exit status 4 unless it is empty."""

    store: str
    active: VersionFigures
    targets: int
    offsets: OffsetsFigures
    hubness: HubnessFigures | None
    drift: float | None
    gain: GainFigures | None
    attention: list[str]


def of_model(model: OffsetModel) -> ModelFigures:
    return {
        "method": model.method,
        "parameters": dict(model.parameters),
        "fingerprint": model.fingerprint,
        "bank_fingerprint": model.bank_fingerprint,
    }


def of_version(version: StoredVersion) -> VersionFigures:
    return {
        "number": version.number,
        "state": version.state,
        "made": version.made,
        "method": version.method,
        "parameters": dict(version.parameters),
        "fingerprint": version.model,
        "bank_fingerprint": version.bank_fingerprint,
    }


def of_rollback(url: str, done: RolledBack) -> RollbackFigures:
    left = None if done.left is None else of_version(done.left)
    active, quarantined = of_version(done.active), done.quarantined
    return {"store": url, "written": done.written, "left": left, "active": active, "quarantined": quarantined}


def of_applied(url: str, applied: Applied) -> AppliedFigures:
    figures: AppliedFigures = {
        "store": url,
        "written": applied.written,
        "targets": applied.scanned,
        "missing": applied.missing,
        "stale": applied.stale,
        "unjudged": applied.unjudged.count,
        "neutral_groups": len(applied.neutral),
        "model": of_model(applied.model),
    }
    judged = applied.judgement
    if judged is not None:
        figures["tried"] = {
            "queries": judged.probes,
            "uncorrected": of_candidate(judged.uncorrected),
            "corrected": of_candidate(judged.candidate),
            "notes": list(judged.notes),
        }
    return figures


def of_candidate(candidate: Candidate) -> CandidateFigures:
    return {
        "method": candidate.method,
        "parameters": dict(candidate.parameters),
        "skewness": candidate.skewness,
        "cost": candidate.cost,
        "recall_at_1": candidate.recall,
        "mean_rank": candidate.rank,
    }


def of_refit(url: str, done: Refitted) -> RefitFigures:
    beside = done.beside
    compared: BesideFigures = {
        "raw": of_candidate(beside.raw),
        "old": of_candidate(beside.old),
        "new": of_candidate(beside.new),
        "gain": beside.gain,
        "error": beside.error,
    }
    return {**of_applied(url, done.applied), "beside": compared}


def of_monitored(seen: Monitored) -> MonitorFigures:
    gain = seen.gain
    return {
        "store": seen.url,
        "active": of_version(seen.version),
        "targets": seen.count,
        "offsets": cast(OffsetsFigures, asdict(seen.offsets)),
        "hubness": None if seen.hubness is None else cast(HubnessFigures, asdict(seen.hubness)),
        "drift": seen.drift,
        "gain": None
        if gain is None
        else {
            "queries": gain.queries,
            "raw": _recall(gain.raw),
            "corrected": _recall(gain.corrected),
            "error": gain.error,
        },
        "attention": list(seen.attention),
    }


def _recall(found: tuple[float, float]) -> RecallFigures:
    return {"recall_at_1": found[0], "recall_at_10": found[1]}
