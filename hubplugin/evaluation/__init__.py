"""Raw search and corrections side by side, on queries whose true targets are known."""

from hubplugin.evaluation.results import MethodResult, Results

__all__ = ["MethodResult", "Results"]
