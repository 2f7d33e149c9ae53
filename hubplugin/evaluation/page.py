"""A report: what a page shows, as values, and the page. It refers to nothing outside itself."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from hubplugin._version import __version__
from hubplugin.errors import InputError
from hubplugin.evaluation.examples import Example

Direction = Literal["better", "worse", "same", "unknown"]

SAME = 5e-4
"""Shares that differ by less look the same on a page."""

PACKAGES = ("numpy", "torch", "faiss-cpu", "qdrant-client", "qdrant-edge-py")


@dataclass(frozen=True)
class Tile:
    """One figure of the first screen. shown: as it is now; before: what it was, where there is a before."""

    title: str
    shown: str
    direction: Direction = "unknown"
    before: str = ""
    note: str = ""


@dataclass(frozen=True)
class HubLine:
    """A target, and how many queries find it: raw, and after a correction."""

    name: str
    raw: int
    after: int | None = None
    thumbnail: str | None = None


@dataclass(frozen=True)
class Plot:
    title: str
    svg: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """rows: the cells of each, a text or (text, small text). marked: the rows that stand out."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | tuple[str, str]]]
    marked: Sequence[int] = ()
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """What the guard says, or a diagnosis: one line, and what else."""

    good: bool
    line: str
    more: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """What a report shows, in this order; what is empty is left out. k: of the k-occurrence. after: what the figures
    behind the raw ones are called."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    k: int = 10
    verdict: Verdict | None = None
    sentences: Sequence[str] = ()
    causes: Sequence[object] = ()
    examples: Sequence[Example] = ()
    examples_note: str = ""
    hubs: Sequence[HubLine] = ()
    after: str = "corrected"
    anti_hubs: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    facts: Sequence[tuple[str, str]] = field(default_factory=tuple)


def render(page: Page, command: str | None = None) -> str:
    """The page as HTML. command: what was typed. Raises InputError where Jinja2 is missing."""
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError as error:
        raise InputError(f"the report needs {error.name}: pip install 'hubplugin[evaluation]'") from None
    environment = Environment(
        loader=PackageLoader("hubplugin.evaluation", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    facts = [*page.facts, *([("command", command)] if command else []), *made()]
    text: str = environment.get_template("report.html").render(p=page, facts=facts)
    return text


def write(page: Page, path: str | os.PathLike[str], command: str | None = None) -> None:
    """Writes the page. Raises InputError where `path` cannot be written."""
    write_text(path, render(page, command))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {os.fspath(path)!r}: {error.strerror}") from None


def made() -> list[tuple[str, str]]:
    """When and by what a page was made."""
    versions = [f"hubplugin {__version__}", f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return [("versions", ", ".join(versions)), ("date", datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"))]


def share_tile(
    title: str, before: float | None, after: float | None, *, more_is_better: bool, note: str = "", unknown: str = ""
) -> Tile:
    """A tile of a share, 0 to 1. before: of the raw search; after: None where there is no correction. unknown: what is
    said where it was not measured."""
    if before is None:
        return Tile(title, "not measured", note=unknown)
    if after is None:
        return Tile(title, percent(before), note=note)
    gained = after - before if more_is_better else before - after
    direction: Direction = "same" if abs(gained) < SAME else "better" if gained > 0 else "worse"
    return Tile(title, percent(after), direction, percent(before), note)


def sides_tile(asked: tuple[float, float] | None, other: tuple[float, float] | None, unknown: str) -> Tile:
    """The change of R@1 for what was asked for before, and for what was not: (before, after) of each."""
    title = "R@1, asked before / not asked"
    if asked is None and other is None:
        return Tile(title, "not measured", note=unknown)
    changes = [None if side is None else side[1] - side[0] for side in (asked, other)]
    known = [change for change in changes if change is not None]
    direction: Direction = "worse" if min(known) < -SAME else "better" if max(known) > SAME else "same"
    shown = " / ".join("?" if change is None else f"{100 * change:+.1f}" for change in changes)
    told = (
        f"{label}: {percent(side[0])} → {percent(side[1])}"
        for label, side in (("asked", asked), ("not asked", other))
        if side is not None
    )
    return Tile(title, shown, direction, note="; ".join(told))


def percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"
