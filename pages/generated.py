"""The files that are generated from the program and the docs, each with what makes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pages import cli, for_agents, json_output

ROOT = Path(__file__).parent.parent

MAKERS: dict[str, Callable[[], str]] = {
    "docs/reference/cli.md": cli.reference,
    "docs/reference/json.md": json_output.reference,
    "llms.txt": for_agents.llms,
    "skills/hubplugin/SKILL.md": for_agents.skill,
}


def outdated() -> dict[Path, str]:
    """Each generated file that is not there or says something else, and what it should say."""
    texts = {ROOT / path: make() for path, make in MAKERS.items()}
    return {
        path: text
        for path, text in texts.items()
        if not path.exists() or path.read_text("utf-8") != text
    }
