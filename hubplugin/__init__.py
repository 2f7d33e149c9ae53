"""hubplugin: mends hubness in vector search with one additive offset per target."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hubplugin._version import __version__

if TYPE_CHECKING:
    from hubplugin.errors import CorrectionRefused, HubpluginError, InputError, ModelFileError, StoreError
    from hubplugin.evaluation.evaluate import evaluate
    from hubplugin.evaluation.export import Evaluation
    from hubplugin.evaluation.in_store import evaluate_store
    from hubplugin.fitting import fit
    from hubplugin.jobs.correction import apply
    from hubplugin.jobs.diagnosis import Diagnosis, diagnose
    from hubplugin.jobs.inspection import inspect
    from hubplugin.jobs.monitoring import monitor
    from hubplugin.jobs.refitting import refit
    from hubplugin.jobs.versions import rollback
    from hubplugin.jobs.writing import refresh
    from hubplugin.methods import METHODS
    from hubplugin.metric import Metric
    from hubplugin.model import OffsetModel, load
    from hubplugin.query_dependent import Reranker, fit_rule
    from hubplugin.recording import Recorder
    from hubplugin.registry import open_store
    from hubplugin.selection import Choice, Judgement, check, choose, judge

# Looked up on first use, so that `import hubplugin` costs milliseconds and imports no torch.
_HOMES = {
    "Choice": "selection",
    "CorrectionRefused": "errors",
    "Diagnosis": "jobs.diagnosis",
    "Evaluation": "evaluation.export",
    "HubpluginError": "errors",
    "InputError": "errors",
    "Judgement": "selection",
    "METHODS": "methods",
    "Metric": "metric",
    "ModelFileError": "errors",
    "OffsetModel": "model",
    "Recorder": "recording",
    "Reranker": "query_dependent",
    "StoreError": "errors",
    "apply": "jobs.correction",
    "check": "selection",
    "choose": "selection",
    "diagnose": "jobs.diagnosis",
    "evaluate": "evaluation.evaluate",
    "evaluate_store": "evaluation.in_store",
    "fit": "fitting",
    "fit_rule": "query_dependent",
    "inspect": "jobs.inspection",
    "judge": "selection",
    "load": "model",
    "monitor": "jobs.monitoring",
    "open_store": "registry",
    "refit": "jobs.refitting",
    "refresh": "jobs.writing",
    "rollback": "jobs.versions",
}

__all__ = [
    "METHODS",
    "Choice",
    "CorrectionRefused",
    "Diagnosis",
    "Evaluation",
    "HubpluginError",
    "InputError",
    "Judgement",
    "Metric",
    "ModelFileError",
    "OffsetModel",
    "Recorder",
    "Reranker",
    "StoreError",
    "__version__",
    "apply",
    "check",
    "choose",
    "diagnose",
    "evaluate",
    "evaluate_store",
    "fit",
    "fit_rule",
    "inspect",
    "judge",
    "load",
    "monitor",
    "open_store",
    "refit",
    "refresh",
    "rollback",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hubplugin' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hubplugin.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
