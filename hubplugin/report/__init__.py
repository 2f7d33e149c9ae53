"""A result becomes text, JSON and a page of HTML here, and nowhere else.

A result is a dataclass that derives from `Result`. Its fields are its JSON, by pydantic; docs/reference/json.md is made
from them. Its `report` says what people are shown of it, from which text and page are drawn.
"""

from __future__ import annotations

import io
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from hubplugin import atomic
from hubplugin._version import __version__
from hubplugin.errors import InputError, install
from hubplugin.measures.significance import Figure, Side

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Direction = Literal["better", "worse", "same", "unknown"]
DIRECTIONS: dict[int, Direction] = {1: "better", 0: "same", -1: "worse"}
"""By the sign of a change for which more is better."""

SAME = 5e-4
"""Shares that differ by less look the same on a page."""

RECALL, WORST, NEVER = (
    "True target first (R@1)",
    "Queries that find the worst hub",
    "Targets that are never found",
)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def points(change: Figure) -> str:
    """A change of a share, with its interval."""
    value, low, high = (
        f"{100 * part:+.1f}" for part in (change.value, change.low, change.high)
    )
    return f"{value} points (95 % interval {low} to {high})"


@dataclass(frozen=True)
class Hub:
    """A target that is found by too many queries: its id in a store, or its row, and how many find it by each search:
    raw, and by a method's label, in a store corrected."""

    id: int | str
    name: str
    found_by: dict[str, int]


@dataclass(frozen=True)
class Histogram:
    """How many targets have an offset between one edge and the next. label: of the method."""

    label: str
    edges: list[float]
    counts: list[int]


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
class KeyFigure:
    """One figure of the first screen. shown: as it is now; before: what it was, where there is a before. rose: whether
    it is larger now, which may be better or worse."""

    title: str
    shown: str = "not measured"
    direction: Direction = "unknown"
    before: str = ""
    note: str = ""
    rose: bool = False


@dataclass(frozen=True)
class Plot:
    """draw: onto axes of matplotlib, see `plots`."""

    title: str
    draw: Callable[[Axes], None]
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
class Report:
    """What people are shown of a result; what is empty is left out.

    verdict: what it comes to, one line, and `more`, what else there is to it; direction "same" is neither help nor
    harm. details: how it was found, which a terminal shows when asked. causes: see `hubplugin.causes.Finding`. after:
    the label of the search that is shown beside the raw one; k: of its k-occurrence. facts: how it was made, by name.
    """

    title: str
    subtitle: str = ""
    verdict: str = ""
    direction: Direction = "same"
    more: Sequence[str] = ()
    key_figures: Sequence[KeyFigure] = ()
    sentences: Sequence[str] = ()
    details: Sequence[str] = ()
    causes: Sequence[Any] = ()
    examples: Sequence[Example] = ()
    hubs: Sequence[Hub] = ()
    anti_hubs: Sequence[str] = ()
    after: str = "corrected"
    k: int = 10
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


