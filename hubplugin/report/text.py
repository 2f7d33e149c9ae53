"""Reports as text, for terminals and for `print`."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hubplugin.report.sections import Report, Table

if TYPE_CHECKING:
    pass

HUBS = 10
"""Hubs and anti-hubs that the text names; a page names all."""

ROOMY, WIDEST = 130, 150
"""Columns from which on a table is shown whole, and those that are used where nobody says how many there are."""


def as_text(report: Report, width: int = WIDEST) -> str:
    """What `report` says, a line each; pictures, tiles and examples are for pages."""
    lines = [_table(table, width) for table in report.tables if table.brief]
    return "\n".join([*lines, *_lines(report)])


def _lines(report: Report) -> Iterator[str]:
    yield from report.sentences
    if report.hubs:
        named = (f"{hub.name} by {' -> '.join(map(str, _counts(hub.found_by, report.after)))}" for hub in report.hubs)
        yield f"hubs: {', '.join(list(named)[:HUBS])}"
    if report.anti_hubs:
        yield f"never found, for instance: {', '.join(report.anti_hubs[:HUBS])}"
    yield from map(str, report.causes)
    if report.verdict is not None:
        yield from (f"in short: {report.verdict.line}", *report.verdict.more)


def _counts(found_by: dict[str, int], after: str) -> list[int]:
    return [found_by[label] for label in ("raw", after) if label in found_by]


def _table(table: Table, width: int) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Drawn

    shown = [name for name in table.columns if width >= ROOMY or name in table.brief]
    drawn = Drawn(title=table.title, title_justify="left", box=SIMPLE_HEAD)
    for name in shown:
        first = name == table.columns[0]
        drawn.add_column(name, justify="left" if first else "right", no_wrap=not first, overflow="fold")
    for number, row in enumerate(table.rows):
        cells = dict(zip(table.columns, row, strict=True))
        drawn.add_row(*(_cell(cells[name]) for name in shown), style="bold" if number in table.marked else "")
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(drawn)
    return capture.get().rstrip("\n")


def _cell(cell: str | tuple[str, str]) -> str:
    return cell if isinstance(cell, str) else f"{cell[0]}\n{cell[1].strip().replace(' to ', '-')}"


class Reported:
    """A result that says what it shows. It prints as text; `hubplugin.report.html` writes it as a page."""

    def report(self) -> Report:
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self.report())
