"""For programs that read: `llms.txt`, an index of the docs, and an agent skill, made from the pages' own sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def llms() -> str:
    """The index: what hubplugin is, and each page with its first sentence, by the parts of the navigation."""
    parts = ["# hubplugin\n", f"> {_start()}\n"]
    for title, pages in _navigation():
        parts.append(f"## {title}\n")
        parts += [
            f"- [{_title(page)}](docs/{page}): {_sentence(page)}" for page in pages
        ]
        parts.append("")
    return "\n".join(parts)


def skill() -> str:
    """The skill: how to go about it, with the program's own commands and the docs' own limits."""
    from typer.main import get_command

    from hubplugin.cli import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    questions = (
        (DOCS / "questions.md")
        .read_text()
        .split("\n\n", 2)[2]
        .replace("## ", "### ")
        .strip()
    )
    limits = (DOCS / "index.md").read_text().split("## When not to use it\n")[1].strip()
    return (
        (Path(__file__).parent / "skill.md")
        .read_text()
        .format(
            start=_start(),
            commands="\n".join(
                f"- `hubplugin {name}`: {' '.join(each.help.split())}"
                for name, each in commands.items()
            ),
            questions=_for_the_root(questions),
            limits=_for_the_root(limits),
            pages="\n".join(
                f"- `docs/{page}`: {_title(page)}"
                for _, pages in _navigation()
                for page in pages
            ),
        )
    )


def _start() -> str:
    """What hubplugin is, in one paragraph: the second one of the home page."""
    paragraphs = (DOCS / "index.md").read_text().split("\n\n")
    return " ".join(" ".join(paragraphs[1:3]).split())


def _navigation() -> Iterator[tuple[str, list[str]]]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Leaves out the tags that name Python functions."""

    Loader.add_multi_constructor(
        "tag:yaml.org,2002:python/", lambda loader, suffix, node: None
    )
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    for part in settings["nav"]:
        for title, entries in part.items():
            yield title, list(_files(entries))


def _files(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        for inner in entries.values():
            yield from _files(inner)
    else:
        for each in entries:
            yield from _files(each)


def _title(page: str) -> str:
    return next(
        line[2:]
        for line in (DOCS / page).read_text().splitlines()
        if line.startswith("# ")
    )


def _sentence(page: str) -> str:
    """The first sentence of a page that is prose, without links."""
    paragraphs = (DOCS / page).read_text().split("\n\n")[1:]
    prose = next((each for each in paragraphs if re.match(r'[A-Z"*`_h\[]', each)), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose.split())).replace(
        "**Context.** ", ""
    )
    return re.split(r"(?<=[.?!:])\s", plain)[0].rstrip(":") if plain else ""


def _for_the_root(text: str) -> str:
    return re.sub(r"\]\((?!http)", "](docs/", text)
