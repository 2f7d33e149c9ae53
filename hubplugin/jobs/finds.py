"""How often the queries of a model's bank find each target of the gallery: counted at the fit, to be compared with."""

from __future__ import annotations

import numpy as np

from hubplugin.measures.hubness import k_occurrence, skewness, skewness_by_chance
from hubplugin.methods import FitInput
from hubplugin.methods.robust import probes
from hubplugin.model import FindsAtFit, OffsetModel
from hubplugin.search import TopK, search
from hubplugin.selection.experiment import OCCURRENCE

QUERIES = 200
"""Queries that are counted, at the fit and by `monitor`. Skewness depends on how many they are."""


def asked(model: OffsetModel) -> np.ndarray:
    """The queries of the bank of `model` that are counted, the same ones each time: [q, d]."""
    bank = model.terms[0].bank
    queries: np.ndarray = bank[probes(len(bank), QUERIES)]
    return queries


def counted(model: OffsetModel, given: FitInput) -> OffsetModel:
    """`model`, fitted on the banks and targets of `given`, with what its bank found in them."""
    targets, queries, nearest = given.require_targets(model.method), asked(model), TopK(OCCURRENCE)
    if len(queries) < 2 or targets.rows <= OCCURRENCE:
        return model
    offsets = model.members.offsets(targets, device=given.compute.device, memory=given.compute.memory)
    both = np.stack([np.zeros_like(offsets), offsets])
    search(queries, targets, model.metric, given.compute, nearest, offsets=both, what="counting hubs")
    raw, corrected = (k_occurrence(rows, targets.rows) for rows in nearest.rows)
    chance = skewness_by_chance(len(queries), OCCURRENCE, targets.rows)
    largest = float(corrected.max() / len(queries))
    return model.having(finds=FindsAtFit(len(queries), skewness(raw), skewness(corrected), chance, largest))
