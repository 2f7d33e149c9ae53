"""The one renderer: a result becomes text, a page of HTML and JSON here, and nowhere else.

A result is a dataclass that derives from `Result`. Its fields are its JSON, by pydantic; docs/reference/json.md is made
from them. Its `page` is what people are shown: a headline, sections of rows, and what to do next.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from pydantic import TypeAdapter

from hubplugin import atomic
from hubplugin._version import __version__
from hubplugin.errors import InputError, install
from hubplugin.measures.significance import Figure, Side

if TYPE_CHECKING:
    from rich.table import Table

Direction = Literal["better", "worse", "same"]

DIRECTIONS: dict[int, Direction] = {1: "better", 0: "same", -1: "worse"}
"""By the sign of a change for which more is better."""

CORRECTED = "corrected"

RECALL = "right answer first (R@1)"
WORST = "worst hub, of all queries"
NEVER = "targets never found"

NAMED = 6
"""Hubs and other targets that are named to people; JSON has more."""


@dataclass(frozen=True)
class Misled:
    """A query for which a hub comes first, and what comes first after the correction.

    right: True if `after` is a right answer; None without known answers.
    """

    query: str
    after: str
    right: bool | None = None

    def __str__(self) -> str:
        return f"→ {self.after}{' ✓' if self.right else ''} for {self.query}"


@dataclass(frozen=True)
class Hub:
    """A target that too many queries find.

    id: in a store, or its row. name: what it is called. found_by: how many queries find it
    by each search: "raw", and "corrected" or the label of a method. misled: some of the
    queries for which it wrongly comes first.
    """

    id: int | str
    name: str
    found_by: dict[str, int]
    misled: Sequence[Misled] = ()


@dataclass(frozen=True)
class Bar:
    """A cell with a bar from `start` to `end`, shares of its width.

    zero: True if the middle of the bar is 0, as it is for intervals.
    """

    text: str
    end: float
    start: float = 0.0
    zero: bool = False

    def __str__(self) -> str:
        if self.zero:
            return self.text
        return f"{self.text:>5} {'█' * round(6 * self.end):6}"


@dataclass(frozen=True)
class Row:
    """A line of a section. It has a cell for each of the section's columns, if there are columns.

    direction: good or bad news, None for neither. more: lines that it opens to; a
    terminal shows the first. image: the file name of its picture.
    """

    cells: Sequence[str | Bar]
    direction: Direction | None = None
    more: Sequence[str] = ()
    image: str = ""


@dataclass(frozen=True)
class Chart:
    """A histogram: for each series, by label, how many targets have each value on `axis`."""

    axis: str
    series: Mapping[str, Mapping[Any, int]]


@dataclass(frozen=True)
class Section:
    """A part of a page: a title over rows, a chart, or both.

    columns: the titles of the cells, if rows are a table. note: small print below.
    """

    title: str
    rows: Sequence[Row] = ()
    columns: Sequence[str] = ()
    chart: Chart | None = None
    note: str = ""


@dataclass(frozen=True)
class Step:
    """Something to do next: a `job` with its `options`, or a `text`.

    brings: what it brings, as far as that was measured.
    """

    brings: str
    job: str = ""
    options: Sequence[str] = ()
    text: str = ""


Spell: TypeAlias = Callable[[Step], str]


def as_call(step: Step) -> str:
    """Return the Python call that does the job of a step."""
    needs_bank = step.job in ("diagnose", "apply", "refit")
    given = ["store", *["bank"] * needs_bank]
    given += [f"{name}=True" for name in step.options]
    return f"hubplugin.{step.job}({', '.join(given)})"


@dataclass(frozen=True)
class Page:
    """The page that people are shown of a result.

    headline: the outcome, one line. direction: whether the outcome is good news. scene:
    what was looked at. steps: what to do next.
    """

    headline: str
    direction: Direction = "same"
    scene: str = ""
    sections: Sequence[Section] = ()
    steps: Sequence[Step] = ()


class Result:
    """The base of all results, dataclasses whose fields are their JSON. A result prints as text."""

    store: str | None

    def page(self) -> Page:
        """Return what people are shown."""
        raise NotImplementedError

    def as_text(
        self, verbose: bool = False, terminal: bool = False, spell: Spell = as_call
    ) -> str:
        """Return the page as text.

        Args:
            verbose: show all lines that rows open to, not the first alone.
            terminal: use colours.
            spell: returns the call or the command that does the job of a step.
        """
        from rich.console import Console
        from rich.padding import Padding
        from rich.text import Text

        page = self.page()
        told = io.StringIO()
        console = Console(file=told, force_terminal=terminal)

        def say(text: str, style: str = "", indent: int = 0) -> None:
            shown = Padding(Text(clean(text)), (0, 0, 0, indent))
            console.print(shown, style=style)

        def say_whole(text: str, style: str = "") -> None:
            """Print a text in one line, so that it can be copied or read by a program."""
            console.print(Text(clean(text)), style=style, soft_wrap=True)

        headline = say if terminal else say_whole
        headline(f"{capital(page.headline)}.", f"bold {COLOURS[page.direction]}")
        say_whole(" · ".join(filter(None, (self.store, page.scene))), "dim")
        for section in page.sections:
            if section.rows:
                console.print()
                say(section.title, "bold")
                with console.capture() as table:
                    console.print(Padding(_as_table(section), (0, 0, 0, 2)))
                more = [row.more if verbose else row.more[:1] for row in section.rows]
                lines = table.get().splitlines()
                # Rows that open to more are never wrapped: line 0 has the columns, and
                # each other line is a row.
                for line, opened in zip_longest(lines, [[], *more], fillvalue=()):
                    told.write(f"{line}\n")
                    for text in opened:
                        say(shorten(text, console.width - 8), "dim", 6)
                if section.note:
                    say(section.note, "dim", 2)
        if page.steps:
            console.print()
            say("Next", "bold")
        for step in page.steps:
            say_whole(f"  {step.text or spell(step)}")
            say(step.brings, "dim", 4)
        return "\n".join(line.rstrip() for line in told.getvalue().splitlines())

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {capital(clean(self.page().headline))}>"

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON. NaN and infinity, which JSON lacks, become null."""
        fields: dict[str, Any] = json.loads(_adapter(type(self)).dump_json(self))
        return fields

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `as_json` to `path`. Raises InputError where it cannot be written."""
        text = json.dumps(self.as_json(), indent=1)
        write_file(path, f"{text}\n".encode())

    def to_html(
        self,
        path: str | os.PathLike[str],
        command: str | None = None,
        images: str | os.PathLike[str] | None = None,
        spell: Spell = as_call,
    ) -> None:
        """Write the page as one HTML file that refers to nothing outside itself.

        Args:
            path: the file.
            command: the command that was typed, which the page shows.
            images: a folder with pictures of targets, named as the targets are.
            spell: as in `as_text`.

        Raises:
            InputError: `path` cannot be written, or Jinja2 or Pillow is missing.
        """
        try:
            from jinja2 import Environment
        except ImportError:
            message = f"the report needs jinja2; {install('evaluation')}"
            raise InputError(message) from None
        template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        environment = Environment(
            autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown
        )
        facts = {
            "store": self.store,
            "command": command,
            "version": f"hubplugin {__version__}",
            "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
            "holds": "names of targets, and queries, as store and bank have them",
        }
        text = environment.from_string(template).render(
            page=self.page(),
            facts=facts,
            capital=capital,
            picture=lambda row: draw_thumbnail(images, row.image),
            spell=lambda step: step.text or spell(step),
            largest=_largest,
        )
        write_file(path, text.encode())


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)

HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]+"
)
"""Control characters, and those that change the direction of the text around them."""


def clean(text: str) -> str:
    """Return `text` with a space for characters that could falsify what is shown."""
    return HIDDEN.sub(" ", text)


def _largest(series: Mapping[str, Mapping[int, int]]) -> tuple[int, int]:
    """Return the largest value in a chart, and the largest count; each at least 1."""
    parts = series.values()
    return (
        max([1, *(max(part, default=0) for part in parts)]),
        max([1, *(max(part.values(), default=0) for part in parts)]),
    )


def _shown(value: Any) -> Any:
    return clean(value) if type(value) is str else value


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _is_number(cell: object) -> bool:
    return bool(re.fullmatch(r"[-+]?\d[^█]*|", str(cell)))


COLOURS: Mapping[Direction | None, str] = {
    "better": "green",
    "worse": "red",
    "same": "",
    None: "",
}


def shorten(text: str, longest: int) -> str:
    """Return a text in one line, cut to `longest` characters."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def _as_table(section: Section) -> Table:
    """Return the rows of a section as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    is_table = bool(section.columns)
    opens = any(row.more for row in section.rows)
    table = Table(
        box=None, show_header=is_table, padding=(0, 2, 0, 0), header_style="dim"
    )
    cells = (row.cells for row in section.rows)
    for title, *column in zip_longest(section.columns, *cells, fillvalue=""):
        right = bool(table.columns) and all(map(_is_number, column))
        side: Any = "right" if right else "left"
        table.add_column(str(title), justify=side, no_wrap=right or opens)
    for row in section.rows:
        first, *others = (Text(clean(str(cell))) for cell in row.cells)
        others += [Text("")] * (len(section.columns) - len(row.cells))
        style = COLOURS[row.direction]
        if is_table:
            table.add_row(first, *others, row.direction, style=style)
        else:
            first.stylize(style)
            table.add_row(first, *others)
    return table


def rows_of(*lines: str) -> list[Row]:
    """Return a row for each line."""
    return [Row((line,)) for line in lines]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def points(change: Figure) -> str:
    """Return a change of a share in points, with its 95 % interval."""
    interval = f"{100 * change.low:+.1f} to {100 * change.high:+.1f}"
    return f"{100 * change.value:+.1f} ({interval})"


def decimal(value: float) -> str:
    return f"{value:.2f}"


def row_of(
    title: str, *values: float | None, form: Callable[[float], str] = percent
) -> list[Row]:
    """Return a list of one row: a measure by several searches. It is empty without values.

    Args:
        title: the title of the row.
        values: the value by each search; None if it was not measured.
        form: formats a value.
    """
    known = [form(value) for value in values if value is not None]
    return [Row((title, *known))] if known else []


COMPARED = ("", "raw", "corrected", "points (95 %)")
"""The columns over rows of `changes_of` and `row_of`."""


AXIS = 5
"""Bars of intervals reach from -1 / (2 AXIS) to 1 / (2 AXIS): 10 points of R@1."""


def changes_of(sides: Mapping[str, Side | None]) -> list[Row]:
    """Return a row for each change of R@1 that was measured.

    It is good or bad news if the change is beyond chance.
    """
    rows = []
    for title, side in sides.items():
        if side is not None:
            change = side.change
            low, high = np.clip(
                [0.5 + AXIS * change.low, 0.5 + AXIS * change.high], 0, 1
            )
            interval = Bar(points(change), high, low, zero=True)
            cells = (title, percent(side.before), percent(side.after), interval)
            rows.append(Row(cells, DIRECTIONS[change.sign]))
    return rows


def list_hubs(
    hubs: Sequence[Hub],
    searches: Sequence[str],
    k: int,
    never: Sequence[str] = (),
    field: str | None = None,
) -> Section:
    """Return the section of the targets that most queries find by any of the searches.

    Args:
        hubs: the targets.
        searches: the labels of the searches that are shown.
        k: how many targets a query finds.
        never: names of some targets that no query finds.
        field: the field that has the names of targets.
    """

    def most(hub: Hub) -> int:
        return max(hub.found_by[search] for search in searches)

    shown = sorted(hubs, key=most, reverse=True)[:NAMED]
    rows = list[Row]()
    for hub in shown:
        counts = [hub.found_by[search] for search in searches]
        bars = [Bar(f"{count:,}", count / max(most(shown[0]), 1)) for count in counts]
        label = f" [{hub.id}]"
        name = hub.name.removesuffix(label)
        rows.append(Row((hub.name, *bars), None, [*map(str, hub.misled)], name))
    note = f"Queries that have the target among their first {k}."
    if any(hub.misled for hub in shown):
        note += " Below it (→): what comes first instead for a query that found it first; ✓ is right."
    if never:
        note += f" Never found, for instance: {', '.join(never[:NAMED])}."
    return Section("Comes back most", rows, (field or "", *searches), note=note)


def chart_occurrences(parts: Mapping[str, Mapping[int, int]]) -> Chart:
    """Return the chart of the k-occurrence: `parts` has a histogram for each search."""
    return Chart("queries that find a target among their first places", parts)


def describe_changes(
    worst: tuple[float, float], queries: int, right: Side | None
) -> str:
    """Describe how many queries find the worst hub, and how R@1 changed.

    Args:
        worst: the share of queries that find the worst hub, before and after.
        queries: how many queries there are.
        right: R@1 before and after; None without known answers.
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
    return f"{text}; right answers first: {recall}, {points(right.change)} points"


THUMBNAIL = (96, 96)


def draw_thumbnail(folder: str | os.PathLike[str] | None, name: str) -> str | None:
    """Return a thumbnail of the picture called `name` in a folder, as a data URL.

    Return None if there is no such picture there, or it cannot be read.

    Raises:
        InputError: Pillow is missing.
    """
    if folder is None or not name or "://" in name:
        return None
    root = Path(folder).resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        return None
    try:
        from PIL import Image
    except ImportError:
        message = f"pictures need Pillow; {install('evaluation')}"
        raise InputError(message) from None
    content = io.BytesIO()
    try:
        with Image.open(path) as image:
            small = image.convert("RGB")
            small.thumbnail(THUMBNAIL)
            small.save(content, "JPEG")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None  # the name is shown alone
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path`, whole or not at all. A symbolic link is followed, not replaced.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        atomic.write(os.path.realpath(path), content)
    except OSError as error:
        message = f"cannot write {os.fspath(path)!r}: {error.strerror}"
        raise InputError(message) from None
