"""What commands found as plain JSON; docs/reference/json.md says what each figure means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
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
