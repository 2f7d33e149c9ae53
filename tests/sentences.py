"""Whether sentences are short enough to be read once: `python -m tests.sentences`, part of `make lint`.

A sentence of the documentation, of a docstring or of a message of the product has `WORDS` words at most. Code, tables
and headings are no sentences; code within a line is one word.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

from tests.sizes import PRODUCT, ROOT

WORDS = 40

BLOCK = re.compile(r"^```.*?^```|^    [^\n]*|^\S+ {3,}[^\n]*|^<!--.*?-->|^---\n.*?^---", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^\s*([-*]|\d+\.|#+|>|:::|\|)\s", re.MULTILINE)
END = re.compile(r"(?<=[.!?])[)*_\"']*\s+(?=[^a-z])|(?<=[a-z`)][.!?])\s+(?=[a-z`])")
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|cf|eq|sec|fig|al|vs|No|prop|app|etc|approx)\. ")


def sentences(text: str) -> Iterator[str]:
    """The sentences of Markdown, or of a docstring."""
    text = BLOCK.sub("\n", text)
    text = re.sub(r"``?[^`]+``?", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*>|#:]|\d+\.)\s?)|\n(?=\s*\w+: )", text):
        if paragraph.lstrip().startswith("|"):
            continue
        flat = ABBREVIATIONS.sub(r"\1 ", " ".join(ITEM.sub("", paragraph).split()))
        yield from END.split(flat)


def too_long(text: str) -> Iterator[tuple[int, str]]:
    for sentence in sentences(text):
        words = [word for word in sentence.split() if re.search(r"\w", word)]
        if len(words) > WORDS:
            yield len(words), sentence


def texts() -> Iterator[tuple[str, str]]:
    """What people read, each text by its place: pages, docstrings, and the messages of the product."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        yield page.relative_to(ROOT).as_posix(), page.read_text()
    for path in (path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))):
        place = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{place}:{node.lineno}", inspect.cleandoc(node.value)
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
                yield f"{place}:{node.lineno}", "".join(parts)


def main() -> None:
    found = [f"{place}: {count} words: {text}" for place, each in texts() for count, text in too_long(each)]
    if found:
        raise SystemExit(f"{len(found)} sentences of more than {WORDS} words:\n" + "\n".join(found))
    print(f"sentences: none has more than {WORDS} words")


if __name__ == "__main__":
    main()
