"""The results of an evaluation and their page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Field, InstanceOf

from hubplugin.errors import InputError
from hubplugin.measures.hubness import Hubness
from hubplugin.measures.significance import Figure, Side
from hubplugin.model import Setting
from hubplugin.results import (
    NEVER,
    RECALL,
    SKEWNESS,
    WORST,
    Bar,
    Hub,
    Page,
    Result,
    Row,
    Section,
    Step,
    compare,
    describe_changes,
    list_hubs,
)

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Example:
    """A query whose true target comes first in only one of two searches.

    outcome: "won" if it comes first in the corrected search, "lost" if in the raw one.
    right: The name of the true target that comes first.
    wrong: The name of the target that comes first in the other search.
    """

    outcome: str
    query: str
    right: str
    wrong: str

    def row(self) -> Row:
        """Return a row with the query and the first target of either search."""
        sign = 1 if self.outcome == "won" else -1
        firsts = [f"right: {self.right}", f"wrong: {self.wrong}"]
        return Row((f"{self.outcome}: {self.query}",), sign, firsts)


@dataclass(frozen=True)
class MethodResult:
    """A ranking of all queries: the raw search, a method, or the correction in a store.

    Shares are between 0 and 1. The fields from median_rank to skewness are None for a
    store, which ranks only k targets.

    label: The method in the form in which it was requested; "corrected" for a store.
    parameters: All parameters, including defaults.
    recall: R@k by k, for the cut-off and for 1, 5 and 10 if they are below it.
    worst: The share of the queries that find the worst hub.
    occurrences: The number of targets with the k-occurrence N, by N.
    storable: True if one offset per target expresses the method.
    transductive: True if the method needs all queries in advance, so that no search can
        use it.
    hubness: None under a filter, since a store does not count the targets that pass it.
    most_found: The share of all places that the most found 1 % of the targets take; None
        under a filter.
    versus_raw: The comparison with the raw search; None for the raw search itself.
    adjusted_p: The p of `versus_raw`, corrected for the number of methods tried
        (Benjamini & Hochberg 1995).
    """

    label: str
    method: str
    parameters: dict[str, Setting]
    recall: dict[int, Figure]
    worst: float
    occurrences: dict[int, int]
    storable: bool
    transductive: bool
    best_ranks: Annotated[InstanceOf[np.ndarray], Field(exclude=True)] = field(
        repr=False, compare=False
    )
    hubness: Hubness | None = None
    most_found: float | None = None
    versus_raw: Side | None = None
    adjusted_p: float | None = None
    median_rank: Figure | None = None
    mean_rank: Figure | None = None
    ndcg: Figure | None = None
    skewness: Figure | None = None

    @property
    def sign(self) -> int:
        """1 if it puts more true targets first than the raw search, -1 if fewer, 0 if the
        difference may be chance among so many methods."""
        if (
            self.versus_raw is None
            or self.adjusted_p is None
            or self.adjusted_p >= SIGNIFICANT
        ):
            return 0
        return 1 if self.versus_raw.won > self.versus_raw.lost else -1


@dataclass(frozen=True, repr=False)
class Results(Result):
    """The results of `evaluate`: raw search and corrections on the same queries.

    judged: The number of queries that have a true target.
    k: The number of targets that a query finds, for the k-occurrence and nDCG.
    methods: One for each ranking; the raw search comes first.
    best: The label of the method recommended on these queries; None if no method is better
        than the raw search beyond chance.
    anti_hubs: Some of the targets that no query finds.
    examples: Queries that the method `shown` won and lost.
    store: The URL of the store.
    correction: The active correction of the store.
    condition: The filter of the search in the store.
    forecast: R@1 of held-out queries of the bank at the fit; None if it was not measured.
    """

    metric: str
    queries: int
    judged: int
    targets: int
    k: int
    seed: int
    methods: list[MethodResult]
    best: str | None
    hubs: list[Hub]
    anti_hubs: list[str] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)
    store: str | None = None
    correction: str | None = None
    condition: str | None = None
    forecast: Side | None = None

    def __getitem__(self, label: str) -> MethodResult:
        """Return the method called `label`. Raises InputError that lists the labels."""
        for method in self.methods:
            if method.label == label:
                return method
        labels = ", ".join(method.label for method in self.methods)
        raise InputError(f"no method {label!r} in this evaluation: use one of {labels}")

    @property
    def raw(self) -> MethodResult:
        return self.methods[0]

    @property
    def shown(self) -> MethodResult | None:
        """The method shown beside the raw search, if any, see `usable_best`."""
        return usable_best(self.methods)

    def compare(self, first: str, second: str) -> Side:
        """Compare method `second` with `first`, on the same queries.

        Args:
            first: the label of the method before.
            second: the label of the method after.

        Raises:
            InputError: No method has such a label.
        """
        before = self[first].best_ranks <= 1
        return Side.of(before, self[second].best_ranks <= 1)

    def page(self) -> Page:
        headline, sign = self._headline()
        sides = [self.raw]
        if self.shown is not None:
            sides.append(self.shown)
        sections = [self._compare(sides)]
        steps = []
        if self.store is None:
            sections.append(self._list_methods())
        elif sign < 0:
            steps.append(Step("searches are raw again", "remove"))
        hubs = list_hubs(self.hubs, self.k, self.anti_hubs)
        scene = f"{self.queries:,} queries · {self.targets:,} targets · {self.metric}"
        if self.condition is not None:
            scene += f" · filter {self.condition}"
        sections += [hubs, self._count_changes()]
        return Page(headline, sign, scene, sections, steps)

    def _count_changes(self) -> Section:
        """Return the section of how many queries were won and lost, with examples."""
        versus = self.change
        if versus is None:
            return Section("")
        most = max(versus.won, versus.lost, 1)
        won = Bar(f"{versus.won:,}", versus.won / most)
        lost = Bar(f"{versus.lost:,}", versus.lost / most)
        rows = [
            Row(("won: the true target now comes first", won), 1),
            Row(("lost: it no longer does", lost), -1),
            *(example.row() for example in self.examples),
        ]
        return Section("Won and lost", (), rows, ("", "queries"))

    def _headline(self) -> tuple[str, int]:
        """Return the headline, and the sign of a change of R@1 beyond chance, else 0."""
        shown = self.shown
        if shown is None or self.change is None:
            if self.store is not None:
                return "no active correction: only the raw search was measured", 0
            return "only the raw search: corrections need a bank of example queries", 0
        if self.store is not None:
            sign = self.change.change.sign
            outcome = {1: "it helps", 0: "it neither helps nor harms beyond chance"}
            worst = (self.raw.worst, shown.worst)
            changes = describe_changes(worst, self.queries, self.change)
            return f"{outcome.get(sign, 'it does harm')}; {changes}", sign
        if self.best is None:
            says = "no usable method puts more true targets first than the raw search"
            return f"no correction; {says} beyond chance", 0
        says = "because it puts the most true targets first"
        return (
            f"the best method is {shown.label}, {says}: {shown.recall[1].value:.1%}",
            1,
        )

    @property
    def change(self) -> Side | None:
        """R@1 of the raw search and of the method `shown`."""
        return None if self.shown is None else self.shown.versus_raw

    def _compare(self, sides: Sequence[MethodResult]) -> Section:
        """Return the section that compares the raw search and the method shown."""
        measures: dict[str, Any] = {
            RECALL: self.change,
            "as forecast by the fit": self.forecast,
        }
        for k in self.raw.recall:
            if k > 1 or self.change is None:
                measures[f"R@{k}"] = [side.recall[k].value for side in sides]
        hubness = [side.hubness for side in sides if side.hubness is not None]
        measures |= {
            WORST: [side.worst for side in sides],
            "places of the top 1%": [side.most_found for side in sides],
            NEVER: [each.anti_hub_share for each in hubness],
            SKEWNESS: [each.skewness for each in hubness],
        }
        note = f"{sides[-1].label}."
        if self.correction is not None:
            note = f"Active: {self.correction}."
        elif self.best is not None:
            note += " It was chosen on these queries, so new ones gain a little less."
        chart = {side.label: side.occurrences for side in sides}
        return compare("Raw and corrected", measures, chart=chart, note=note)

    def _list_methods(self) -> Section:
        """Return the section of every method, with the direction of its change."""
        k = max(self.raw.recall)
        rows = []
        for each in self.methods:
            recall = 100 * each.recall[1].value
            gain = recall - 100 * self.raw.recall[1].value
            cells = [each.label, f"{recall:.1f}", f"{gain:+.1f}"]
            cells.append("" if each.adjusted_p is None else f"{each.adjusted_p:.3f}")
            cells.append(f"{100 * each.recall[k].value:.1f}")
            for figure in (each.median_rank, each.ndcg, each.skewness):
                cells.append("" if figure is None else f"{figure.value:.2f}")
            rows.append(Row(cells, None if each is self.raw else each.sign))
        columns = f"method R@1 gain p R@{k} rank nDCG skew".split()
        note = (
            "gain: over raw. p: McNemar's exact test, corrected for the number of "
            f"methods. rank: the median. nDCG: at {self.k}. skew: skewness."
        )
        return Section("Every method", (), rows, columns, note=note)


def usable_best(methods: Sequence[MethodResult]) -> MethodResult | None:
    """Return the method of the highest R@1 that a search can use, None if there is none.

    The first of `methods` is the raw search, which is left out. Among equals, the less
    skewed method wins.
    """
    usable = (method for method in methods[1:] if not method.transductive)
    return max(
        usable,
        key=lambda m: (m.recall[1].value, -(m.hubness.skewness if m.hubness else 0.0)),
        default=None,
    )
