"""The results of an evaluation and their page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hubplugin.errors import InputError
from hubplugin.measures.hubness import Hubness
from hubplugin.measures.significance import Figure, Side
from hubplugin.model import Setting
from hubplugin.results import (
    Bar,
    Hub,
    Outcome,
    Page,
    Result,
    Row,
    Section,
    Step,
    bar_of_change,
    describe_changes,
    list_hubs,
    points,
)

SIGNIFICANT = 0.05
"""The adjusted p below which a change of R@1 is beyond chance."""


@dataclass(frozen=True)
class MethodResult:
    """A ranking of all queries: the raw search, a method, or the correction in a store.

    Shares are between 0 and 1. The fields from median_rank to ndcg are None for a store,
    which ranks only k targets.

    label: The method as it was requested; "corrected" for a store.
    parameters: All parameters, including defaults.
    recall: R@k by k, for the cut-off and for 1, 5 and 10 if they are below it.
    worst: The share of the queries that find the worst hub.
    occurrences: The number of targets with the k-occurrence N, by N.
    transductive: True if the method needs all queries in advance, so that no search can
        use it.
    hubness: None under a filter, since a store does not count the targets that pass it.
    versus_raw: The comparison with the raw search; None for the raw search itself.
    adjusted_p: The p of `versus_raw`, corrected for the number of methods tried
        (Benjamini & Hochberg 1995); 1 for the raw search itself.
    """

    label: str
    method: str
    parameters: dict[str, Setting]
    recall: dict[int, Figure]
    worst: float
    occurrences: dict[int, int]
    transductive: bool
    hubness: Hubness | None = None
    versus_raw: Side | None = None
    adjusted_p: float = 1.0
    median_rank: Figure | None = None
    mean_rank: Figure | None = None
    ndcg: Figure | None = None

    @property
    def sign(self) -> int:
        """1 if more true targets come first than in the raw search, -1 if fewer do.

        0 if the difference may be chance among so many methods.
        """
        if self.versus_raw is None or self.adjusted_p >= SIGNIFICANT:
            return 0
        return self.versus_raw.change.sign


@dataclass(frozen=True, repr=False)
class Results(Result):
    """The results of `evaluate`: raw search and corrections on the same queries.

    judged: The number of queries that have a true target.
    k: The number of targets that each query finds, for the k-occurrence and nDCG.
    methods: One result for each ranking; the raw search comes first.
    best: The label of the method recommended for these queries; None if no method is
        better than the raw search beyond chance.
    anti_hubs: Some of the targets that no query finds.
    examples: Some of the queries that the method `shown` won, with a right answer, and
        some that it lost.
    store: The URL of the store.
    correction: The active correction of the store.
    condition: The filter used in searches of the store.
    forecast: The change in R@1 predicted by the fit; None if it was not measured.
    """

    metric: str
    queries: int
    judged: int
    targets: int
    k: int
    methods: list[MethodResult]
    best: str | None
    hubs: list[Hub]
    anti_hubs: list[str] = field(default_factory=list)
    examples: list[Outcome] = field(default_factory=list)
    store: str | None = None
    correction: str | None = None
    condition: str | None = None
    forecast: Figure | None = None

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

    @property
    def change(self) -> Side | None:
        """R@1 of the raw search and of the method `shown`."""
        return None if self.shown is None else self.shown.versus_raw

    def page(self) -> Page:
        headline = "the raw search alone: there is no correction to compare it with"
        sections = [self._list_rankings(), list_hubs(self.hubs, self.k, self.anti_hubs)]
        sign = 0
        steps = []
        if self.shown is not None and self.change is not None:
            sign = self.shown.sign
            headline = self._headline(self.shown, self.change)
            sections.append(self._count_changes(self.change))
            if sign < 0 and self.store is not None:
                steps.append(Step("searches are raw again", job="remove"))
        subject = f"{self.queries:,} queries · {self.targets:,} targets · {self.metric}"
        if self.condition is not None:
            subject += f" · filter {self.condition}"
        return Page(headline, sign, subject, sections, steps)

    def _headline(self, shown: MethodResult, change: Side) -> str:
        """Say whether the method `shown` helps, and what it changes."""
        verdicts = {1: "helps", 0: "neither helps nor harms beyond chance", -1: "harms"}
        name = "the correction"
        if self.store is None:
            name = f"{shown.label}, the best here that a search can use,"
        changes = describe_changes((self.raw.worst, shown.worst), self.queries, change)
        return f"{name} {verdicts[shown.sign]}; {changes}"

    def _list_rankings(self) -> Section:
        """Return the section of the raw search and of each correction."""
        k = max(self.raw.recall)
        charted = (self.raw, self.shown)
        chart = {
            method.label: method.occurrences
            for method in self.methods
            if method in charted
        }
        rows = []
        for method in self.methods:
            cells: list[str | Bar] = [method.label, f"{method.recall[1].value:.1%}"]
            sign = None
            if method.versus_raw is None:
                cells.append("")
            else:
                cells.append(bar_of_change(method.versus_raw.change))
                sign = method.sign
            cells += [f"{method.recall[k].value:.1%}", f"{method.worst:.1%}"]
            cells.append(
                "" if method.hubness is None else f"{method.hubness.skewness:.2f}"
            )
            rows.append(Row(cells, sign))
        columns = ("R@1", "points (95%)", f"R@{k}", "worst hub", "skewness")
        note = (
            "R@1: right answer first. Worst hub: the share of all queries that find it. "
            "Better and worse are beyond chance, however many methods are compared."
        )
        if self.correction is not None:
            note += f" Active: {self.correction}."
        if self.forecast is not None:
            note += f" The fit foretold {points(self.forecast)} points."
        return Section("Each search", (), rows, columns, chart, note)

    def _count_changes(self, change: Side) -> Section:
        """Return the section of how many queries were won and lost, with examples."""
        most = max(change.won, change.lost, 1)
        rows = []
        for name, sign, count in (
            ("won: a right answer now comes first", 1, change.won),
            ("lost: it no longer does", -1, change.lost),
        ):
            # The examples of won queries are right after the correction.
            examples = [str(each) for each in self.examples if each.right == (sign > 0)]
            rows.append(Row((name, Bar(f"{count:,}", count / most)), sign, examples))
        return Section("Won and lost", (), rows, ("queries",))


def usable_best(methods: Sequence[MethodResult]) -> MethodResult | None:
    """Return the method of the highest R@1 that a search can use.

    The first of `methods` is the raw search, which is left out. Return None if no other
    method is left.
    """
    usable = [method for method in methods[1:] if not method.transductive]
    return max(usable, key=lambda method: method.recall[1].value, default=None)
