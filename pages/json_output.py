"""docs/reference/json.md: what `--json` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from hubplugin.cli.manage import Explained, RecordedBank
from hubplugin.evaluation.results import Results
from hubplugin.jobs.diagnose import Diagnosis
from hubplugin.jobs.results import Applied, Inspection, Refitted, Removed
from hubplugin.report import Result

START = """# JSON

With `--json` a command prints one line of JSON: its name under `command`, the version of this form under `version`,
and the fields of its result. The version grows if a name changes its meaning or goes away; a new name may come at any
time. Errors and warnings go to stderr, as text. The exit status is the same with and without `--json`
([command line](cli.md)). In Python a result has the same fields; `as_json` and `to_json(path)` give the same JSON.

    hubplugin evaluate photos.npy --queries q.npy --bank bank.npy --json | jq .best

What these pages call None is null; so are numbers that are none, as a skewness of no finds.
"""

MEANING = re.compile(r"(?:^|(?<=[.]))\s*\b([a-z_]\w*(?:, [a-z_]\w*)*): ")
"""Where a docstring says what a field means, or several."""

FIGURES: dict[str, type[Result]] = {
    "evaluate": Results,
    "diagnose": Diagnosis,
    "inspect": Inspection,
    "apply": Applied,
    "refresh": Applied,
    "remove": Removed,
    "rollback": Applied,
    "refit": Refitted,
    "bank": RecordedBank,
    "explain": Explained,
}
"""What each command prints, beside its name and the version."""


def reference() -> str:
    """The page: a section for each command, and behind it the parts of its figures that came in none before."""
    return "\n".join([START, *_sections()])


def _sections() -> Iterator[str]:
    known: dict[str, str] = {}
    for command, figures in FIGURES.items():
        schema = schema_of(figures)
        if figures.__name__ in known:
            yield f"## {command}\n\nAs [{known[figures.__name__]}](#{known[figures.__name__]}).\n"
            continue
        known[figures.__name__] = command
        yield from (f"## {command}\n", _told(schema), _fields(schema))
        for name, part in schema.get("$defs", {}).items():
            if known.setdefault(name, command) == command:
                yield from (f"### {name}\n", _told(part), _fields(part))


def schema_of(figures: type[Result]) -> dict[str, Any]:
    """The JSON that values of the type `figures` become."""
    return TypeAdapter(figures).json_schema(mode="serialization")


def _fields(schema: dict[str, Any]) -> str:
    """The names of a value with their types, in one paragraph."""
    if "enum" in schema:
        return f"One of {', '.join(schema['enum'])}.\n"
    return "; ".join(f"`{name}`: {_kind(of)}" for name, of in schema["properties"].items()) + ".\n"


def _kind(of: dict[str, Any]) -> str:
    """A type in words: 'list of number', 'Figure or null'."""
    if "$ref" in of:
        name = of["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in of:
        return " or ".join(_kind(each) for each in of["anyOf"])
    if of.get("type") == "array":
        return f"list of {_kind(of['items'])}" if "items" in of else "list"
    if isinstance(of.get("additionalProperties"), dict):
        return f"names to {_kind(of['additionalProperties'])}"
    return str(of.get("type", "any"))


def _told(schema: dict[str, Any]) -> str:
    """The description of a value: what it is, and a list of what its fields mean."""
    text = " ".join(schema.get("description", "").split()).replace("|", "\\|")
    first, *meanings = MEANING.split(text)
    named = (name.replace(", ", "`, `") for name in meanings[::2])
    listed = "".join(f"- `{name}`: {what}\n" for name, what in zip(named, meanings[1::2], strict=True))
    return f"{first}\n\n{listed}" if listed else f"{first}\n"
