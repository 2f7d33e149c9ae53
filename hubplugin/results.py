"""The one renderer: a result becomes text, a page of HTML and JSON here, and nowhere else.

A result is a dataclass that derives from `Result`. Its fields are its JSON, by pydantic; docs/reference/json.md is made
from them. Its `page` is what people are shown: a headline, and sections of rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from hubplugin import atomic
from hubplugin._version import __version__
from hubplugin.errors import InputError, install
from hubplugin.measures.significance import Figure, Side

Direction = Literal["better", "worse", "same"]

DIRECTIONS: dict[int, Direction] = {1: "better", 0: "same", -1: "worse"}
"""By the sign of a change for which more is better."""

RECALL = "right answer first (R@1)"
WORST = "queries that find the worst hub"
NEVER = "targets that no query finds"

NAMED = 10
"""Hubs and other targets that are named to people; JSON has all."""


@dataclass(frozen=True)
class Hub:
    """A target that too many queries find: its id in a store, or its row, and how many find it by each search: raw, and
    by a method's label, in a store corrected."""

    id: int | str
    name: str
    found_by: dict[str, int]


@dataclass(frozen=True)
class Row:
    """A line of a section. Its cells belong to the section's columns, or stand beside each other.

    direction: whether it is good or bad news, None for neither.
    """

    cells: Sequence[str]
    direction: Direction | None = None


@dataclass(frozen=True)
class Chart:
    """A histogram: how many targets have each value, a number on `axis`, by the label of the series."""

    axis: str
    series: Mapping[str, Mapping[Any, int]]


@dataclass(frozen=True)
class Section:
    """A part of a page: a title over rows, a chart, or both.

    columns: over the cells of the rows, where these are a table. note: small print below. detail: a terminal shows it
    only when asked; a page of HTML always.
    """

    title: str
    rows: Sequence[Row] = ()
    columns: Sequence[str] = ()
    chart: Chart | None = None
    note: str = ""
    detail: bool = False


@dataclass(frozen=True)
class Page:
    """What people are shown of a result.

    headline: what it comes to, one line. direction: whether that is good news. scene: what was looked at.
    """

    headline: str
    direction: Direction = "same"
    scene: str = ""
    sections: Sequence[Section] = ()


