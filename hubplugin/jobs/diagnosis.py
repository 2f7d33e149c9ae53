"""The judgement before anything is fitted: how hubby a gallery is, who the hubs are, could a bank mend it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hubplugin.errors import InputError
from hubplugin.measures.hubness import Hubness, hubs, k_occurrence, skewness_by_chance
from hubplugin.metric import Metric
from hubplugin.reductions import Compute
from hubplugin.search import TopK, search
from hubplugin.selection import Banks, Choice, Experiment, Judgement, Pairs, choose_by, judge_by
from hubplugin.selection.experiment import OCCURRENCE, require_enough
from hubplugin.vectors import Progress, Scannable, VectorLike, as_vectors

if TYPE_CHECKING:
    from hubplugin.store import Id, Store


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    targets, queries: how many. hubness: of the raw search, over all targets and queries. hubs: the targets found most
    often, as (id in the store or row, queries that found it among their k nearest). choice: what would be fitted.
    judgement: whether it would help, with the expected gain of R@1 where there are pairs.
    """

    targets: int
    queries: int
    hubness: Hubness
    hubs: list[tuple[Id, int]]
    choice: Choice
    judgement: Judgement

    @property
    def helps(self) -> bool:
        return not self.judgement.objections

    def __str__(self) -> str:
        raw, after, hubness = self.judgement.uncorrected, self.judgement.candidate, self.hubness
        chance = skewness_by_chance(self.queries, hubness.k, self.targets)
        usual = hubness.k * self.queries / self.targets
        listed = ", ".join(f"{name!r} by {count}" for name, count in self.hubs[:10])
        lines = [
            f"{self.targets} targets, {self.queries} queries, {hubness.k} nearest",
            f"hubness: skewness {hubness.skewness:.2f} ({chance:.2f} by chance), "
            f"{hubness.anti_hub_share:.0%} of the targets are never found, "
            f"the worst hub is found by {hubness.largest} queries where {usual:.1f} are usual",
            f"hubs: {listed}",
            f"{self.judgement.bank}",
            f"candidate: {after.name}, {self.choice.reason}",
            f"expected: skewness from {raw.skewness:.2f} to {after.skewness:.2f}",
        ]
        if after.gain is not None and after.error is not None:
            low, high = 100 * (after.gain - 1.96 * after.error), 100 * (after.gain + 1.96 * after.error)
            lines[-1] += f", R@1 {100 * after.gain:+.1f} points (95 % interval {low:+.1f} to {high:+.1f})"
        lines += self.judgement.notes
        verdict = "it would help" if self.helps else "it would be refused: " + "; ".join(self.judgement.objections)
        return "\n".join([*lines, f"verdict: {verdict}"])


def diagnose(
    targets: VectorLike | Store,
    queries: VectorLike,
    target_bank: VectorLike | None = None,
    *,
    pairs: Pairs = None,
    same_kind: bool = False,
    metric: Metric | str | None = None,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
    seed: int = 0,
) -> Diagnosis:
    """How hubby a gallery is for some queries, who the hubs are, and whether these queries as a bank would mend it.

    targets: [n, d], or a store, whose metric is then the default; otherwise that is cosine. queries: [m, d], example
    queries as for `hubplugin.fit`. target_bank, pairs: as for `hubplugin.choose`; same_kind: as
    for `hubplugin.judge`. Nothing is changed.

    The expected gain is measured on held-out queries that also chose the candidate, so it leans to the bright side by
    a fraction of its interval. Raises InputError for anything that cannot be used.
    """
    chosen = Metric.parse(metric if metric is not None else getattr(targets, "metric", Metric.COSINE))
    compute = Compute(device, memory, progress)
    bank = as_vectors(queries, "query bank")
    dim = getattr(targets, "dim", bank.dim)  # which a store knows without being read
    if dim != bank.dim:
        raise InputError(f"{bank.name} has {bank.dim} dimensions, {getattr(targets, 'url', 'targets')} has {dim}")
    banks = Banks.read(bank, target_bank, pairs, chosen, compute, same_kind)
    require_enough(len(banks.given.distinct))  # before the gallery is read
    banks = banks.against(targets)
    given, gallery = banks.given, banks.given.require_targets("auto")
    nearest = TopK(OCCURRENCE)
    search(given.query_bank, gallery, chosen, compute, nearest, what="finding the hubs")
    occurrence = k_occurrence(nearest.rows[0], gallery.rows)
    rows = hubs(occurrence)
    with closing(Experiment(banks, seed)) as experiment:
        choice = choose_by(experiment)
        (judgement,) = judge_by(experiment, [choice.winner])
    return Diagnosis(
        targets=gallery.rows,
        queries=len(given.query_bank),
        hubness=Hubness.of(occurrence, nearest.k),
        hubs=list(zip(_names(targets, rows), occurrence[rows].tolist(), strict=True)),
        choice=choice,
        judgement=judgement,
    )


def _names(targets: object, rows: np.ndarray) -> list[Id]:
    """The ids of some rows: their own where `targets` is a store, else their numbers."""
    if not isinstance(targets, Scannable):
        return list(rows.tolist())
    wanted = set(rows.tolist())
    found = {row: name for row, name in enumerate(_ids(targets)) if row in wanted}
    return [found[row] for row in rows.tolist()]


def _ids(store: Scannable) -> Iterator[Id]:
    for batch in store.scan():
        yield from batch.ids
