"""docs/reference/json.md: what `--json` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, TypeAdapter

from hubplugin.cli.json_types import RecordedBank, Removed
from hubplugin.evaluation.results import Results
from hubplugin.jobs.correct import Refitted
from hubplugin.jobs.diagnose import Diagnosis
from hubplugin.jobs.health import Inspection
from hubplugin.jobs.write import Applied

START = """# JSON

With `--json` a command prints one line of JSON: its name under `command`, the version of this form under `version`,
and its figures; of a command on a store also the store's URL under `store`. The version grows if a name changes its
meaning or goes away; a new name may come at any time. Errors and warnings go to stderr, as text. The exit status is the
same with and without `--json` ([command line](cli.md)).

    hubplugin evaluate --queries q.npy --targets t.npy --bank bank.npy --json | jq .best

What these pages call None is null; so are numbers that are none, as a skewness of no finds.
"""


class Explained(BaseModel):
    """The request; method and path where there is a server."""

    method: str | None = None
    path: str | None = None
    body: dict[str, Any]


FIGURES: dict[str, type] = {
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
"""What each command prints, beside its name, the version and the `store`."""

FILES = "`Results.to_json` writes the same to a file."


def reference() -> str:
    """The page: a section for each command, and behind it the parts of its figures that came in none before."""
    return "\n".join([START, *_sections()])


def _sections() -> Iterator[str]:
    known: set[str] = set()
    for command, figures in FIGURES.items():
        schema = schema_of(figures)
        yield from (f"## {command}\n", f"{_one_line(schema.get('description', ''))}\n")
        yield from ([f"{FILES}\n"] if command == "evaluate" else [])
        yield _fields(schema)
        for name, part in schema.get("$defs", {}).items():
            if name not in known:
                yield from (f"### {name}\n", f"{_one_line(part.get('description', ''))}\n", _fields(part))
        known |= set(schema.get("$defs", {}))


def schema_of(figures: type) -> dict[str, Any]:
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
    if "prefixItems" in of:
        return f"list of two: {', '.join(_kind(each) for each in of['prefixItems'])}"
    if of.get("type") == "array":
        return f"list of {_kind(of['items'])}" if "items" in of else "list"
    if isinstance(of.get("additionalProperties"), dict):
        return f"names to {_kind(of['additionalProperties'])}"
    return str(of.get("type", "any"))


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
