"""hubplugin: corrects hubness in vector search with one additive offset per target."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hubplugin._version import __version__

if TYPE_CHECKING:
    from hubplugin.bank import Bank as Bank
    from hubplugin.compute import Compute as Compute
    from hubplugin.errors import CorrectionRefused as CorrectionRefused
    from hubplugin.errors import HubpluginError as HubpluginError
    from hubplugin.errors import InputError as InputError
    from hubplugin.errors import StoreError as StoreError
    from hubplugin.evaluation.evaluate import evaluate as evaluate
    from hubplugin.fitting import fit as fit
    from hubplugin.jobs.correct import apply as apply
    from hubplugin.jobs.correct import refit as refit
    from hubplugin.jobs.diagnose import diagnose as diagnose
    from hubplugin.jobs.health import inspect as inspect
    from hubplugin.jobs.write import refresh as refresh
    from hubplugin.jobs.write import remove as remove
    from hubplugin.jobs.write import rollback as rollback
    from hubplugin.model import OffsetModel as OffsetModel
    from hubplugin.model import load as load
    from hubplugin.recording import Recorder as Recorder
    from hubplugin.registry import open_store as open_store

# The module of each public name. Modules are imported on first use, so that `import
# hubplugin` is fast and does not load torch.
_MODULE_OF = {
    "Bank": "bank",
    "Compute": "compute",
    "CorrectionRefused": "errors",
    "HubpluginError": "errors",
    "InputError": "errors",
    "OffsetModel": "model",
    "Recorder": "recording",
    "StoreError": "errors",
    "apply": "jobs.correct",
    "diagnose": "jobs.diagnose",
    "evaluate": "evaluation.evaluate",
    "fit": "fitting",
    "inspect": "jobs.health",
    "load": "model",
    "open_store": "registry",
    "refit": "jobs.correct",
    "refresh": "jobs.write",
    "remove": "jobs.write",
    "rollback": "jobs.write",
}

__all__ = ["__version__", *_MODULE_OF]


_MODULES = (
    "errors",
    "executors",
    "guard",
    "methods",
    "metric",
    "rerank",
    "store",
    "testing",
)
"""The public modules, which the docs name."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hubplugin.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hubplugin' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hubplugin.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
