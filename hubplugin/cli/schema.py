"""The figures of every command with `--json`; docs/reference/json.md is made from them, and no command imports this."""

from __future__ import annotations

from hubplugin.cli import figures, looked
from hubplugin.evaluation.store_result import StoreEvaluation

FIGURES = {
    "evaluate STORE": StoreEvaluation,
    "diagnose": looked.DiagnoseFigures,
    "inspect": looked.InspectFigures,
    "apply": figures.AppliedFigures,
    "refresh": figures.AppliedFigures,
    "remove": figures.RemoveFigures,
    "versions": figures.VersionsFigures,
    "rollback": figures.RollbackFigures,
    "refit": figures.RefitFigures,
    "monitor": figures.MonitorFigures,
    "bank": looked.BankCommandFigures,
    "explain": looked.ExplainFigures,
    "switch": looked.SwitchFigures,
    "quarantine": looked.QuarantineFigures,
}
"""What each command prints, beside its name and the version; `evaluate` on files prints `Results`."""
