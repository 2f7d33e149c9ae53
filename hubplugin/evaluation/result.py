"""What an evaluation found, as a value: it prints as a table and goes to JSON and a report."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from hubplugin.errors import InputError
from hubplugin.measures.hubness import Hubness
from hubplugin.measures.significance import Comparison, Figure, compare, interval
from hubplugin.model import Setting

SIGNIFICANT = 0.05
RAW = "raw"


class Answer(BaseModel):
    """One place of an answer: what the target is called, and whether it is a true one."""

    model_config = ConfigDict(frozen=True)

    name: str
    true: bool


class Example(BaseModel):
    """A query whose true target came first by one search only, and what both found."""

    model_config = ConfigDict(frozen=True)

    outcome: Literal["won", "lost"]
    query: str
    truth: list[str]
    raw: list[Answer]
    corrected: list[Answer]


class MethodResult(BaseModel):
    """One method on all queries. Recall, mAP, nDCG and the Robin Hood index are shares, 0 to 1.

    label: as it was asked for. parameters: all of them, defaults included. recall: R@k by k. occurrences: how many
    targets have the k-occurrence N, by N. versus_raw: against the raw search, on the same queries; None for itself.
    adjusted_p: its p, corrected for the number of methods tried (Benjamini & Hochberg 1995).
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    label: str
    method: str
    parameters: dict[str, Setting]
    recall: dict[int, Figure]
    median_rank: Figure
    mean_rank: Figure
    mean_average_precision: Figure
    ndcg: Figure
    skewness: Figure
    hubness: Hubness
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


class Hub(BaseModel):
    """A target that the raw search finds for too many queries: its id in a store, or its row, and how many find it raw
    and under each method; in a store raw and corrected."""

    model_config = ConfigDict(frozen=True)

    id: int | str
    name: str
    found_by: dict[str, int]


class Share(BaseModel):
    """R@1, 0 to 1, of some of the queries, raw (before) and corrected (after), and by how much it changes."""

    model_config = ConfigDict(frozen=True)

    queries: int
    before: float
    after: float
    change: Figure

    @property
    def is_noise(self) -> bool:
        """Whether the change is none beyond chance."""
        return self.change.low <= 0 <= self.change.high


def shares(found_first: np.ndarray, before: np.ndarray, after: np.ndarray, seed: int) -> dict[str, Share]:
    """The fields `found_first` and `not_found_first` of results. found_first [j]: whether some bank query finds a true
    target of a judged query first, in the raw search. before, after [j]: the ranks of its best true target."""
    parts = (("found_first", found_first), ("not_found_first", ~found_first))
    return {name: _share(before[part] <= 1, after[part] <= 1, seed) for name, part in parts if part.any()}


def _share(before: np.ndarray, after: np.ndarray, seed: int) -> Share:
    change = interval(after.astype(np.float64) - before, seed)
    return Share(queries=len(before), before=float(before.mean()), after=float(after.mean()), change=change)


class Histogram(BaseModel):
    """How many targets have an offset between one edge and the next. label: of the method."""

    model_config = ConfigDict(frozen=True)

    label: str
    edges: list[float]
    counts: list[int]


