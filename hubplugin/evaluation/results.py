"""What an evaluation measured, as values, and the report of it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hubplugin.errors import InputError
from hubplugin.measures.hubness import Hubness
from hubplugin.measures.significance import Comparison, Figure, compare, paired
from hubplugin.model import Setting
from hubplugin.report import (
    Example,
    Histogram,
    Hub,
    Plot,
    Report,
    Reported,
    Share,
    Table,
    Tile,
    Verdict,
    bank_tile,
    changes_told,
    percent,
    plots,
    points,
    share_tile,
)
from hubplugin.report.sections import NEVER, RECALL, WORST, Cell, Direction

SIGNIFICANT = 0.05


class MethodResult(BaseModel):
    """One way to rank on all queries: the raw search, a method, or the correction in a store. Shares are 0 to 1.

    label: as it was asked for, "corrected" of a store. parameters: all of them, defaults included. recall: R@k by k.
    worst: share of the queries that find the worst hub. most_found: share of all places that the most found 1 % of the
    targets take. occurrences: how many targets have the k-occurrence N, by N. versus_raw: against the raw search, on
    the same queries; None for itself. adjusted_p: its p, corrected for the number of methods tried (Benjamini &
    Hochberg 1995). median_rank to skewness: None of a store, which ranks no more than it is asked for. hubness,
    most_found: None under a filter, since a store does not say how many targets it lets through.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    label: str
    method: str
    parameters: dict[str, Setting]
    recall: dict[int, Figure]
    median_rank: Figure | None = None
    mean_rank: Figure | None = None
    mean_average_precision: Figure | None = None
    ndcg: Figure | None = None
    skewness: Figure | None = None
    worst: float
    most_found: float | None
    hubness: Hubness | None
    occurrences: dict[int, int]
    storable: bool = Field(description="whether one offset a target expresses it")
    transductive: bool = Field(description="whether it needs every query beforehand, so that no search can use it")
    versus_raw: Comparison | None = None
    adjusted_p: float | None = None
    best_ranks: np.ndarray = Field(exclude=True, repr=False)

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


