"""What an evaluation measured, as values, and the report of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import numpy as np
from pydantic import Field, InstanceOf

from hubplugin.errors import InputError
from hubplugin.measures.hubness import Hubness
from hubplugin.measures.significance import Comparison, Figure, Side, compare
from hubplugin.model import Setting
from hubplugin.report import (
    DIRECTIONS,
    NEVER,
    RECALL,
    WORST,
    Cell,
    Example,
    Histogram,
    Hub,
    KeyFigure,
    Plot,
    Report,
    Result,
    Table,
    describe_changes,
    percent,
    plots,
    points,
    share_figure,
    sides_figure,
)

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class MethodResult:
    """One way to rank on all queries: the raw search, a method, or the correction in a store. Shares are 0 to 1.

    label: as it was asked for, "corrected" of a store. parameters: all of them, defaults included. recall: R@k by k.
    worst: share of the queries that find the worst hub. most_found: share of all places that the most found 1 % of the
    targets take. occurrences: how many targets have the k-occurrence N, by N. storable: whether one offset a target
    expresses it. transductive: whether it needs every query beforehand, so that no search can use it. versus_raw:
    against the raw search, on the same queries; None for itself. adjusted_p: its p, corrected for the number of methods
    tried (Benjamini & Hochberg 1995). median_rank to skewness: None of a store, which ranks no more than it is asked
    for. hubness, most_found: None under a filter, since a store does not say how many targets it lets through.
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
    versus_raw: Comparison | None = None
    adjusted_p: float | None = None
    median_rank: Figure | None = None
    mean_rank: Figure | None = None
    mean_average_precision: Figure | None = None
    ndcg: Figure | None = None
    skewness: Figure | None = None

    @property
    def sign(self) -> int:
        """1 if it puts more true targets first than the raw search, beyond chance for so many methods; -1 if fewer."""
        if (
            self.versus_raw is None
            or self.adjusted_p is None
            or self.adjusted_p >= SIGNIFICANT
        ):
            return 0
        return 1 if self.versus_raw.won > self.versus_raw.lost else -1

    @property
    def described(self) -> str:
        """The label, and behind it the method where the label does not say it."""
        if self.label.split()[0] == self.method:
            return self.label
        settings = (
            f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in self.parameters.items()
        )
        return f"{self.label} ({' '.join([self.method, *settings])})"