class Results(BaseModel):
    """Every method side by side on the same queries; the raw search comes first.

    k: of the k-occurrence, mAP and nDCG. judged: how many queries have a true target. best: the label of the method
    recommended on these queries, None where no method is better than the raw search beyond chance. anti_hubs: some of
    the targets that no query finds. coverage: the share of the gallery that is nearest to some bank query, None without
    a bank. Of the method `shown`: found_first, not_found_first: queries whose true target some
    bank query finds first in the raw search, and the others; offsets; examples: queries that it won and lost.
    """

    model_config = ConfigDict(frozen=True)

    metric: str
    queries: int
    judged: int
    targets: int
    query_bank: int | None
    target_bank: int | None
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
        return compare(self[first].best_ranks, self[second].best_ranks, self.seed)

    def sentences(self) -> list[str]:
        """What was found, what was chosen and why, in plain sentences."""
        told = [self._about_raw()]
        if len(self.methods) == 1 and self.query_bank is None:
            told.append("Only the raw search was measured: corrections need example queries, a query bank.")
        if all(method.transductive for method in self.methods[1:]):
            return told
        told += self._about_the_best()
        worse = [m.label for m in self.methods[1:] if _worse(m)]
        if worse:
            told.append(f"Worse than no correction beyond chance: {', '.join(worse)}.")
        if self.coverage is not None:
            told.append(
                f"{_percent(self.coverage)} of the targets are the nearest of some bank query; "
                "hubs among the others can only be guessed at."
            )
        return told

    def _about_raw(self) -> str:
        raw = self.raw
        return (
            f"The raw search puts a true target first for {_percent(raw.recall[1].value)} of {self.judged:,} queries. "
            f"Its {self.k}-occurrence has a skewness of {raw.hubness.skewness:.2f}: the worst hub is found by "
            f"{raw.hubness.largest:,} queries where an even search would find it by "
            f"{self.k * self.queries / self.targets:.1f}, and {_percent(raw.hubness.anti_hub_share)} of the targets "
            "are found by none."
        )

    def _about_the_best(self) -> list[str]:
        if self.best is None:
            usable = (method for method in self.methods[1:] if not method.transductive)
            nearest = max(usable, key=lambda method: method.recall[1].value)
            return [
                "Chosen: no correction. No usable method puts more true targets first than the raw search beyond "
                f"chance; the highest recall is that of {nearest.described}, with {_percent(nearest.recall[1].value)} "
                f"(p {p_told(nearest.adjusted_p)})."
            ]
        best = self[self.best]
        versus = best.versus_raw
        assert versus is not None
        return [
            f"Chosen: {best.described}, because it puts the most true targets first: "
            f"{_percent(best.recall[1].value)}, {100 * versus.difference.value:+.1f} points "
            f"(95 % interval {100 * versus.difference.low:+.1f} to {100 * versus.difference.high:+.1f}). "
            f"{versus.won:,} queries gained their true target in the first place, {versus.lost:,} lost it "
            f"(p {p_told(best.adjusted_p)}, corrected for the number of methods tried). "
            f"Skewness {_moved(self.raw.hubness.skewness, best.hubness.skewness)}.",
            "It was picked on the queries that are reported here, so new queries will gain a little less; "
            "with the method auto the choice is made on the bank instead.",
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        roomy = options.max_width >= 130
        table = Table(
            title=f"{self.judged:,} queries, {self.targets:,} targets, {self.metric}; 95 % intervals",
            title_justify="left",
            box=SIMPLE_HEAD,
        )
        table.add_column("method")
        shown = [k for k in self.raw.recall if k in (1, max(self.raw.recall)) or roomy]
        headings = [*(f"R@{k}" for k in shown), "- raw", "p", "median", f"skew N{self.k}"]
        further = ["mean rank", f"mAP@{self.k}", f"nDCG@{self.k}", "anti-hubs"] if roomy else []
        for heading in (*headings, *further):
            table.add_column(heading, justify="right", no_wrap=True)
        for m in self.methods:
            versus = m.versus_raw
            cells = [
                m.described,
                *(_cell(m.recall[k]) for k in shown),
                f"{100 * versus.difference.value:+.1f}" if versus else "",
                p_told(m.adjusted_p).removeprefix("= "),
                f"{m.median_rank.value:g}",
                f"{m.skewness.value:.2f}\n{m.skewness.low:.2f}-{m.skewness.high:.2f}",
                f"{m.mean_rank.value:.1f}",
                _cell(m.mean_average_precision),
                _cell(m.ndcg),
                _percent(m.hubness.anti_hub_share),
            ]
            table.add_row(*cells[: len(table.columns)], style="bold" if m.label == self.best else "")
        yield table
        yield from self.sentences()

    def __str__(self) -> str:
        console = Console(width=150, file=io.StringIO())
        with console.capture() as capture:
            console.print(self)
        return capture.get()


def shown_of(methods: Sequence[MethodResult], best: str | None) -> MethodResult | None:
    """See `Results.shown`."""
    usable = [method for method in methods[1:] if not method.transductive and best in (None, method.label)]
    return max(usable, key=lambda method: method.recall[1].value, default=None)


def _worse(method: MethodResult) -> bool:
    versus = method.versus_raw
    return versus is not None and versus.lost > versus.won and (method.adjusted_p or 0.0) < SIGNIFICANT


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _cell(figure: Figure) -> str:
    return f"{100 * figure.value:.1f}\n{100 * figure.low:.1f}-{100 * figure.high:.1f}"


def p_told(p: float | None) -> str:
    return "" if p is None else "< 0.001" if p < 0.001 else f"= {p:.3f}"


def _moved(before: float, after: float) -> str:
    verb = "fell" if after < before else "rose" if after > before else "stayed"
    return f"{verb} from {before:.2f} to {after:.2f}"


class Ranking(BaseModel):
    """What one ranking does for all queries. Shares are 0 to 1.

    recall: R@k by k. worst: share of the queries that find the worst hub. most_found: share of all places that the most
    found 1 % of the targets take; never: of the targets, the share that no query finds; skewness: of the k-occurrence.
    They are None under a filter, since a store does not say how many targets it lets through. occurrences: how many
    targets have the k-occurrence N, by N.
    """

    model_config = ConfigDict(frozen=True)

    recall: dict[int, Figure]
    worst: float
    most_found: float | None
    never: float | None
    skewness: float | None
    occurrences: dict[int, int]


class StoreEvaluation(BaseModel):
    """A store searched raw and corrected for the same queries; corrected is None without an active correction.

    judged: how many queries have a true target. versus: R@1 of the corrected ranking against the raw one. found_first,
    not_found_first: queries whose true target some bank query finds first in the raw search, and the others.
    """

    model_config = ConfigDict(frozen=True)

    store: str
    method: str | None
    condition: str | None
    queries: int
    judged: int
    targets: int
    k: int
    raw: Ranking
    corrected: Ranking | None
    versus: Comparison | None
    found_first: Share | None = None
    not_found_first: Share | None = None
    hubs: list[Hub]
    examples: list[Example]

    def __str__(self) -> str:
        named = [f"{hub.name} by {' -> '.join(map(str, hub.found_by.values()))}" for hub in self.hubs[:10]]
        lines = [
            f"{self.store}: {self.targets:,} targets, {self.queries:,} queries, {self.judged:,} with a known target",
            *([f"filter: {self.condition}"] if self.condition else []),
            self.method or "no active correction: the raw search alone",
            *self.sentences(),
            f"hubs: {', '.join(named)}",
        ]
        return "\n".join(lines)

    def sentences(self) -> list[str]:
        """What was measured, a line each."""
        lines = []
        for k, figure in self.raw.recall.items():
            after = None if self.corrected is None else self.corrected.recall[k]
            lines.append(f"R@{k}: {_interval(figure)}" + (f" -> {_interval(after)}" if after else ""))
        if self.versus is not None:
            won, lost = self.versus.won, self.versus.lost
            lines.append(
                f"R@1 changes by {_change(self.versus.difference)}: {won} queries won, {lost} lost "
                f"(p {self.versus.p:.3g})"
            )
        for some, share in (("some bank query finds", self.found_first), ("no bank query finds", self.not_found_first)):
            if share is not None and not share.is_noise:
                lines.append(
                    f"R@1 of {share.queries:,} queries whose target {some} first changes by {_change(share.change)}"
                )
        return [*lines, *self._hubness()]

    def _hubness(self) -> list[str]:
        told = (
            (f"queries that find the worst hub in the top {self.k}", "worst", 100, " %"),
            ("places that the most found 1 % of the targets take", "most_found", 100, " %"),
            ("targets that no query finds", "never", 100, " %"),
            (f"skewness of the {self.k}-occurrence", "skewness", 1, ""),
        )
        lines = []
        for says, name, scale, unit in told:
            before, after = (None if part is None else getattr(part, name) for part in (self.raw, self.corrected))
            if before is not None:
                moved = "" if after is None else f" -> {scale * after:.2f}{unit}"
                lines.append(f"{says}: {scale * before:.2f}{unit}{moved}")
        return lines


def _change(figure: Figure) -> str:
    value, low, high = (f"{100 * part:+.1f}" for part in (figure.value, figure.low, figure.high))
    return f"{value} points (95 % interval {low} to {high})"


def _interval(figure: Figure) -> str:
    return f"{100 * figure.value:.1f} ({100 * figure.low:.1f} to {100 * figure.high:.1f})"
