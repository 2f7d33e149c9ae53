"""Corrections that depend on the query, which no stored offset can express: they re-rank a list of candidates.

A rule is fitted once. Whatever it must know of a target when a query comes is what `keep` gives for it, and that
is one number or a bit, so that any store can hold it beside the vector:

    dis             the offset that the target has already, and one bit
    dualdis         the same for each of its two banks: a part of the offset, and one bit
    dsl             one number
    gc              nothing: it reads the candidates' own vectors

New targets get theirs from `keep` without a refit, as they get their offsets.
"""

from hubplugin.query_dependent.methods import QUERY_METHODS, QueryMethod, fit_rule
from hubplugin.query_dependent.rules import DualDynamic, DualSoftmax, Dynamic, GloballyCorrected, Reranker, Rule

__all__ = [
    "QUERY_METHODS",
    "DualDynamic",
    "DualSoftmax",
    "Dynamic",
    "GloballyCorrected",
    "QueryMethod",
    "Reranker",
    "Rule",
    "fit_rule",
]
