"""docs/reference/json.md: what `--json` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from hubplugin.cli.schema import FIGURES

START = """# JSON

With `--json` a command prints one line of JSON: its name under `command`, the version of this form under `version`,
and its figures. The version grows if a name changes its meaning or goes away; a new name may come at any time. Errors
and warnings go to stderr, as text. The exit status is the same with and without `--json` ([command line](cli.md)).

    hubplugin evaluate --queries q.npy --targets t.npy --query-bank bank.npy --json | jq .best

Numbers that are none, as a skewness of no finds, are null.

## evaluate

The same as `Evaluation.to_json` writes to a file.
"""


class WithoutArrays(GenerateJsonSchema):
    """Arrays are kept out of the output, so they need no schema."""

    def is_instance_schema(self, schema: Any) -> dict[str, Any]:
        return {"type": "left out"}


def reference() -> str:
    """The page."""
    from hubplugin.evaluation.result import Results

    schema = Results.model_json_schema(schema_generator=WithoutArrays)
    parts = [line for part in _parts(schema) for line in part]
    return "\n".join([START, *_table(schema), *parts, *_of_commands(set(schema["$defs"]))])


def _of_commands(known: set[str]) -> Iterator[str]:
    """A section for each command on a store, and one for each part of their figures that is not `known` yet."""
    parts: dict[str, Any] = {}
    for command, figures in FIGURES.items():
        schema = TypeAdapter(figures).json_schema(schema_generator=WithoutArrays)
        parts |= {name: part for name, part in schema.get("$defs", {}).items() if name not in known}
        yield from (f"## {command}\n", f"{_one_line(schema.get('description', ''))}\n", *_table(schema))
    for part in _parts({"$defs": parts}):
        yield from part


def _parts(schema: dict[str, Any]) -> Iterator[list[str]]:
    for name, each in schema["$defs"].items():
        yield [f"### {name}\n", f"{_one_line(each.get('description', ''))}\n", *_table(each)]


def _table(schema: dict[str, Any]) -> list[str]:
    kinds = {name: _kind(of) for name, of in schema["properties"].items()}
    rows = [f"| `{name}` | {kind} |" for name, kind in kinds.items() if kind != "left out"]
    return ["| name | type |", "|---|---|", *rows, ""]


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


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
