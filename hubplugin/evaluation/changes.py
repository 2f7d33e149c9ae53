"""Two states of a gallery target by target, raw and corrected, as Markdown for a pull request."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hubplugin.report import percent

ROWS = 20
"""Of a table, at most; above it stands how many there are."""


@dataclass(frozen=True)
class Moved:
    """A judged query, its true target that stands highest, and the rank of that; infinite where it was not found."""

    query: str
    target: str
    before: float
    after: float


@dataclass(frozen=True)
class Changes:
    """What the search `after` does to targets beside that of `before`. found, lost: of those that only one of the two
    finds, `ROWS` names with the number of queries that find them; of, [2]: how many there are. moved: the ranks that
    changed most. first: R@1 before and after."""

    before: str
    after: str
    k: int
    queries: int
    found: Sequence[tuple[str, int]]
    lost: Sequence[tuple[str, int]]
    of: tuple[int, int]
    moved: Sequence[Moved]
    first: tuple[float, float]

    def markdown(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"### {self.before} -> {self.after}, {self.queries:,} queries\n"
        yield f"Right answers first: {percent(self.first[0])} -> {percent(self.first[1])} of the queries.\n"
        for what, named, count in (
            ("became findable", self.found, self.of[0]),
            ("are no longer found", self.lost, self.of[1]),
        ):
            yield f"**{count:,} targets {what}** in the first {self.k} of any query.\n"
            if named:
                yield "| target | queries that find it |\n|---|---|"
                yield from (f"| {_cell(name)} | {times} |" for name, times in named)
                yield ""
        if self.moved:
            yield "**Ranks that moved most.**\n\n| query | its target | rank before | after |\n|---|---|---|---|"
            for each in self.moved:
                yield f"| {_cell(each.query)} | {_cell(each.target)} | {_rank(each.before)} | {_rank(each.after)} |"


def changed(occurrences: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The places of the targets that only the second search finds, the most found first, and of those that only the
    first does. occurrences: the k-occurrence of each target in both."""
    before, after = occurrences
    found, lost = np.flatnonzero((before == 0) & (after > 0)), np.flatnonzero((before > 0) & (after == 0))
    return found[np.argsort(-after[found], kind="stable")], lost[np.argsort(-before[lost], kind="stable")]


def moved_most(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The places of the judged queries, of ranks `before` and `after` [j], whose ranks differ most, `ROWS` at most. A
    rank that is not known counts as one behind the last that is."""
    known = np.concatenate([before, after])
    last = known[np.isfinite(known)].max(initial=0) + 1
    apart = np.abs(np.minimum(before, last) - np.minimum(after, last))
    order: np.ndarray = np.argsort(-apart, kind="stable")[:ROWS]
    moved: np.ndarray = order[apart[order] > 0]
    return moved


def _rank(rank: float) -> str:
    return f"{rank:g}" if np.isfinite(rank) else "not found"


def _cell(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")[:200]
