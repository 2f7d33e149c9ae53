"""What targets are called, from a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from hubplugin.errors import InputError
from hubplugin.store import Id
from hubplugin.vectors import require_file

Naming: TypeAlias = Callable[[Sequence[Id]], Sequence[str | None]]
"""Texts of some targets, by their ids; None for one that has none."""


def display_names(ids: Sequence[Id], names: Naming | None) -> list[str]:
    """What the targets `ids` are called: by their name in `names` and id, or by the id alone."""
    texts = [None] * len(ids) if names is None or not ids else names(ids)
    return [
        str(key) if name is None else f"{name} [{key}]"
        for key, name in zip(ids, texts, strict=True)
    ]


def read_names(source: str | None, option: str = "names") -> Naming | None:
    """The names in the file `source`, which errors call `option`: a text file, where line i belongs to the id i, or a
    .json file of a text for each id, or of a list."""
    if source is None:
        return None
    path = Path(source)
    require_file(path, option)
    try:
        text = path.read_text(encoding="utf-8")
        texts = json.loads(text) if path.suffix == ".json" else text.splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{option}: cannot read {str(path)!r}: {error}") from None
    if isinstance(texts, list):
        text_of = {str(row): item for row, item in enumerate(texts)}
    elif isinstance(texts, dict):
        text_of = texts
    else:
        raise InputError(
            f"{option}: {str(path)!r} holds {type(texts).__name__}; expected a list, or texts by id"
        )
    return lambda ids: [
        None if text_of.get(str(item)) is None else str(text_of[str(item)])
        for item in ids
    ]
