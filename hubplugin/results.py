"""The only renderer: it turns a result into text, a page of HTML, and JSON.

A result is a dataclass that derives from `Result`. pydantic turns its fields into JSON,
and docs/reference/json.md is generated from them. Its `page` is for people: a headline,
sections of lines, tables and charts, and the next steps.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from hubplugin import atomic
from hubplugin._version import __version__
from hubplugin.errors import InputError, install
from hubplugin.measures.significance import Figure, Side

NEWS: Mapping[int | None, str] = {1: "better", 0: "same", -1: "worse", None: ""}
"""Words for good news and bad news, by sign; None stands for no news."""

COLOURS: Mapping[int | None, str] = {1: "green", 0: "", -1: "red", None: ""}

RAW = "raw"
CORRECTED = "corrected"

COMPARED = (RAW, CORRECTED, "points (95%)")
"""The columns of a comparison, see `compare`."""

RECALL = "right answer first (R@1)"
WORST = "queries that find the worst hub"
NEVER = "targets never found"
SKEWNESS = "skewness"

NAMED = 6
"""The most hubs, or other targets, that a page names; JSON has more."""


@dataclass(frozen=True)
class Outcome:
    """The target that comes first for a query after the correction.

    after: The name of the target.
    right: True if the target is known to be a right answer.
    """

    query: str
    after: str
    right: bool

    def __str__(self) -> str:
        mark = " ✓" if self.right else ""
        return f"→ {self.after}{mark} for {self.query}"


@dataclass(frozen=True)
class Hub:
    """A target that too many queries find.

    id: The id in a store, or the row.
    name: The name, followed by the id if there is one.
    found_by: The number of queries that find the target in each search: "raw", and
        "corrected" or the label of a method.
    misled: Some of the queries for which the target wrongly comes first, each with the
        target that comes first after the correction.
    """

    id: int | str
    name: str
    found_by: dict[str, int]
    misled: Sequence[Outcome] = ()

    @property
    def title(self) -> str:
        """The name, without the id behind it."""
        return self.name.removesuffix(f" [{self.id}]")

    @property
    def largest(self) -> int:
        """The number of queries that find the target, in the search with most of them."""
        return max(self.found_by.values())


@dataclass(frozen=True)
class Bar:
    """A cell with a text and a bar.

    end: The end of the bar, as a share of the cell's width.
    start: The start of the bar of an interval, likewise. None for the bar of a count,
        which starts at the left edge; only such a bar is shown in text.
    """

    text: str
    end: float
    start: float | None = None

    def __str__(self) -> str:
        if self.start is not None:
            return self.text
        return f"{'█' * round(6 * self.end)} {self.text:>5}"


@dataclass(frozen=True)
class Row:
    """A row of a table.

    sign: 1 for good news, -1 for bad news, 0 for a change that may be chance.
    more: Lines that the opened row shows in HTML. Text shows the first line.
    image: The file name of the row's picture.
    """

    cells: Sequence[str | Bar]
    sign: int | None = None
    more: Sequence[str] = ()
    image: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a page: a table, lines below it, or both.

    lines: The lines; empty ones are left out.
    rows: The rows of the table. The first cell of a row is its name, and one cell for
        each of `columns` follows.
    columns: The titles of all columns but the first.
    chart: A histogram for each search: the number of targets found by N queries, by N.
    note: A note below everything else.
    """

    title: str
    lines: Sequence[str] = ()
    rows: Sequence[Row] = ()
    columns: Sequence[str] = ()
    chart: Mapping[str, Mapping[int, int]] | None = None
    note: str = ""


@dataclass(frozen=True)
class Step:
    """A suggested next step: a `job` to run, or a `text`, such as code or advice.

    reason: The reason for the step, or its measured benefit.
    learn: True if the job is to learn a query map.
    """

    reason: str
    job: str = ""
    learn: bool = False
    text: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: run {self.job}" if self.job else self.reason


Spell: TypeAlias = Callable[[Step], str]


def as_call(step: Step) -> str:
    """Return the Python call that runs the job of a step."""
    takes_bank = step.job in ("diagnose", "apply", "refit")
    arguments = ["store", *["bank"] * takes_bank, *["learn=True"] * step.learn]
    return f"hubplugin.{step.job}({', '.join(arguments)})"


@dataclass(frozen=True)
class Page:
    """The page that shows a result to people.

    headline: The outcome in one line.
    sign: The sign of the news, as in `Row`.
    subject: The data that was examined, such as the number of targets.
    steps: The suggested next steps.
    """

    headline: str
    sign: int = 0
    subject: str = ""
    sections: Sequence[Section] = ()
    steps: Sequence[Step] = ()

    @property
    def title(self) -> str:
        """The headline with a capital letter."""
        return self.headline[:1].upper() + self.headline[1:]


