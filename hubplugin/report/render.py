"""Reports as text, for terminals and for `print`; as one page of HTML, which refers to nothing outside itself; and
results as JSON: what `--json` prints, and docs/reference/json.md describes."""

from __future__ import annotations

import io
import math
import os
import platform
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import TypeAdapter

from hubplugin import atomic
from hubplugin._version import __version__
from hubplugin.errors import InputError, install
from hubplugin.report.plots import svg
from hubplugin.report.sections import Report, Table

_adapter = cache(TypeAdapter)


def facts_of(result: object) -> dict[str, Any]:
    """`result`, a pydantic model or a dataclass, as plain JSON under the names that its type gives; null for numbers
    that are none, which JSON has no word for."""
    kind: Any = type(result)
    facts: dict[str, Any] = plain(_adapter(kind).dump_python(result, mode="json", by_alias=True))
    return facts


def plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


HUBS = 10
"""Hubs and anti-hubs that the text names; a page names all."""

ROOMY, WIDEST = 130, 150
"""Columns from which on a table is shown whole, and those that are used where nobody says how many there are."""


def as_text(report: Report, width: int = WIDEST, verbose: bool = False) -> str:
    """What `report` says, a line each, and first what it comes to; pictures, tiles and examples are for pages. verbose:
    also how it was found."""
    first = [] if report.verdict is None else [f"{report.verdict.line[:1].upper()}{report.verdict.line[1:]}."]
    tables = [_table(table, width) for table in report.tables if table.brief]
    details = report.details if verbose else ()
    return "\n".join([*first, *tables, *_lines(report), *details])


def _lines(report: Report) -> Iterator[str]:
    yield from report.sentences
    if report.hubs:
        named = (f"{hub.name} by {' -> '.join(map(str, _counts(hub.found_by, report.after)))}" for hub in report.hubs)
        yield f"hubs: {', '.join(list(named)[:HUBS])}"
    if report.anti_hubs:
        yield f"never found, for instance: {', '.join(report.anti_hubs[:HUBS])}"
    yield from map(str, report.causes)
    if report.verdict is not None:
        yield from report.verdict.more


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
    """A result that says what it shows. It prints as text; `write_page` makes a page of it."""

    def report(self) -> Report:
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self.report())


PACKAGES = ("numpy", "torch", "faiss-cpu", "qdrant-client")


def as_html(report: Report, command: str | None = None) -> str:
    """The page. command: what was typed. Raises InputError where Jinja2 or matplotlib is missing."""
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError as error:
        raise InputError(f"the report needs {error.name}; {install('evaluation')}") from None
    environment = Environment(
        loader=PackageLoader("hubplugin.report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    facts = {**report.facts, **({"command": command} if command else {}), **_made()}
    text: str = environment.get_template("report.html").render(p=report, facts=facts, svg=svg)
    return text


def write_page(report: Report, path: str | os.PathLike[str], command: str | None = None) -> None:
    """Writes the page. Raises InputError where `path` cannot be written."""
    write_text(path, as_html(report, command))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    write_file(path, text.encode())


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file that somebody has named, whole or not at all; where `path` is a link, the file that it leads to.
    Raises InputError."""
    try:
        atomic.write(os.path.realpath(path), content)
    except OSError as error:
        raise InputError(f"cannot write {os.fspath(path)!r}: {error.strerror}") from None


def _made() -> dict[str, str]:
    """When and by what a page was made."""
    versions = [f"hubplugin {__version__}", f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return {"versions": ", ".join(versions), "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")}
