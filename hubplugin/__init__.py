"""hubplugin: mends hubness in vector search with one additive offset per target."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hubplugin._version import __version__

if TYPE_CHECKING:
    from hubplugin.bank import Bank
    from hubplugin.compute import Compute
    from hubplugin.errors import CorrectionRefused, HubpluginError, InputError, ModelFileError, StoreError
    from hubplugin.evaluation.evaluate import evaluate
    from hubplugin.fitting import fit
    from hubplugin.jobs.correct import apply, refit
    from hubplugin.jobs.diagnose import diagnose
    from hubplugin.jobs.health import inspect
    from hubplugin.jobs.write import refresh, remove, rollback
    from hubplugin.methods import METHODS
    from hubplugin.metric import Metric
    from hubplugin.model import OffsetModel, load
    from hubplugin.query_dependent import Reranker, fit_rule
    from hubplugin.recording import Recorder
    from hubplugin.registry import open_store
    from hubplugin.trial import Trial, judge

# Looked up on first use, so that `import hubplugin` costs milliseconds and imports no torch.
_HOMES = {
    "Bank": "bank",
    "Compute": "compute",
    "CorrectionRefused": "errors",
    "HubpluginError": "errors",
    "InputError": "errors",
    "METHODS": "methods",
    "Metric": "metric",
    "ModelFileError": "errors",
    "OffsetModel": "model",
    "Recorder": "recording",
    "Reranker": "query_dependent",
    "StoreError": "errors",
    "Trial": "trial",
    "apply": "jobs.correct",
    "diagnose": "jobs.diagnose",
    "evaluate": "evaluation.evaluate",
    "fit": "fitting",
    "fit_rule": "query_dependent",
    "inspect": "jobs.health",
    "judge": "trial",
    "load": "model",
    "open_store": "registry",
    "refit": "jobs.correct",
    "refresh": "jobs.write",
    "remove": "jobs.write",
    "rollback": "jobs.write",
}

__all__ = [
    "METHODS",
    "Bank",
    "Compute",
    "CorrectionRefused",
    "HubpluginError",
    "InputError",
    "Metric",
    "ModelFileError",
    "OffsetModel",
    "Recorder",
    "Reranker",
    "StoreError",
    "Trial",
    "__version__",
    "apply",
    "diagnose",
    "evaluate",
    "fit",
    "fit_rule",
    "inspect",
    "judge",
    "load",
    "open_store",
    "refit",
    "refresh",
    "remove",
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
