"""A report and its sections, as values: what a result shows, whoever draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hubplugin.measures.significance import Figure, Side

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Direction = Literal["better", "worse", "same", "unknown"]

SAME = 5e-4
"""Shares that differ by less look the same on a page."""

RECALL, WORST, NEVER = "True target first (R@1)", "Queries that find the worst hub", "Targets that are never found"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def points(change: Figure) -> str:
    """A change of a share, with its interval."""
    value, low, high = (f"{100 * part:+.1f}" for part in (change.value, change.low, change.high))
    return f"{value} points (95 % interval {low} to {high})"


@dataclass(frozen=True)
class Answer:
    """One place of an answer: what the target is called, and whether it is a true one."""

    name: str
    true: bool


@dataclass(frozen=True)
class Example:
    """A query whose true target came first by one search only, and what both found."""

    outcome: Literal["won", "lost"]
    query: str
    truth: list[str]
    raw: list[Answer]
    corrected: list[Answer]


@dataclass(frozen=True)
class Hub:
    """A target that the raw search finds for too many queries: its id in a store, or its row, and how many find it by
    each search: raw, and by a method's label, in a store corrected."""

    id: int | str
    name: str
    found_by: dict[str, int]


@dataclass(frozen=True)
class Share:
    """R@1, 0 to 1, of some of the queries, raw (before) and corrected (after), and by how much it changes."""

    queries: int
    before: float
    after: float
    change: Figure


@dataclass(frozen=True)
class Histogram:
    """How many targets have an offset between one edge and the next. label: of the method."""

    label: str
    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class Tile:
    """One figure of the first screen. shown: as it is now; before: what it was, where there is a before. rose: whether
    it is larger now, which may be better or worse."""

    title: str
    shown: str
    direction: Direction = "unknown"
    before: str = ""
    note: str = ""
    rose: bool = False


@dataclass(frozen=True)
class Plot:
    """draw: onto a canvas of matplotlib, see `plots`."""

    title: str
    draw: Callable[[Canvas], None]
    note: str = ""


Cell = str | tuple[str, str]


@dataclass(frozen=True)
class Table:
    """rows: the cells of each, a text or (text, small text). marked: the rows that stand out. brief: the columns that a
    narrow terminal has room for; a table without them is for pages alone."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    marked: Sequence[int] = ()
    note: str = ""
    brief: Sequence[str] = ()


@dataclass(frozen=True)
class Verdict:
    """What it comes to: one line, and what else. direction: "same" is neither help nor harm."""

    direction: Direction
    line: str
    more: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """What a result shows; what is empty is left out. k: of the k-occurrence. after: the label of the search that is
    shown beside the raw one. details: how it was found, which a terminal shows when asked. causes: each with cause,
    found, says and advice. facts: how it was made, by name."""

    title: str
    subtitle: str = ""
    tiles: Sequence[Tile] = ()
    k: int = 10
    verdict: Verdict | None = None
    sentences: Sequence[str] = ()
    details: Sequence[str] = ()
    causes: Sequence[Any] = ()
    examples: Sequence[Example] = ()
    hubs: Sequence[Hub] = ()
    after: str = "corrected"
    anti_hubs: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def share_tile(
    title: str,
    before: float | None,
    after: float | None,
    *,
    more_is_better: bool,
    change: Figure | None = None,
    note: str = "",
    unknown: str = "",
) -> Tile:
    """A tile of a share, 0 to 1. before: of the raw search; after: None where there is no correction. change: where it
    is known how sure that is; it has no direction within chance. unknown: what is said where it was not measured."""
    if before is None:
        return Tile(title, "not measured", note=unknown)
    if after is None:
        return Tile(title, percent(before), note=note)
    gained = after - before if more_is_better else before - after
    same = abs(gained) < SAME if change is None else not change.sign
    direction: Direction = "same" if same else "better" if gained > 0 else "worse"
    return Tile(title, percent(after), direction, percent(before), note, rose=after > before)


def changes_told(
    worst: float, now: float, queries: int, first: float | None, first_now: float | None, change: Figure | None = None
) -> str:
    """In words: the share of queries that find the worst hub, and R@1 where it is known, before and now. change: of
    R@1, whose interval is told."""
    one, other = round(worst * queries), round(now * queries)
    went = f"stays at {one:,}" if other == one else f"{'falls' if other < one else 'rises'} from {one:,} to {other:,}"
    told = f"the worst hub {went} of {queries:,} queries"
    if first is None or first_now is None:
        return told
    interval = "" if change is None else f" ({100 * change.low:+.1f} to {100 * change.high:+.1f} points)"
    return f"{told}; right answers first: {100 * first:.1f} to {percent(first_now)}{interval}"


def shares_tile(title: str, shares: Mapping[str, Share | Side | None], unknown: str) -> Tile:
    """The change of R@1 of parts of the queries, by name. What is none beyond chance has no direction."""
    known = {name: share for name, share in shares.items() if share is not None}
    if not known:
        return Tile(title, "not measured", note=unknown)

    def shown(share: Share | Side | None) -> str:
        if share is None:
            return "?"
        return f"{100 * share.change.value:+.1f}" if share.change.sign else "same"

    def told(name: str, share: Share | Side) -> str:
        low, high = (f"{100 * end:+.1f}" for end in (share.change.low, share.change.high))
        return f"{name}: {percent(share.before)} → {percent(share.after)} ({low} to {high})"

    signs = [share.change.sign for share in known.values()]
    direction: Direction = "worse" if min(signs) < 0 else "better" if max(signs) > 0 else "same"
    note = "; ".join(told(name, share) for name, share in known.items())
    return Tile(title, " / ".join(map(shown, shares.values())), direction, note=note, rose=direction == "better")


def bank_tile(found_first: Share | None, others: Share | None, unknown: str) -> Tile:
    """Of queries whose true target some bank query finds first, and of the others."""
    shares = {"found first by the bank": found_first, "others": others}
    return shares_tile("R@1 of targets that the bank finds first / of others", shares, unknown)