class Result:
    """The base of all results, dataclasses whose fields are their JSON. A result prints as text."""

    store: str | None

    def page(self) -> Page:
        """Return what people are shown."""
        raise NotImplementedError

    def as_text(self, verbose: bool = False) -> str:
        """Return the page as text; if `verbose`, with the sections of details."""
        page = self.page()
        lines = [f"{capital(page.headline)}."]
        scene = [part for part in (self.store, page.scene) if part]
        if scene:
            lines.append(" · ".join(scene))
        for section in page.sections:
            if not section.rows or (section.detail and not verbose):
                continue
            lines += ["", section.title, *_align(section)]
            if section.note:
                lines.append(f"  {section.note}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.as_text()

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON. NaN and infinity, which JSON lacks, become null."""
        fields: dict[str, Any] = json.loads(_adapter(type(self)).dump_json(self))
        return fields

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `as_json` to `path`. Raises InputError where it cannot be written."""
        text = json.dumps(self.as_json(), indent=1)
        write_file(path, f"{text}\n".encode())

    def to_html(self, path: str | os.PathLike[str], command: str | None = None) -> None:
        """Write the page as one HTML file that refers to nothing outside itself.

        Args:
            path: of the file.
            command: what was typed, which the page names.

        Raises:
            InputError: `path` cannot be written, or Jinja2 is missing.
        """
        try:
            from jinja2 import Environment
        except ImportError:
            message = f"the report needs jinja2; {install('evaluation')}"
            raise InputError(message) from None
        template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        facts = {
            "store": self.store,
            "command": command,
            "version": f"hubplugin {__version__}",
            "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
        }
        text = environment.from_string(template).render(
            page=self.page(), facts=facts, capital=capital
        )
        write_file(path, text.encode())


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _align(section: Section) -> Iterator[str]:
    """Yield the rows of a section as lines, under their columns where it has some."""
    if not section.columns:
        for row in section.rows:
            yield f"  {'  '.join(row.cells)}"
        return
    table = [section.columns]
    for row in section.rows:
        empty = [""] * (len(section.columns) - len(row.cells))
        table.append([*row.cells, *empty, row.direction or ""])
    columns = zip_longest(*table, fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    for cells in table:
        first = cells[0].ljust(widths[0])
        others = map(str.rjust, cells[1:], widths[1:])
        yield f"  {'  '.join([first, *others])}".rstrip()


def rows_of(*lines: str) -> list[Row]:
    """Return a row for each line."""
    return [Row((line,)) for line in lines]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def points(change: Figure) -> str:
    """Return a change of a share in points, with its interval."""
    interval = f"{100 * change.low:+.1f} to {100 * change.high:+.1f}"
    return f"{100 * change.value:+.1f} points (95 % interval {interval})"


def decimal(value: float) -> str:
    return f"{value:.2f}"


def row_of(
    title: str, *values: float | None, form: Callable[[float], str] = percent
) -> list[Row]:
    """Return the row of a measure of several searches, none where it was not measured.

    Args:
        title: of the row.
        values: of the searches; None where it was not measured.
        form: makes a text of each.
    """
    known = [form(value) for value in values if value is not None]
    return [Row((title, *known))] if known else []


COMPARED = ("", "raw", "corrected", "change")
"""The columns over rows of `changes_of` and `row_of`."""


def changes_of(sides: Mapping[str, Side | None]) -> list[Row]:
    """Return a row for each change of R@1 that was measured, good or bad where it is beyond chance."""
    return [
        Row(
            (title, percent(side.before), percent(side.after), points(side.change)),
            DIRECTIONS[side.change.sign],
        )
        for title, side in sides.items()
        if side is not None
    ]


def list_hubs(
    hubs: Sequence[Hub], searches: Sequence[str], k: int, never: Sequence[str] = ()
) -> Section:
    """Return the section of the targets that come back most.

    Args:
        hubs: the targets, the most found first.
        searches: the labels of the searches that are shown.
        k: how many a query finds.
        never: some that no query finds.
    """
    rows = list[Row]()
    for hub in hubs[:NAMED]:
        counts = [hub.found_by.get(search) for search in searches]
        rows += row_of(hub.name, *counts, form=str)
    note = f"Queries that have the target among their first {k}."
    if never:
        note += f" Never found, for instance: {', '.join(never[:NAMED])}"
    return Section("Found most often", rows, ("", *searches), note=note)


def chart_occurrences(parts: Mapping[str, Mapping[int, int]], k: int) -> Section:
    """Return the chart of how many targets have the `k`-occurrence N, by N, of each search in `parts`."""
    chart = Chart(f"queries with a target among their first {k}", parts)
    return Section("How often targets are found", chart=chart)


def describe_changes(
    worst: tuple[float, float], queries: int, right: Side | None
) -> str:
    """Say how often the worst hub is found, and how R@1 changed where it is known.

    Args:
        worst: the share of queries that find the worst hub, before and after.
        queries: how many there are.
        right: R@1 before and after.
    """
    before, after = (round(share * queries) for share in worst)
    verb = "falls" if after < before else "rises"
    went = f"{verb} from {before:,} to {after:,}"
    if after == before:
        went = f"stays at {before:,}"
    text = f"the worst hub {went} of {queries:,} queries"
    if right is None:
        return text
    recall = f"{percent(right.before)} to {percent(right.after)}"
    return f"{text}; right answers first: {recall}, {points(right.change)}"


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to the file `path` that a user has named, whole or not at all; a link stays one.

    Raises:
        InputError: it cannot be written.
    """
    try:
        atomic.write(os.path.realpath(path), content)
    except OSError as error:
        message = f"cannot write {os.fspath(path)!r}: {error.strerror}"
        raise InputError(message) from None
