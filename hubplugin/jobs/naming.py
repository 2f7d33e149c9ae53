"""Names of targets and queries, from a store's field, a file, or a bank's texts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from hubplugin.bank import Bank
from hubplugin.errors import InputError, Parameter
from hubplugin.store import Id, Store
from hubplugin.vectors import require_file

Naming: TypeAlias = Callable[[Sequence[Id]], Sequence[Any]]
"""A function from ids of targets to their texts; None for a target without a text."""

NAME_FIELDS = ("title", "name", "text", "document", "page_content")
"""The fields that may have names. By default, the first that some target has counts."""

NAME_FILES = (".txt", ".json")
"""The suffixes of files of names."""

LONGEST = 80
"""The most characters of a text that are shown."""


class FieldNames:
    """A function from ids to the values of a `field` of these targets in `store`.

    If `field` is None, it becomes the first of `NAME_FIELDS` that some target has.
    """

    def __init__(self, store: Store, field: str | None = None):
        self.store = store
        self.field = field

    def __call__(self, ids: Sequence[Id]) -> Sequence[Any]:
        targets = self.store.read_fields(ids)
        fields = {name for target in targets for name in target}
        if self.field is None:
            self.field = next((name for name in NAME_FIELDS if name in fields), None)
        return [target.get(self.field or "") for target in targets]


def names_of(source: object, show: str | Naming | None = None) -> Naming | None:
    """Return a function that names the targets in `source`, a store or vectors.

    Return None for vectors if `show` is None.

    Args:
        source: The store or vectors.
        show: A field of a store, a file for `read_names`, or a function. By default, a
            field of the store that is plainly a title or a text.

    Raises:
        InputError: The file cannot be read, or `fields` of the store lacks the field.
            In a store without a schema, that lists the fields of the first targets.
    """
    if callable(show):
        return show
    is_file = show is not None and (Path(show).is_file() or show.endswith(NAME_FILES))
    if isinstance(source, Store) and not is_file:
        if show is not None:
            fields = source.fields()
            if show not in fields:
                raise InputError(
                    f"{source.url}: its first targets have no field {show!r}; there "
                    f"are {', '.join(fields) or 'none'}; pass another, or a file, as ",
                    Parameter("show"),
                )
        return FieldNames(source, show)
    if show is None:
        return None
    texts = read_names(show)
    return lambda ids: [texts.get(str(id)) for id in ids]


def display_names(ids: Sequence[Id], names: Naming | None) -> list[str]:
    """Return each target's name and id, or only the id if there is no name."""
    if names is None or not ids:
        return [str(key) for key in ids]
    displayed = []
    for key, text in zip(ids, names(ids), strict=True):
        name = "" if text is None else shorten(text)
        displayed.append(f"{name} [{key}]" if name else str(key))
    return displayed


def display_query(bank: Bank, row: int) -> str:
    """Return the text of the query in a row of `bank`, or the row if it has no text."""
    source = bank.queries if bank.texts is None else bank.texts
    texts = getattr(source, "texts", None)
    text = None if texts is None else texts[row]
    return f"query {row}" if text is None else f"“{shorten(text)}”"


def shorten(text: object) -> str:
    """Return a text in one line, cut to `LONGEST` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def read_names(source: str | os.PathLike[str], label: str = "names") -> dict[str, Any]:
    """Return the texts in a file by id.

    Line i of a file of texts belongs to the id i. A .json file holds an object of texts
    by id, or a list, whose item i belongs to the id i. Raises InputError if the file
    cannot be read; the message calls the texts `label`.
    """
    path = Path(source)
    require_file(path, label)
    try:
        text = path.read_text(encoding="utf-8")
        texts = json.loads(text) if path.suffix == ".json" else text.splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{label}: cannot read {str(path)!r}: {error}") from None
    if isinstance(texts, list):
        texts = {str(row): item for row, item in enumerate(texts)}
    if not isinstance(texts, dict):
        raise InputError(
            f"{label}: {str(path)!r} holds {type(texts).__name__}; expected a list, or "
            "texts by id"
        )
    return texts