@dataclass(frozen=True)
class Results(Result):
    """What `evaluate` returns: raw search and corrections side by side on the same queries; the raw search comes first.

    judged: how many queries have a true target. k: how many targets a query finds, of the k-occurrence, mAP and nDCG.
    best: the label of the method recommended on these queries, None where none is better than the raw search beyond
    chance. anti_hubs: some of the targets that no query finds. found_first, not_found_first: R@1 of the method `shown`
    for queries whose true target some bank query finds first in the raw search, and for the others. offsets: those of
    the method `shown`. examples: queries that it won and lost. query_bank, target_bank: of arrays, their rows.
    coverage: of arrays, the share of the gallery that is nearest to some bank query. store: its URL. correction: the
    active one of a store. condition: the filter of the search in a store.
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
    found_first: Side | None = None
    not_found_first: Side | None = None
    offsets: Histogram | None = None
    examples: list[Example] = field(default_factory=list)
    query_bank: int | None = None
    target_bank: int | None = None
    coverage: float | None = None
    store: str | None = None
    correction: str | None = None
    condition: str | None = None

    def __getitem__(self, label: str) -> MethodResult:
        """The method called `label`; raises InputError that lists the labels."""
        for method in self.methods:
            if method.label == label:
                return method
        raise InputError(
            f"no method {label!r} in this evaluation: use one of {', '.join(m.label for m in self.methods)}"
        )

    @property
    def raw(self) -> MethodResult:
        return self.methods[0]

    @property
    def shown(self) -> MethodResult | None:
        """The method that is shown beside the raw search: the usable one of the highest R@1."""
        return usable_best(self.methods)

    def compare(self, first: str, second: str) -> Comparison:
        """Method `second` against `first`, on the same queries.

        Args:
            first: the label of the one.
            second: the label of the other.

        Raises:
            InputError: there is no method of that label.
        """
        return compare(self[first].best_ranks, self[second].best_ranks)

    def report(self) -> Report:
        shown, of_store = self.shown, self.store is not None
        sides = [self.raw] if shown is None else [self.raw, shown]
        verdict, direction, more = self._verdict()
        parts, even = (
            {side.label: side.occurrences for side in sides},
            self.k * self.queries / self.targets,
        )
        found_by = partial(plots.occurrences, parts=parts, even=even, k=self.k)
        pictures = [] if of_store else [self._recall_plot()]
        pictures.append(Plot("How often targets are found", found_by))
        if self.offsets is not None:
            offsets = partial(
                plots.offsets, edges=self.offsets.edges, counts=self.offsets.counts
            )
            pictures.append(Plot("Offsets", offsets, f"Of {self.offsets.label}."))
        return Report(
            title=f"{self.store}: raw and corrected"
            if of_store
            else "Hubness: every method side by side",
            subtitle=self._scene(),
            verdict=verdict,
            direction=DIRECTIONS[direction],
            more=more,
            key_figures=self._key_figures(shown),
            sentences=[*(self._recalls(sides) if of_store else self._side_by_side())],
            details=[*self._beside_raw(sides)] if of_store else [],
            examples=self.examples,
            hubs=self.hubs,
            anti_hubs=self.anti_hubs,
            after="corrected" if shown is None else shown.label,
            k=self.k,
            plots=pictures,
            tables=[] if of_store else [self._every_method(), self._hubness()],
            facts=({"correction": self.correction or "none"} if of_store else {})
            | {"seed": str(self.seed)},
        )

    def _scene(self) -> str:
        judged = (
            f" ({self.judged:,} with a known true target)"
            if self.judged != self.queries
            else ""
        )
        bank = f", a bank of {self.query_bank:,} queries" if self.query_bank else ""
        second = f" and {self.target_bank:,} targets" if self.target_bank else ""
        condition = f"; filter {self.condition}" if self.condition else ""
        return f"{self.queries:,} queries{judged}, {self.targets:,} targets, {self.metric}{bank}{second}{condition}"

    def _key_figures(self, shown: MethodResult | None) -> list[KeyFigure]:
        raw, top = (
            self.raw,
            f"in their top {self.k}; even: {percent(self.k / self.targets)}",
        )
        no_correction = "there is no active correction, or its bank is not kept"
        needs = "pass example queries (--bank)" if self.store is None else no_correction
        recall, worst = (
            (None, None) if shown is None else (shown.recall[1].value, shown.worst)
        )
        by = needs if shown is None else f"by {shown.label}"
        change = (
            None
            if shown is None or shown.versus_raw is None
            else shown.versus_raw.difference
        )
        never = [
            m.hubness.anti_hub_share if m and m.hubness else None for m in (raw, shown)
        ]
        uncounted = "a store does not say how many targets a filter lets through"
        return [
            share_figure(
                RECALL,
                raw.recall[1].value,
                recall,
                more_is_better=True,
                change=change,
                note=by,
            ),
            share_figure(WORST, raw.worst, worst, more_is_better=False, note=top),
            share_figure(
                NEVER,
                *never,
                more_is_better=False,
                note="by none of these queries",
                unknown=uncounted,
            ),
            sides_figure(
                "R@1 of targets that the bank finds first / of others",
                [self.found_first, self.not_found_first],
                needs,
            ),
        ]

    def _verdict(self) -> tuple[str, int, list[str]]:
        """In a line, and whether R@1 gains; and what else."""
        first = self.shown
        if first is None:
            return (
                ""
                if self.store is None
                else "no active correction: the raw search alone",
                0,
                [],
            )
        versus, recall = first.versus_raw, first.recall[1].value
        assert versus is not None
        among = (
            ""
            if len(self.methods) == 2
            else f"; p {format_p(first.adjusted_p)} corrected for the methods tried"
        )
        more = [
            f"R@1 changes by {points(versus.difference)}: {versus.won:,} queries won, {versus.lost:,} lost "
            f"(p {format_p(versus.p)}{among})"
        ]
        if self.store is not None:
            sign = versus.difference.sign
            says = {
                1: "it helps",
                0: "neither help nor harm beyond chance",
                -1: "it does harm",
            }[sign]
            changes = (
                self.raw.worst,
                first.worst,
                self.queries,
                self.raw.recall[1].value,
                recall,
                versus.difference,
            )
            return f"{says}; {describe_changes(*changes)}", sign, more
        if self.best is None:
            line = "no correction; no usable method puts more true targets first than the raw search beyond chance"
            return (
                line,
                0,
                [
                    f"The highest recall is that of {first.described}, with {percent(recall)}",
                    *more,
                ],
            )
        more.append(
            "It was picked on the queries that are reported here, so new queries will gain a little less."
        )
        line = f"best is {first.described}, because it puts the most true targets first: {percent(recall)}"
        return line, 1, more

    def _side_by_side(self) -> Iterator[str]:
        """The raw search, and what is worth knowing of the methods and the bank."""
        raw = self.raw
        assert raw.hubness is not None
        yield (
            f"The raw search puts a true target first for {percent(raw.recall[1].value)} of {self.judged:,} queries. "
            f"Its {self.k}-occurrence has a skewness of {raw.hubness.skewness:.2f}: the worst hub is found by "
            f"{raw.hubness.largest:,} queries where an even search would find it by "
            f"{self.k * self.queries / self.targets:.1f}, and {percent(raw.hubness.anti_hub_share)} of the targets "
            "are found by none."
        )
        if len(self.methods) == 1 and self.query_bank is None:
            yield "Only the raw search was measured: corrections need example queries, a query bank."
        if worse := [method.label for method in self.methods if method.sign < 0]:
            yield f"Worse than no correction beyond chance: {', '.join(worse)}."
        if self.coverage is not None:
            yield (
                f"{percent(self.coverage)} of the targets are the nearest of some bank query; "
                "hubs among the others can only be guessed at."
            )

    def _recalls(self, sides: Sequence[MethodResult]) -> Iterator[str]:
        """R@k, raw -> corrected, and what changes beyond chance for a part of the queries."""
        yield self._scene()
        for k in self.raw.recall:
            yield f"R@{k}: " + " -> ".join(
                "{} ({})".format(*_cell(side.recall[k], 100, 1)) for side in sides
            )
        for finder, side in (("some", self.found_first), ("no", self.not_found_first)):
            if side is not None and side.change.sign:
                change = f"changes by {points(side.change)}"
                yield f"R@1 of {side.queries:,} queries whose target {finder} bank query finds first {change}"

    def _beside_raw(self, sides: Sequence[MethodResult]) -> Iterator[str]:
        """What else is to be seen of a store's search, raw -> corrected."""
        if self.correction:
            yield self.correction
        shares: list[tuple[str, list[float | None]]] = [
            (
                f"queries that find the worst hub in the top {self.k}",
                [side.worst for side in sides],
            ),
            (
                "places that the most found 1 % of the targets take",
                [side.most_found for side in sides],
            ),
            (
                "targets that no query finds",
                [
                    side.hubness.anti_hub_share if side.hubness else None
                    for side in sides
                ],
            ),
        ]
        for says, values in shares:
            if values[0] is not None:
                yield f"{says}: " + " -> ".join(
                    f"{100 * value:.2f} %" for value in values if value is not None
                )
        skewness = [
            f"{side.hubness.skewness:.2f}" for side in sides if side.hubness is not None
        ]
        if skewness:
            yield f"skewness of the {self.k}-occurrence: {' -> '.join(skewness)}"

    def _recall_plot(self) -> Plot:
        shares = [(method.label, method.recall[1]) for method in self.methods]
        unusable = {method.label for method in self.methods if method.transductive}
        grey = (
            " Grey squares need every query beforehand: no search can use them."
            if unusable
            else ""
        )
        return Plot(
            "True target in the first place",
            partial(plots.recall, shares=shares, unusable=unusable, best=self.best),
            f"Bars are 95 % bootstrap intervals over the queries; the dashed line is the raw search.{grey}",
        )

    def _every_method(self) -> Table:
        at = [k for k in self.raw.recall if k > 1]
        columns = [
            "method",
            "R@1",
            "- raw",
            "won",
            "lost",
            "p",
            *(f"R@{k}" for k in at),
        ]
        columns += [
            "median",
            "mean rank",
            f"mAP@{self.k}",
            f"nDCG@{self.k}",
            "skewness",
        ]
        rows = []
        for m in self.methods:
            versus = m.versus_raw
            against: list[Cell] = ["", "", "", ""]
            if versus is not None:
                p, corrected = (
                    format_p(value).removeprefix("= ")
                    for value in (versus.p, m.adjusted_p)
                )
                against = [
                    _cell(versus.difference, 100, 1, "+"),
                    str(versus.won),
                    str(versus.lost),
                    (p, corrected),
                ]
            name = (
                m.label
                if m.described == m.label
                else (m.label, m.described[len(m.label) :])
            )
            figures = [
                *(_cell(m.recall[k], 100, 1) for k in at),
                _cell(m.median_rank, 1, 1),
                _cell(m.mean_rank, 1, 1),
            ]
            figures += [
                _cell(m.mean_average_precision, 100, 1),
                _cell(m.ndcg, 100, 1),
                _cell(m.skewness, 1, 2),
            ]
            rows.append([name, _cell(m.recall[1], 100, 1), *against, *figures])
        return Table(
            f"Every method: {self._scene()}",
            columns,
            rows,
            self._marked,
            "R@k: per cent of the queries with a true target among the first k. Small figures are 95 % intervals. Ties "
            "count by their expected rank. p: McNemar's exact test against the raw search; below it, corrected for the "
            "number of methods (Benjamini-Hochberg).",
            brief=(
                "method",
                "R@1",
                "- raw",
                "p",
                f"R@{max(self.raw.recall)}",
                "median",
                "skewness",
            ),
        )

    def _hubness(self) -> Table:
        rows = [
            [
                m.label,
                *(
                    f"{value:.2f}"
                    for value in (
                        m.hubness.skewness,
                        m.hubness.kurtosis,
                        m.hubness.mean_absolute_error,
                    )
                ),
                str(m.hubness.largest),
                *(
                    percent(share)
                    for share in (m.hubness.robin_hood, m.hubness.anti_hub_share)
                ),
            ]
            for m in self.methods
            if m.hubness is not None
        ]
        return Table(
            "Hubness of every method",
            [
                "method",
                "skewness",
                "kurtosis",
                "mean abs. error",
                "largest",
                "Robin Hood",
                "anti-hubs",
            ],
            rows,
            self._marked,
            f"Of the {self.k}-occurrence: the number of queries that have a target among their first {self.k}. Robin "
            "Hood: share of all finds that would have to move for an even search. Anti-hubs: targets that no query "
            "finds.",
        )

    @property
    def _marked(self) -> list[int]:
        return [
            row for row, method in enumerate(self.methods) if method.label == self.best
        ]


def usable_best(methods: Sequence[MethodResult]) -> MethodResult | None:
    """The highest R@1 among the methods that a search can use; of equals the one that is less hubby."""
    usable = (method for method in methods[1:] if not method.transductive)
    return max(
        usable,
        key=lambda m: (m.recall[1].value, -(m.hubness.skewness if m.hubness else 0.0)),
        default=None,
    )


def format_p(p: float | None) -> str:
    return "" if p is None else "< 0.001" if p < 0.001 else f"= {p:.3f}"


def _cell(figure: Figure | None, scale: float, digits: int, sign: str = "") -> Cell:
    if figure is None:
        return ""
    value, low, high = (
        f"{scale * part:{sign}.{digits}f}"
        for part in (figure.value, figure.low, figure.high)
    )
    return value, f"{low} to {high}"