class Result:
    """What a job found or did: a dataclass, whose fields are its JSON. It prints as text."""

    store: str | None

    def report(self) -> Report:
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self.report())

    def as_json(self) -> dict[str, Any]:
        """Its fields as plain JSON; null for numbers that are none, which JSON has no word for."""
        figures: dict[str, Any] = json.loads(_adapter(type(self)).dump_json(self))
        return figures

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes `as_json`. Raises InputError where `path` cannot be written."""
        write_file(path, (json.dumps(self.as_json(), indent=1) + "\n").encode())

    def to_html(self, path: str | os.PathLike[str], command: str | None = None) -> None:
        """Writes the report: one page, which refers to nothing outside itself.

        Args:
            path: of the page.
            command: what was typed, which the page then names.

        Raises:
            InputError: `path` cannot be written, or Jinja2 or matplotlib is missing.
        """
        facts = {} if self.store is None else {"store": self.store}
        write_file(
            path,
            as_html(
                self.report(), facts | ({"command": command} if command else {})
            ).encode(),
        )


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def share_figure(
    title: str,
    before: float | None,
    after: float | None,
    *,
    more_is_better: bool,
    change: Figure | None = None,
    note: str = "",
    unknown: str = "",
) -> KeyFigure:
    """The key figure of a share, 0 to 1.

    Args:
        title: of the figure.
        before: of the raw search; None where it was not measured.
        after: of the corrected search; None where there is no correction.
        more_is_better: says which direction is better.
        change: the change with its interval, where it is known; within chance it has no direction.
        note: beside the figure.
        unknown: the note where it was not measured.
    """
    if before is None:
        return KeyFigure(title, note=unknown)
    if after is None:
        return KeyFigure(title, percent(before), note=note)
    sign = (
        change.sign
        if change is not None
        else 0
        if abs(after - before) < SAME
        else 1
        if after > before
        else -1
    )
    return KeyFigure(
        title,
        percent(after),
        DIRECTIONS[sign if more_is_better else -sign],
        percent(before),
        note,
        rose=after > before,
    )


def sides_figure(title: str, sides: Sequence[Side | None], unknown: str) -> KeyFigure:
    """The key figure of the change of R@1 of parts of the queries.

    A change that is within chance has no direction, and a harm weighs more than a gain.

    Args:
        title: of the figure.
        sides: of the parts; None, shown as "?", where a part was not measured.
        unknown: the note where none was.
    """
    measured = [side for side in sides if side is not None]
    if not measured:
        return KeyFigure(title, note=unknown)
    shown = (
        "?"
        if side is None
        else f"{100 * side.change.value:+.1f}"
        if side.change.sign
        else "same"
        for side in sides
    )
    signs = [side.change.sign for side in measured]
    direction = DIRECTIONS[min(signs) if min(signs) < 0 else max(signs)]
    note = "; ".join(
        f"{side.what}: {percent(side.before)} → {percent(side.after)} "
        f"({100 * side.change.low:+.1f} to {100 * side.change.high:+.1f})"
        for side in measured
    )
    return KeyFigure(
        title, " / ".join(shown), direction, note=note, rose=direction == "better"
    )


def describe_changes(
    worst: float,
    now: float,
    queries: int,
    first: float | None,
    first_now: float | None,
    change: Figure | None = None,
) -> str:
    """Says in words how often the worst hub is found, and how R@1 changed where it is known.

    Args:
        worst, now: the share of queries that find the worst hub, before and now.
        queries: how many there are.
        first, first_now: R@1 before and now.
        change: of R@1, whose interval is told.
    """
    hits, hits_now = round(worst * queries), round(now * queries)
    verb = "falls" if hits_now < hits else "rises"
    went = (
        f"stays at {hits:,}"
        if hits_now == hits
        else f"{verb} from {hits:,} to {hits_now:,}"
    )
    text = f"the worst hub {went} of {queries:,} queries"
    if first is None or first_now is None:
        return text
    interval = (
        ""
        if change is None
        else f" ({100 * change.low:+.1f} to {100 * change.high:+.1f} points)"
    )
    return f"{text}; right answers first: {100 * first:.1f} to {percent(first_now)}{interval}"


NAMED = 10
"""Hubs and anti-hubs that the text names; a page names all."""

ROOMY, WIDEST = 130, 150
"""Columns from which on a table is shown whole, and those that are used where nobody says how many there are."""


def as_text(report: Report, width: int = WIDEST, verbose: bool = False) -> str:
    """`report` in lines of at most `width`, the verdict first; pictures are for pages. If `verbose`, also how it was
    found."""
    return "\n".join(_lines(report, width, verbose))


def _lines(report: Report, width: int, verbose: bool) -> Iterator[str]:
    if report.verdict:
        yield f"{report.verdict[:1].upper()}{report.verdict[1:]}."
    yield from (_draw(table, width) for table in report.tables if table.brief)
    yield from report.sentences
    if report.hubs:
        counts = (
            [hub.found_by.get("raw"), hub.found_by.get(report.after)]
            for hub in report.hubs[:NAMED]
        )
        hits = (
            " -> ".join(str(count) for count in pair if count is not None)
            for pair in counts
        )
        yield f"hubs: {', '.join(f'{hub.name} by {by}' for hub, by in zip(report.hubs, hits, strict=False))}"
    if report.anti_hubs:
        yield f"never found, for instance: {', '.join(report.anti_hubs[:NAMED])}"
    yield from map(str, report.causes)
    yield from report.more
    yield from report.details if verbose else ()


def _lay_out(cell: Cell) -> str:
    """Small text below the text, an interval as narrow as it can be read: what has signs keeps its "to"."""
    if isinstance(cell, str):
        return cell
    text, small = cell[0], cell[1].strip()
    return f"{text}\n{small if '+' in small or '-' in small else small.replace(' to ', '-')}"


def _draw(table: Table, width: int) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = [
        place
        for place, name in enumerate(table.columns)
        if width >= ROOMY or name in table.brief
    ]
    drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for place in shown:
        drawn.add_column(
            table.columns[place],
            justify="right" if place else "left",
            no_wrap=place > 0,
            overflow="fold",
        )
    for number, row in enumerate(table.rows):
        texts = (_lay_out(row[place]) for place in shown)
        drawn.add_row(*texts, style="bold" if number in table.marked else "")
    text = io.StringIO()
    Console(width=width, file=text).print(drawn)
    return text.getvalue().rstrip("\n")


PACKAGES = ("numpy", "torch", "faiss-cpu", "qdrant-client")
"""Whose versions a page names."""


def as_html(report: Report, facts: Mapping[str, str]) -> str:
    """The page of `report`. `facts` say how it was made, beside those of the report. Raises InputError where Jinja2 or
    matplotlib is missing."""
    try:
        from jinja2 import Environment

        from hubplugin.report.plots import svg

        template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
        page = Environment(
            autoescape=True, trim_blocks=True, lstrip_blocks=True
        ).from_string(template)
        date = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")
        shown = {
            **facts,
            **report.facts,
            "versions": ", ".join(_versions()),
            "date": date,
        }
        return page.render(p=report, facts=shown, svg=svg)
    except ImportError as error:
        raise InputError(
            f"the report needs {error.name}; {install('evaluation')}"
        ) from None


def _versions() -> Iterator[str]:
    yield from (f"hubplugin {__version__}", f"Python {platform.python_version()}")
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes `content` to a file that a user has named, whole or not at all; where `path` is a link, to the file that
    it leads to. Raises InputError."""
    try:
        atomic.write(os.path.realpath(path), content)
    except OSError as error:
        raise InputError(
            f"cannot write {os.fspath(path)!r}: {error.strerror}"
        ) from None
