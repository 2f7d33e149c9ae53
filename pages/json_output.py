"""docs/reference/json.md: what `--json` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, groupby
from typing import Any

from pydantic import TypeAdapter

from hubplugin.cli.manage import Explained, RecordedBank
from hubplugin.evaluation.results import Results
from hubplugin.jobs.diagnose import Diagnosis
from hubplugin.jobs.results import Applied, Inspection, Removed
from hubplugin.results import Result

START = """# JSON

With `--json`, a command prints one line of JSON. It has the fields of the command's result, and two more: `command` is
the name of the command, and `version` is the version of this format. The version is raised if a field changes its
meaning or is removed; new fields may be added at any time. Errors and warnings go to stderr as text. `--json` does not
change the [exit status](cli.md). In Python, results have the same fields, and `as_json()` returns the same JSON.

    hubplugin evaluate photos.npy --queries q.npy --bank bank.npy --json | jq .best

None is written as null. Undefined numbers, such as the skewness if nothing was found, are also null.
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
    "refit": Applied,
    "bank": RecordedBank,
    "explain": Explained,
}
"""What each command prints, beside its name and the version."""


def reference() -> str:
    """The page: what each command prints, the fields of all of them, and the parts that several fields consist of."""
    takers: dict[str, list[str]] = {}
    printers: dict[str, list[str]] = {}
    parts: dict[str, dict[str, Any]] = {}
    for command, figures in FIGURES.items():
        schema = schema_of(figures)
        parts |= schema.get("$defs", {})
        inherited = (
            _describe({"description": kind.__doc__})[1]
            for kind in reversed(figures.__mro__[:-1])
        )
        meanings = dict(chain.from_iterable(meanings.items() for meanings in inherited))
        printers.setdefault(_describe(schema)[0], []).append(command)
        for row in _rows(schema["properties"], meanings):
            takers.setdefault(row, []).append(command)
    lines = [START, "## Commands\n", "| command | result |", "|---|---|"]
    lines += [
        f"| {', '.join(commands)} | {result} |" for result, commands in printers.items()
    ]
    lines += [
        "",
        "## Fields\n",
        "| command | field | type | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| {', '.join(commands)} {row}" for row, commands in takers.items()]
    lines += [
        "",
        "## Parts\n",
        "These parts occur in several fields.\n",
        "| part | fields |",
        "|---|---|",
    ]
    for name, part in sorted(parts.items()):
        first, meanings = _describe(part)
        lines.append(
            f'| <a id="{name.lower()}"></a>**{name}** | {first} {_list_fields(part, meanings)} |'
        )
    return "\n".join([*lines, ""])


def schema_of(figures: type[Result]) -> dict[str, Any]:
    """The JSON that values of the type `figures` become."""
    return TypeAdapter(figures).json_schema(mode="serialization")


def _group(
    fields: dict[str, Any], meanings: dict[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Names, type and meaning; fields in turn that have both in common stand together."""
    described = (
        (name, _kind(of), meanings.get(name, "")) for name, of in fields.items()
    )
    for (kind, meaning), group in groupby(described, lambda field: field[1:]):
        yield ", ".join(f"`{name}`" for name, *_ in group), kind, meaning


def _rows(fields: dict[str, Any], meanings: dict[str, str]) -> Iterator[str]:
    yield from (
        f"| {names} | {kind} | {meaning} |"
        for names, kind, meaning in _group(fields, meanings)
    )


def _list_fields(part: dict[str, Any], meanings: dict[str, str]) -> str:
    if "enum" in part:
        return f"One of {', '.join(part['enum'])}."
    fields = _group(part["properties"], meanings)
    return "<br>".join(
        [
            "",
            *(
                f"{names}: {kind}{'; ' * bool(meaning)}{meaning}"
                for names, kind, meaning in fields
            ),
        ]
    )


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


def _describe(schema: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The description of a value: what it is, and what its fields mean."""
    text = " ".join(schema.get("description", "").split()).replace("|", "\\|")
    first, *meanings = MEANING.split(text)
    named = zip(meanings[::2], meanings[1::2], strict=True)
    return first, {
        name: meaning.rstrip(".")
        for names, meaning in named
        for name in names.split(", ")
    }