class Result:
    """The base of all results: dataclasses whose fields become JSON.

    A result prints as text.
    """

    store: str | None

    def page(self) -> Page:
        """Return the page that shows the result to people."""
        raise NotImplementedError

    def as_text(
        self, verbose: bool = False, terminal: bool = False, spell: Spell = as_call
    ) -> str:
        """Return the page as text.

        Args:
            verbose: Show all additional lines of each row, not only the first.
            terminal: Use colours.
            spell: A function that returns the call or command for a step.
        """
        from rich.console import Console
        from rich.padding import Padding
        from rich.text import Text

        page = self.page()
        output = io.StringIO()
        console = Console(file=output, force_terminal=terminal)

        def say(text: str, style: str = "", indent: int = 2) -> None:
            """Print a text in lines that fit, all with the same indentation."""
            shown = Padding.indent(Text(clean(text)), indent)
            console.print(shown, style=style)

        def say_whole(text: str, style: str = "") -> None:
            """Print a text in one line, which people can copy and programs can read."""
            console.print(Text(clean(text)), style=style, soft_wrap=True)

        headline = f"{page.title}."
        style = f"bold {COLOURS[page.sign]}"
        if terminal:
            say(headline, style, 0)
        else:
            say_whole(headline, style)
        say_whole(" · ".join(filter(None, (self.store, page.subject))), "dim")
        for section in page.sections:
            console.print()
            heading, *lines = _format_table(section, console.width - 2)
            say_whole(heading, "bold")
            for row, line in zip(section.rows, lines, strict=True):
                say_whole(line, COLOURS[row.sign])
                for extra in row.more if verbose else row.more[:1]:
                    say(extra, "dim", 6)
            for line in filter(None, section.lines):
                say(line)
            if section.note:
                say(section.note, "dim")
        if page.steps:
            console.print()
            say("Next", "bold")
        for step in page.steps:
            say_whole(f"  {step.text or spell(step)}")
            say(step.reason, "dim", 4)
        return "\n".join(line.rstrip() for line in output.getvalue().splitlines())

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {clean(self.page().title)}>"

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON; NaN and infinity become null."""
        fields: dict[str, Any] = json.loads(TypeAdapter(type(self)).dump_json(self))
        return fields

    def to_html(
        self,
        path: str | os.PathLike[str],
        command: str | None = None,
        images: str | os.PathLike[str] | None = None,
        spell: Spell = as_call,
    ) -> None:
        """Write the page as one self-contained HTML file.

        Args:
            path: The file.
            command: The command that was typed; the page shows it.
            images: A folder with pictures of targets, whose file names are the targets'
                names.
            spell: As in `as_text`.

        Raises:
            InputError: `path` cannot be written, or Jinja2 or Pillow is missing.
        """
        try:
            import PIL  # noqa: F401 - for pictures
            from jinja2 import Environment
        except ImportError as error:
            raise InputError(
                f"the report needs {error.name}; {install('evaluation')}"
            ) from None
        template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        environment = Environment(
            autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=clean
        )
        text = environment.from_string(template).render(
            page=self.page(),
            store=self.store,
            command=command,
            version=__version__,
            date=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
            news=NEWS,
            picture=lambda row: draw_thumbnail(images, row.image),
            spell=spell,
        )
        write_file(path, text.encode())


HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]+"
)
"""Control characters, and characters that change the direction of text."""


def clean(text: object) -> str:
    """Return a text with spaces for characters that could falsify its display."""
    return HIDDEN.sub(" ", str(text))


SHORTEST = 12
"""The fewest columns to which the name of a row is cut, even in a narrow terminal."""


def _format_table(section: Section, width: int) -> Iterator[str]:
    """Yield a line with the titles of a section and its columns, then one for each row.

    The first cell of a row is cut if a line would be longer than `width`, but never to
    fewer than `SHORTEST` columns of text.
    """
    from rich.cells import cell_len, set_cell_size

    table = [(section.title, *section.columns, "")]
    for row in section.rows:
        table.append((*map(clean, row.cells), NEWS[row.sign]))
    first, *others = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    # Two spaces stand before each of the other columns.
    room = width - sum(others) - 2 * len(others)
    first = min(first, max(SHORTEST, room))
    for title, *cells in table:
        line = f"  {set_cell_size(title, first)}"
        for cell, size in zip(cells, others, strict=True):
            line += f"  {cell:>{size}}"
        yield line


AXIS = 5
"""The scale of interval bars: they reach from -1 / (2 AXIS) to 1 / (2 AXIS), which is
10 points of R@1 on either side."""


def points(change: Figure) -> str:
    """Return a change of a share, in points, with its 95 % interval."""
    ends = (change.value, change.low, change.high)
    # Adding 0.0 turns -0.0 into 0.0.
    value, low, high = (f"{round(100 * end, 1) + 0.0:+.1f}" for end in ends)
    return f"{value} ({low} to {high})"


def bar_of_change(change: Figure) -> Bar:
    """Return a cell with a change of a share, and a bar for its interval."""
    return Bar(points(change), 0.5 + AXIS * change.high, 0.5 + AXIS * change.low)


Measures: TypeAlias = Mapping[str, Side | Sequence[float] | None]
"""Changes of R@1, or values before and after, by the name of the measure.

