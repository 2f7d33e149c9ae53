"""The code blocks of a page, as they are tested.

A block is run if its language is `python` or `bash`. `text`, `json` and the like are output. A block that cannot run
here stands behind a comment that says why: `<!-- not run: needs a server with TLS -->`.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
RUNNABLE = ("python", "bash")
NOT_RUN = ("text", "console", "json", "toml", "yaml", "ini", "math", "http")
"""Languages of output, files and formulas. A fence without any is output, too."""

FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]*?) -->\n+)?^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}[^\n]*\n)+", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block. line: where it stands. reason: why it is not run, or None."""

    language: str
    code: str
    line: int
    reason: str | None


def blocks(page):
    """The fenced blocks of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        indent = len(match["indent"])
        code = "\n".join(line[indent:] for line in match["code"].split("\n"))
        found.append(
            Block(
                match["language"],
                code,
                text.count("\n", 0, match.start("code")) + 1,
                match["reason"],
            )
        )
    return found


def commands(page):
    """Each `hubplugin ...` that a page tells to type, as words: of its blocks, fenced or indented."""
    text = page.read_text(encoding="utf-8")
    code = [
        block.code
        for block in blocks(page)
        if block.language in ("", "bash", "console")
    ]
    code += INDENTED.findall(FENCE.sub("", text))
    lines = "\n".join(code).replace("\\\n", " ").split("\n")
    typed = [re.sub(r"^\$ ", "", line.strip()) for line in lines]
    return [_words(line) for line in typed if line.startswith("hubplugin ")]


def _words(line):
    words = shlex.split(line, comments=True)
    for end in (";", "|", ">", "&&", "||"):
        if end in words:
            words = words[: words.index(end)]
    return words[1:]
