"""What commands found as plain JSON; docs/reference/json.md says what each figure means."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from hubplugin.jobs.monitoring import Monitored
    from hubplugin.jobs.refitting import Refitted
    from hubplugin.jobs.versions import RolledBack
    from hubplugin.jobs.writing import Applied
    from hubplugin.model import OffsetModel
    from hubplugin.selection.trials import Candidate
    from hubplugin.store import StoredVersion

Figures: TypeAlias = dict[str, Any]


def of_model(model: OffsetModel) -> Figures:
    return {
        "method": model.method,
        "parameters": dict(model.parameters),
        "fingerprint": model.fingerprint,
        "bank_fingerprint": model.bank_fingerprint,
    }


def of_version(version: StoredVersion) -> Figures:
    return {
        "number": version.number,
        "state": version.state,
        "made": version.made,
        "method": version.method,
        "parameters": dict(version.parameters),
        "fingerprint": version.model,
        "bank_fingerprint": version.bank_fingerprint,
    }


def of_rollback(done: RolledBack) -> Figures:
    left = None if done.left is None else of_version(done.left)
    return {"written": done.written, "left": left, "active": of_version(done.active)}


def of_applied(applied: Applied) -> Figures:
    """Of `apply` and `refresh`."""
    figures = {
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


def of_candidate(candidate: Candidate) -> Figures:
    return {
        "method": candidate.method,
        "parameters": dict(candidate.parameters),
        "skewness": candidate.skewness,
        "cost": candidate.cost,
        "recall_at_1": candidate.recall,
        "mean_rank": candidate.rank,
    }


def of_refit(done: Refitted) -> Figures:
    beside = done.beside
    return {
        **of_applied(done.applied),
        "beside": {
            "raw": of_candidate(beside.raw),
            "old": of_candidate(beside.old),
            "new": of_candidate(beside.new),
            "gain": beside.gain,
            "error": beside.error,
        },
    }


def of_monitored(seen: Monitored) -> Figures:
    gain = None
    if seen.gain is not None:
        names = ("recall_at_1", "recall_at_10")
        gain = {
            "queries": seen.gain.queries,
            "raw": dict(zip(names, seen.gain.raw, strict=True)),
            "corrected": dict(zip(names, seen.gain.corrected, strict=True)),
            "error": seen.gain.error,
        }
    return {
        "active": of_version(seen.version),
        "targets": seen.count,
        "offsets": asdict(seen.offsets),
        "hubness": None if seen.hubness is None else asdict(seen.hubness),
        "drift": seen.drift,
        "gain": gain,
        "attention": list(seen.attention),
    }