None stands for a measure that was not taken."""


def compare(measures: Measures) -> list[Row]:
    """Return a row for each measure that was taken, for the columns `COMPARED`.

    A change of R@1 counts as good or bad news only if it is beyond chance.
    """
    rows = []
    for name, measure in measures.items():
        if isinstance(measure, Side):
            change = measure.change
            shares = (f"{measure.before:.1%}", f"{measure.after:.1%}")
            rows.append(Row((name, *shares, bar_of_change(change)), change.sign))
        elif measure is not None:
            # Every measure but skewness is a share.
            form = ".2f" if name.startswith(SKEWNESS) else ".1%"
            values = [format(value, form) for value in measure]
            rows.append(Row((name, *values, "")))
    return rows


def list_hubs(
    hubs: Sequence[Hub], k: int, never: Sequence[str] = (), field: str | None = None
) -> Section:
    """Return the section of the targets that the largest numbers of queries find.

    The order is by the search that finds a target most often.

    Args:
        hubs: The targets.
        k: The number of targets that each query finds.
        never: The names of some targets that no query finds.
        field: The field that has the names of targets.
    """
    shown = sorted(hubs, key=lambda hub: hub.largest, reverse=True)[:NAMED]
    columns = [*shown[0].found_by] if shown else []
    rows = []
    for hub in shown:
        bars = []
        for count in hub.found_by.values():
            bars.append(Bar(f"{count:,}", count / shown[0].largest))
        misled = [*map(str, hub.misled)]
        rows.append(Row((hub.name, *bars), more=misled, image=hub.title))
    note = f"Queries that have the target among their first {k}."
    if any(hub.misled for hub in shown):
        note += (
            " The line below a hub (→) names a query that found the hub first, and the "
            "target that comes first after the correction; ✓ means it is right."
        )
    if field is not None:
        note += f" Names come from the field {field!r}."
    if never:
        note += f" Never found, for instance: {', '.join(never[:NAMED])}."
    return Section("Comes back most", (), rows, columns, note=note)


def describe_changes(
    worst: tuple[float, float], queries: int, right: Side | None
) -> str:
    """Describe how many queries find the worst hub, and how R@1 changed.

    Args:
        worst: The share of queries that find the worst hub, before and after.
        queries: The number of queries.
        right: R@1 before and after; None without known answers.
    """
    before, after = (round(share * queries) for share in worst)
    text = f"the worst hub goes from {before:,} to {after:,} of {queries:,} queries"
    if right is None:
        return text
    recall = f"{right.before:.1%} to {right.after:.1%}"
    return f"{text}; right answers first: {recall}, {points(right.change)} points"


THUMBNAIL = (96, 96)


def draw_thumbnail(folder: str | os.PathLike[str] | None, name: str) -> str | None:
    """Return a thumbnail of the picture called `name` in a folder, as a data URL.

    Return None if the folder has no such picture, or if it cannot be read.
    """
    if folder is None:
        return None
    root = Path(folder).resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        return None
    from PIL import Image

    content = io.BytesIO()
    try:
        with Image.open(path) as image:
            image.thumbnail(THUMBNAIL)
            image.convert("RGB").save(content, "JPEG")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None  # the name is shown alone
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path`, completely or not at all.

    A symbolic link stays, and the file that it leads to is written.

    Raises:
        InputError: The file cannot be written.
    """
    try:
        atomic.write(os.path.realpath(path), content)
    except OSError as error:
        raise InputError(
            f"cannot write {os.fspath(path)!r}: {atomic.reason(error)}"
        ) from None
