"""What a configuration does on held-out bank queries, as values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hubplugin.measures.hubness import Hubness
from hubplugin.methods import Method
from hubplugin.model import OffsetModel, Setting

OCCURRENCE = 10
"""Hubness is the skewness of the 10-occurrence, as in DBSN and QB-Norm."""


@dataclass(frozen=True)
class Candidate:
    """One configuration, tried on held-out bank queries.

    skewness: of the k-occurrence. cost: mean fall of the similarity of the first target found, as a share of the mean
    distance between the two nearest. recall: R@1, 0 to 1; rank: geometric mean rank of the probes' own targets; both
    None without pairs. gain, error: of R@1 over no correction, and its standard error. largest, never: of the probes,
    the share that finds the worst hub, and of the targets tried, the share that none finds.
    """

    method: str
    parameters: dict[str, Setting]
    skewness: float
    cost: float
    recall: float | None = None
    rank: float | None = None
    gain: float | None = None
    error: float | None = None
    largest: float | None = None
    never: float | None = None

    @property
    def name(self) -> str:
        return configuration_name(self.method, self.parameters)

    def __str__(self) -> str:
        text = f"{self.name:34s} skewness {self.skewness:6.2f}  cost {self.cost:5.2f}"
        if self.recall is not None and self.gain is not None and self.error is not None:
            text += f"  R@1 {100 * self.recall:5.1f} ({100 * self.gain:+.1f} +- {196 * self.error:.1f})"
            text += f"  mean rank {self.rank:.2f}"
        return text


@dataclass(frozen=True)
class Trial:
    """One configuration, or model (None: no correction), over all folds. costs [probes]; hits, log_ranks
    [probes] or None."""

    configuration: Method | OffsetModel | None
    occurrence: np.ndarray
    costs: np.ndarray
    gap: float
    hits: np.ndarray | None
    log_ranks: np.ndarray | None

    @property
    def method(self) -> Method:
        assert isinstance(self.configuration, Method)
        return self.configuration

    def candidate(self, uncorrected: Trial) -> Candidate:
        found = {}
        if self.hits is not None and self.log_ranks is not None and uncorrected.hits is not None:
            difference = self.hits - uncorrected.hits
            found = {
                "recall": float(self.hits.mean()),
                "rank": float(np.exp(self.log_ranks.mean())),
                "gain": float(difference.mean()),
                "error": standard_error(difference),
            }
        hubness, tried = Hubness.of(self.occurrence, OCCURRENCE), self.configuration
        return Candidate(
            method="none" if tried is None else tried.name if isinstance(tried, Method) else tried.method,
            parameters={} if tried is None else tried.parameters,
            skewness=hubness.skewness,
            cost=float(self.costs.mean()) / self.gap,
            largest=hubness.largest / len(self.costs),
            never=hubness.anti_hub_share,
            **found,
        )


def pooled(trials: Sequence[Trial]) -> Trial:
    """One trial of the queries of all of `trials`, each on a gallery of its own."""
    known = [each for each in trials if each.hits is not None]
    hits, ranks = (
        np.concatenate([getattr(each, name) for each in known]) if known else None for name in ("hits", "log_ranks")
    )
    occurrence, costs = (np.concatenate([getattr(each, name) for each in trials]) for name in ("occurrence", "costs"))
    gap = float(np.average([each.gap for each in trials], weights=[len(each.costs) for each in trials]))
    return replace(trials[0], occurrence=occurrence, costs=costs, gap=gap, hits=hits, log_ranks=ranks)


def standard_error(differences: np.ndarray) -> float:
    return float(differences.std(ddof=1) / math.sqrt(len(differences)))


def configuration_name(method: str, parameters: dict[str, Setting]) -> str:
    return f"{method}({', '.join(f'{key}={_short(value)}' for key, value in parameters.items())})"


def _short(value: Setting) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
