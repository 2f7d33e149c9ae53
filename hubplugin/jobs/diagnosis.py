"""The judgement before anything is fitted: what is wrong with a search, who the hubs are, could a bank mend it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hubplugin.causes import HUBBY, Finding
from hubplugin.errors import InputError
from hubplugin.jobs.evidence import DEEP, findings
from hubplugin.jobs.naming import Naming
from hubplugin.measures.chance import (
    most_found,
    never_found_by_chance,
    share_of_most_found,
    share_of_most_found_by_chance,
)
from hubplugin.measures.hubness import Hubness, hubs, k_occurrence, skewness_by_chance
from hubplugin.metric import Metric
from hubplugin.reductions import Compute
from hubplugin.search import TopK, search
from hubplugin.selection import (
    Banks,
    Choice,
    CurvePoint,
    Experiment,
    Judgement,
    Pairs,
    choose_by,
    curve_by,
    judge_by,
)
from hubplugin.selection.experiment import require_enough
from hubplugin.selection.trials import OCCURRENCE
from hubplugin.texts import Embed, vectors_of
from hubplugin.vectors import Progress, Scannable, VectorLike, Vectors

if TYPE_CHECKING:
    from hubplugin.store import Id, Store

logger = logging.getLogger(__name__)

LISTED = 20
"""How many that are never found are named."""


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    targets, queries: how many. hubness: of the raw search, over all targets and queries. most_found, never_found: the
    share of all places that the most found 1 % of the targets take, and the share of the targets that no query finds;
    `_by_chance`: what they would be without hubness. hubs: the targets found most often, as (id in the store or row,
    queries that found it among their k nearest). anti_hubs: ids of some that no query found. names: of hubs and
    anti-hubs, where they have one. findings: the causes looked for. choice: what would be fitted. judgement: whether
    it would help, with the expected gain of R@1 where there are pairs. curve: by size of the bank, where asked for.
    """

    targets: int
    queries: int
    hubness: Hubness
    most_found: float
    most_found_by_chance: float
    never_found: float
    never_found_by_chance: float
    hubs: list[tuple[Id, int]]
    anti_hubs: list[Id]
    names: Mapping[Id, str]
    findings: list[Finding]
    choice: Choice
    judgement: Judgement
    curve: list[CurvePoint] = field(default_factory=list)
    occurrences: Mapping[int, int] = field(default_factory=dict, repr=False)

    @property
    def helps(self) -> bool:
        return not self.judgement.objections

    @property
    def hubby(self) -> bool:
        """Whether the search is hubby beyond chance."""
        return self.hubness.skewness - skewness_by_chance(self.queries, self.hubness.k, self.targets) >= HUBBY

    @property
    def causes(self) -> list[Finding]:
        """Those of the findings that are there."""
        return [finding for finding in self.findings if finding.found]

    def called(self, key: Id) -> str:
        """The name of a hub or anti-hub, its id where it has none."""
        return f"{self.names[key]} [{key}]" if key in self.names else str(key)

    def sentences(self) -> list[str]:
        """What was seen, in the words of whoever searches."""
        k, most, never = self.hubness.k, most_found(self.targets), round(self.never_found * self.targets)
        usual = k * self.queries / self.targets
        return [
            f"{self.targets:,} documents, {self.queries:,} queries",
            f"{_percent(most / self.targets)} of your documents ({most:,}) take {_percent(self.most_found)} of all "
            f"places in the top {k}; by chance it would be {_percent(self.most_found_by_chance)}",
            f"{never:,} documents ({_percent(self.never_found)}) are found by no query; by chance it would be "
            f"{_percent(self.never_found_by_chance)}",
            f"the document that is found most often comes back for {self.hubness.largest:,} queries "
            f"({_percent(self.hubness.largest / self.queries)}), where {usual:.1f} are usual",
        ]

    def verdict(self) -> str:
        """What it is, and what to do first."""
        listed = ", ".join(finding.cause for finding in self.causes)
        if self.hubby:
            also = f", and there is more than that: {listed}; mend that first" if listed else ""
            return f"there is hubness{also}"
        return f"this is not hubness, but: {listed}" if listed else "there is no hubness, and no other cause was found"

    def __str__(self) -> str:
        raw, after, hubness = self.judgement.uncorrected, self.judgement.candidate, self.hubness
        chance = skewness_by_chance(self.queries, hubness.k, self.targets)
        listed = ", ".join(f"{self.called(key)} by {count}" for key, count in self.hubs[:10])
        never = ", ".join(self.called(key) for key in self.anti_hubs[:10])
        lines = [
            *self.sentences(),
            f"hubs: {listed}",
            *([f"never found, for instance: {never}"] if never else []),
            f"hubness: {'YES' if self.hubby else 'no'}. skewness {hubness.skewness:.2f} ({chance:.2f} by chance)",
            *(str(finding) for finding in self.findings),
            f"in short: {self.verdict()}",
            f"{self.judgement.bank}",
            f"candidate: {after.name}, {self.choice.reason}",
            f"expected: skewness from {raw.skewness:.2f} to {after.skewness:.2f}",
        ]
        if after.gain is not None and after.error is not None:
            low, high = 100 * (after.gain - 1.96 * after.error), 100 * (after.gain + 1.96 * after.error)
            lines[-1] += f", R@1 {100 * after.gain:+.1f} points (95 % interval {low:+.1f} to {high:+.1f})"
        lines += self.judgement.notes
        if self.curve:
            lines += [
                "the default method with ever more of the bank, on the same held-out queries:",
                *(f"  {point}" for point in self.curve),
            ]
        verdict = "it would help" if self.helps else "it would be refused: " + "; ".join(self.judgement.objections)
        return "\n".join([*lines, f"verdict: {verdict}"])


