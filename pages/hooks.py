"""What the site does to a page before it is built: links that leave `docs`, formulas, the changelog."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+(?!\.)[^)#]*)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """`docs` are read in the repository, too, where a link may leave the folder; the site has its text and path."""
    if page.file.src_uri == "changelog.md":
        markdown = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    return LINK.sub(
        lambda link: _inside(link, Path(page.file.abs_src_path).parent), markdown
    )


def _inside(link: re.Match[str], folder: Path) -> str:
    picture, text, path, _ = link.groups()
    place = (folder / path).resolve()
    docs = ROOT / "docs"
    if place.is_relative_to(docs):
        return link.group()
    if picture:
        return f"![{text}]({'../' * len(folder.relative_to(docs).parts)}pictures/{place.name})"
    named = f"`{place.relative_to(ROOT)}`"
    return named if text.strip("`") in path else f"{text} ({named})"


def mathml(
    source: str, language: str, css_class: str, options: Any, md: Any, **_: Any
) -> str:
    """A formula as MathML, which browsers show without a script."""
    from latex2mathml.converter import convert

    return f'<div class="{css_class}">{convert(source, display="block")}</div>'