class Results(Reported, BaseModel):
    """What `evaluate` returns: raw search and corrections side by side on the same queries; the raw search comes first.

    It prints as a table or as lines, and is written as JSON or HTML. judged: how many queries have a true target. k:
    how many targets a query finds, of the k-occurrence, mAP and nDCG. best: the label of the method recommended on
    these queries, None where none is better than the raw search beyond chance. anti_hubs: some of the targets that no
    query finds. Of the method `shown`: found_first, not_found_first: queries whose true target some bank query finds
    first in the raw search, and the others; offsets; examples: queries that it won and lost.

    Of arrays: query_bank, target_bank: their rows; coverage: the share of the gallery that is nearest to some bank
    query. Of a store: its URL, its active correction, and the condition of the search.
    """

    model_config = ConfigDict(frozen=True)

    store: str | None = None
    correction: str | None = None
    condition: str | None = None
    metric: str
    queries: int
    judged: int
    targets: int
    query_bank: int | None = None
    target_bank: int | None = None
    k: int
    seed: int
    methods: list[MethodResult]
    hubs: list[Hub]
    best: str | None
    anti_hubs: list[str] = []
    coverage: float | None = None
    found_first: Share | None = None
    not_found_first: Share | None = None
    offsets: Histogram | None = None
    examples: list[Example] = []

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
        """The method that is shown beside the raw search: the best one, or else the usable one of the highest R@1."""
        return shown_of(self.methods, self.best)

    def compare(self, first: str, second: str) -> Comparison:
        """Method `second` against `first`, on the same queries."""
        return compare(self[first].best_ranks, self[second].best_ranks)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes everything but the single queries' ranks. Raises InputError where `path` cannot be written."""
        from hubplugin.report.render import write_text

        write_text(path, self.model_dump_json(indent=1) + "\n")

    def to_html(self, path: str | os.PathLike[str], command: str | None = None) -> None:
        """Writes the report: one file, which refers to nothing outside itself. command: what was typed, which the
        report then names. Raises as `to_json` does."""
        from hubplugin.report.render import write_page

        write_page(self.report(), path, command)

    def report(self) -> Report:
        shown, of_store = self.shown, self.store is not None
        after = "corrected" if shown is None else shown.label
        even = self.k * self.queries / self.targets
        parts = {each.label: each.occurrences for each in (self.raw, shown) if each is not None}
        pictures = [Plot("How often targets are found", plots.occurrences(parts, even, self.k))]
        if not of_store:
            pictures.insert(0, self._recall_plot())
        if self.offsets is not None:
            drawn = plots.offsets(self.offsets.edges, self.offsets.counts)
            pictures.append(Plot("Offsets", drawn, f"Of {self.offsets.label}."))
        facts = {"store": self.store, "correction": self.correction or "none"} if self.store else {}
        return Report(
            title=f"{self.store}: raw and corrected" if of_store else "Hubness: every method side by side",
            subtitle=self._scene(),
            tiles=self._tiles(shown),
            k=self.k,
            verdict=self._verdict(),
            sentences=self._recalls() if of_store else self._side_by_side(),
            details=self._beside_raw() if of_store else [],
            examples=self.examples,
            hubs=self.hubs,
            after=after,
            anti_hubs=self.anti_hubs,
            plots=pictures,
            tables=[] if of_store else [self._every_method(), self._hubness()],
            facts=facts | {"seed": str(self.seed)},
        )

    def _scene(self) -> str:
        judged = f" ({self.judged:,} with a known true target)" if self.judged != self.queries else ""
        bank = f", a bank of {self.query_bank:,} queries" if self.query_bank else ""
        second = f" and {self.target_bank:,} targets" if self.target_bank else ""
        condition = f"; filter {self.condition}" if self.condition else ""
        return f"{self.queries:,} queries{judged}, {self.targets:,} targets, {self.metric}{bank}{second}{condition}"

    def _tiles(self, shown: MethodResult | None) -> list[Tile]:
        raw, top = self.raw, f"in their top {self.k}; even: {percent(self.k / self.targets)}"
        needs = NEEDS_BANK if self.store is None else "there is no active correction, or its bank is not kept"
        recall, worst = (None, None) if shown is None else (shown.recall[1].value, shown.worst)
        by = needs if shown is None else f"by {shown.label}"
        change = None if shown is None or shown.versus_raw is None else shown.versus_raw.difference
        never = [None if each is None or each.hubness is None else each.hubness.anti_hub_share for each in (raw, shown)]
        uncounted = "a store does not say how many targets a filter lets through"
        return [
            share_tile(RECALL, raw.recall[1].value, recall, more_is_better=True, change=change, note=by),
            share_tile(WORST, raw.worst, worst, more_is_better=False, note=top),
            share_tile(NEVER, *never, more_is_better=False, note="by none of these queries", unknown=uncounted),
            bank_tile(self.found_first, self.not_found_first, needs),
        ]

    def _verdict(self) -> Verdict | None:
        usable = [method for method in self.methods[1:] if not method.transductive]
        if not usable:
            return Verdict("same", "no active correction: the raw search alone") if self.store is not None else None
        first = max(usable, key=lambda method: method.recall[1].value) if self.best is None else self[self.best]
        versus = first.versus_raw
        assert versus is not None
        among = "" if len(self.methods) == 2 else f"; p {p_told(first.adjusted_p)} corrected for the methods tried"
        more = [
            f"R@1 changes by {points(versus.difference)}: {versus.won:,} queries won, {versus.lost:,} lost "
            f"(p {p_told(versus.p)}{among})"
        ]
        if self.store is not None:
            change, shares = versus.difference, (self.raw.recall[1].value, first.recall[1].value)
            told = changes_told(self.raw.worst, first.worst, self.queries, *shares, change)
            direction, says = VERDICTS[change.sign]
            return Verdict(direction, f"{says}; {told}", more)
        recall = percent(first.recall[1].value)
        if self.best is None:
            line = "no correction; no usable method puts more true targets first than the raw search beyond chance"
            return Verdict("same", line, [f"The highest recall is that of {first.described}, with {recall}", *more])
        more.append("It was picked on the queries that are reported here, so new queries will gain a little less.")
        line = f"best is {first.described}, because it puts the most true targets first: {recall}"
        return Verdict("better", line, more)

    def _side_by_side(self) -> list[str]:
        """The raw search, and what is worth knowing of the methods and the bank."""
        raw, told = self.raw, list[str]()
        assert raw.hubness is not None
        told.append(
            f"The raw search puts a true target first for {percent(raw.recall[1].value)} of {self.judged:,} queries. "
            f"Its {self.k}-occurrence has a skewness of {raw.hubness.skewness:.2f}: the worst hub is found by "
            f"{raw.hubness.largest:,} queries where an even search would find it by "
            f"{self.k * self.queries / self.targets:.1f}, and {percent(raw.hubness.anti_hub_share)} of the targets "
            "are found by none."
        )
        if len(self.methods) == 1 and self.query_bank is None:
            told.append("Only the raw search was measured: corrections need example queries, a query bank.")
        surely = [m for m in self.methods[1:] if m.adjusted_p is not None and m.adjusted_p < SIGNIFICANT]
        worse = [m.label for m in surely if m.versus_raw is not None and m.versus_raw.lost > m.versus_raw.won]
        if worse:
            told.append(f"Worse than no correction beyond chance: {', '.join(worse)}.")
        if self.coverage is not None:
            told.append(
                f"{percent(self.coverage)} of the targets are the nearest of some bank query; "
                "hubs among the others can only be guessed at."
            )
        return told

    @property
    def _sides(self) -> list[MethodResult]:
        """The search of a store: raw and, where there is a correction, corrected."""
        return [each for each in (self.raw, self.shown) if each is not None]

    def _recalls(self) -> list[str]:
        """R@k, raw -> corrected, and what changes beyond chance for a part of the queries."""
        lines = [f"{self.store}: {self._scene()}"]
        for k in self.raw.recall:
            lines.append(f"R@{k}: " + " -> ".join(_interval(each.recall[k]) for each in self._sides))
        for some, share in (("some bank query finds", self.found_first), ("no bank query finds", self.not_found_first)):
            if share is not None and share.change.sign:
                lines.append(
                    f"R@1 of {share.queries:,} queries whose target {some} first changes by {points(share.change)}"
                )
        return lines

    def _beside_raw(self) -> list[str]:
        """What else is to be seen of a store's search, raw -> corrected."""
        sides, lines = self._sides, [self.correction] if self.correction else []
        told: list[tuple[str, list[float | None]]] = [
            (f"queries that find the worst hub in the top {self.k}", [each.worst for each in sides]),
            ("places that the most found 1 % of the targets take", [each.most_found for each in sides]),
            ("targets that no query finds", [each.hubness.anti_hub_share if each.hubness else None for each in sides]),
        ]
        for says, values in told:
            if values[0] is not None:
                lines.append(f"{says}: " + " -> ".join(f"{100 * value:.2f} %" for value in values if value is not None))
        skewness = [f"{each.hubness.skewness:.2f}" for each in sides if each.hubness is not None]
        return [*lines, f"skewness of the {self.k}-occurrence: {' -> '.join(skewness)}"] if skewness else lines

    def _recall_plot(self) -> Plot:
        bars = [
            plots.Bar(m.label, m.recall[1], m is self.raw or m.transductive, m.transductive, m.label == self.best)
            for m in self.methods
        ]
        grey = " Grey squares need every query beforehand: no search can use them."
        return Plot(
            "True target in the first place",
            plots.recall(bars),
            "Bars are 95 % bootstrap intervals over the queries; the dashed line is the raw search."
            + (grey if any(method.transductive for method in self.methods) else ""),
        )

    def _every_method(self) -> Table:
        at = [k for k in self.raw.recall if k > 1]
        columns = ["method", "R@1", "- raw", "won", "lost", "p", *(f"R@{k}" for k in at)]
        columns += ["median", "mean rank", f"mAP@{self.k}", f"nDCG@{self.k}", "skewness"]
        rows = []
        for m in self.methods:
            versus = m.versus_raw
            against: list[Cell] = ["", "", "", ""]
            if versus is not None:
                p, corrected = (p_told(each).removeprefix("= ") for each in (versus.p, m.adjusted_p))
                against = [_cell(versus.difference, 100, 1, "+"), str(versus.won), str(versus.lost), (p, corrected)]
            name = m.label if m.described == m.label else (m.label, m.described[len(m.label) :])
            figures = [*(_cell(m.recall[k], 100, 1) for k in at), _cell(m.median_rank, 1, 1), _cell(m.mean_rank, 1, 1)]
            figures += [_cell(m.mean_average_precision, 100, 1), _cell(m.ndcg, 100, 1), _cell(m.skewness, 1, 2)]
            rows.append([name, _cell(m.recall[1], 100, 1), *against, *figures])
        return Table(
            f"Every method: {self._scene()}",
            columns,
            rows,
            self._marked,
            "R@k: per cent of the queries with a true target among the first k. Small figures are 95 % intervals. Ties "
            "count by their expected rank. p: McNemar's exact test against the raw search; below it, corrected for the "
            "number of methods (Benjamini-Hochberg).",
            brief=("method", "R@1", "- raw", "p", f"R@{max(self.raw.recall)}", "median", "skewness"),
        )

    def _hubness(self) -> Table:
        found = [(m.label, m.hubness) for m in self.methods if m.hubness is not None]
        rows = [
            [
                label,
                f"{h.skewness:.2f}",
                f"{h.kurtosis:.2f}",
                f"{h.mean_absolute_error:.2f}",
                str(h.largest),
                percent(h.robin_hood),
                percent(h.anti_hub_share),
            ]
            for label, h in found
        ]
        return Table(
            "Hubness of every method",
            ["method", "skewness", "kurtosis", "mean abs. error", "largest", "Robin Hood", "anti-hubs"],
            rows,
            self._marked,
            f"Of the {self.k}-occurrence: the number of queries that have a target among their first {self.k}. Robin "
            "Hood: share of all finds that would have to move for an even search. Anti-hubs: targets that no query "
            "finds.",
        )

    @property
    def _marked(self) -> list[int]:
        return [row for row, method in enumerate(self.methods) if method.label == self.best]