def diagnose(
    targets: VectorLike | Store,
    queries: VectorLike | Sequence[str],
    target_bank: VectorLike | None = None,
    *,
    pairs: Pairs = None,
    same_kind: bool = False,
    metric: Metric | str | None = None,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
    seed: int = 0,
    names: Naming | None = None,
    texts: Naming | None = None,
    curve: bool = False,
    embed: Embed = None,
) -> Diagnosis:
    """How hubby a gallery is for some queries, who the hubs are, and whether these queries as a bank would mend it.

    targets: [n, d], or a store, whose metric is then the default; otherwise that is cosine. queries: [m, d], example
    queries as for `hubplugin.fit`, which also has `embed`. target_bank, pairs: as for `hubplugin.choose`; same_kind: as
    for `hubplugin.judge`. Nothing is changed. names, texts: functions from ids (rows where `targets` is no store) to
    what hubs are called, and to the texts of documents, by which short ones are found; `hubplugin.jobs.naming` makes
    them. curve: also try parts of the bank, to see what size of it helps how much.

    The expected gain is measured on held-out queries that also chose the candidate, so it leans to the bright side by
    a fraction of its interval. Raises InputError for anything that cannot be used.
    """
    chosen = Metric.parse(metric if metric is not None else getattr(targets, "metric", Metric.COSINE))
    compute = Compute(device, memory, progress)
    bank = vectors_of(queries, embed, progress=progress)
    _require_dim(bank, targets)
    banks = Banks.read(bank, target_bank, pairs, chosen, compute, same_kind)
    require_enough(len(banks.given.distinct))  # before the gallery is read
    banks = banks.against(targets)
    given, gallery = banks.given, banks.given.require_targets("auto")
    logger.info("diagnosing %d targets by %d queries", gallery.rows, len(given.query_bank))
    nearest = TopK(DEEP)
    search(given.query_bank, gallery, chosen, compute, nearest, what="finding the hubs")
    found = nearest.rows[0]
    occurrence = k_occurrence(found[:, :OCCURRENCE], gallery.rows)
    causes = findings(banks, found, texts, lambda rows: _ids_of(targets, rows), seed)
    with closing(Experiment(banks, seed)) as experiment:
        choice = choose_by(experiment)
        (judgement,) = judge_by(experiment, [choice.winner])
        points = curve_by(experiment) if curve else []
    logger.info("diagnosed")
    return Diagnosis(
        targets=gallery.rows,
        queries=len(given.query_bank),
        findings=causes,
        choice=choice,
        judgement=judgement,
        curve=points,
        **_told(targets, occurrence, len(given.query_bank), names),
    )


def _require_dim(bank: Vectors, targets: object) -> None:
    dim = getattr(targets, "dim", bank.dim)  # which a store knows without being read
    if dim != bank.dim:
        raise InputError(f"{bank.name} has {bank.dim} dimensions, {getattr(targets, 'url', 'targets')} has {dim}")


def _told(targets: object, occurrence: np.ndarray, queries: int, names: Naming | None) -> dict[str, Any]:
    """What the k-occurrence [n] says, by name."""
    count, k = len(occurrence), min(OCCURRENCE, len(occurrence))
    hub_rows, never = hubs(occurrence), np.flatnonzero(occurrence == 0)
    some = never[np.linspace(0, len(never) - 1, min(len(never), LISTED)).astype(int)]
    ids = _ids_of(targets, np.concatenate([hub_rows, some]))
    called = dict(zip(ids, names(ids), strict=True)) if names is not None else {}
    values, times = np.unique(occurrence, return_counts=True)
    return {
        "hubness": Hubness.of(occurrence, k),
        "most_found": share_of_most_found(occurrence),
        "most_found_by_chance": share_of_most_found_by_chance(queries, k, count),
        "never_found": len(never) / count,
        "never_found_by_chance": never_found_by_chance(queries, k, count),
        "hubs": list(zip(ids[: len(hub_rows)], occurrence[hub_rows].tolist(), strict=True)),
        "anti_hubs": ids[len(hub_rows) :],
        "names": {key: name for key, name in called.items() if name},
        "occurrences": dict(zip(values.tolist(), times.tolist(), strict=True)),
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ids_of(targets: object, rows: np.ndarray) -> list[Id]:
    """The ids of some rows: their own where `targets` is a store, else their numbers."""
    if not isinstance(targets, Scannable):
        return list(rows.tolist())
    wanted = set(rows.tolist())
    found = {row: name for row, name in enumerate(_ids(targets)) if row in wanted}
    return [found[row] for row in rows.tolist()]


def _ids(store: Scannable) -> Iterator[Id]:
    for batch in store.scan():
        yield from batch.ids
