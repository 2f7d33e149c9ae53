"""What `diagnose`, `inspect` and `evaluate STORE` found as plain JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from hubplugin.cli.figures import Figures, of_candidate, of_model

if TYPE_CHECKING:
    from hubplugin.jobs.diagnosis import Diagnosis
    from hubplugin.jobs.inspection import Inspection
    from hubplugin.selection import Judgement


def of_diagnosis(url: str, found: Diagnosis) -> Figures:
    return {
        "store": url,
        "targets": found.targets,
        "queries": found.queries,
        "hubby": found.hubby,
        "verdict": found.verdict(),
        "hubness": asdict(found.hubness),
        "most_found": {"share": found.most_found, "by_chance": found.most_found_by_chance},
        "never_found": {"share": found.never_found, "by_chance": found.never_found_by_chance},
        "hubs": [{"id": key, "name": found.names.get(key), "found_by": count} for key, count in found.hubs],
        "anti_hubs": [{"id": key, "name": found.names.get(key)} for key in found.anti_hubs],
        "causes": [{**asdict(finding), "figures": dict(finding.figures)} for finding in found.findings],
        "choice": {"method": found.choice.winner.name, "parameters": found.choice.winner.parameters},
        "judgement": of_judgement(found.judgement),
        "curve": [asdict(point) for point in found.curve],
    }


def of_judgement(judgement: Judgement) -> Figures:
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
        "sides": None if judgement.sides is None else asdict(judgement.sides),
    }


def of_inspection(found: Inspection) -> Figures:
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
        "suspects": None if found.suspects is None else found.suspects.figures,
    }