VERDICTS: dict[int, tuple[Direction, str]] = {
    1: ("better", "it helps"),
    0: ("same", "neither help nor harm beyond chance"),
    -1: ("worse", "it does harm"),
}
"""By the sign of the change of R@1."""

NEEDS_BANK = "pass example queries (--bank)"


def shown_of(methods: Sequence[MethodResult], best: str | None) -> MethodResult | None:
    """See `Results.shown`."""
    usable = [method for method in methods[1:] if not method.transductive and best in (None, method.label)]
    return max(usable, key=lambda method: method.recall[1].value, default=None)


def best_of(methods: Sequence[MethodResult]) -> str | None:
    """The highest R@1 among the methods that a search can use, if it is better than the raw search beyond chance."""
    usable = [method for method in methods[1:] if not method.transductive]
    if not usable:
        return None
    best = max(usable, key=lambda each: (each.recall[1].value, -(each.hubness.skewness if each.hubness else 0.0)))
    gained = best.recall[1].value > methods[0].recall[1].value
    return best.label if gained and best.adjusted_p is not None and best.adjusted_p < SIGNIFICANT else None


def shares(found_first: np.ndarray, before: np.ndarray, after: np.ndarray) -> dict[str, Share]:
    """The fields `found_first` and `not_found_first` of results. found_first [j]: whether some bank query finds a true
    target of a judged query first, in the raw search. before, after [j]: the ranks of its best true target."""
    parts = (("found_first", found_first), ("not_found_first", ~found_first))
    return {name: _share(before[part] <= 1, after[part] <= 1) for name, part in parts if part.any()}


def _share(before: np.ndarray, after: np.ndarray) -> Share:
    change = paired(before, after).difference
    return Share(queries=len(before), before=float(before.mean()), after=float(after.mean()), change=change)


def p_told(p: float | None) -> str:
    return "" if p is None else "< 0.001" if p < 0.001 else f"= {p:.3f}"


def _interval(figure: Figure) -> str:
    return f"{100 * figure.value:.1f} ({100 * figure.low:.1f} to {100 * figure.high:.1f})"


def _cell(figure: Figure | None, scale: float, digits: int, sign: str = "") -> Cell:
    if figure is None:
        return ""
    value, low, high = (f"{scale * part:{sign}.{digits}f}" for part in (figure.value, figure.low, figure.high))
    return value, f"{low} to {high}"
