"""Reports as one page of HTML, which refers to nothing outside itself."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hubplugin._version import __version__
from hubplugin.errors import InputError, install
from hubplugin.report.plots import svg
from hubplugin.report.sections import Report

PACKAGES = ("numpy", "torch", "faiss-cpu", "qdrant-client", "qdrant-edge-py")


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


def write(report: Report, path: str | os.PathLike[str], command: str | None = None) -> None:
    """Writes the page. Raises InputError where `path` cannot be written."""
    write_text(path, as_html(report, command))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
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
