"""What targets are called: from the store itself, or from a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from hubplugin.abilities import Named, able
from hubplugin.errors import InputError
from hubplugin.store import Id, Store

Naming: TypeAlias = Callable[[Sequence[Id]], Sequence[str | None]]
"""Texts of some targets, by their ids; None for one that has none."""

STORED = "payload."


def naming(source: str | None, store: Store, option: str = "names") -> Naming | None:
    """`given` is payload.KEY, for what lies with the targets in `store`; a text file, where line i belongs to the id i;
    or a .json file of a text for each id, or of a list. option: what errors call it."""
    if source is None:
        return None
    path = Path(source)
    if path.is_file():
        return _from_file(path, option)
    if not source.startswith(STORED) or source == STORED:
        raise InputError(
            f"{option} {source!r} is no file, and no {STORED}KEY for what lies with the targets in the store"
        )
    return lambda ids: able(store, Named).named(ids, source.removeprefix(STORED))


def _from_file(path: Path, option: str) -> Naming:
    try:
        text = path.read_text(encoding="utf-8")
        texts = json.loads(text) if path.suffix == ".json" else text.splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{option}: cannot read {str(path)!r}: {error}") from None
    if isinstance(texts, list):
        known = {str(row): each for row, each in enumerate(texts)}
    elif isinstance(texts, dict):
        known = texts
    else:
        raise InputError(f"{option}: {str(path)!r} holds {type(texts).__name__}; expected a list, or texts by id")
    return lambda ids: [None if known.get(str(each)) is None else str(known[str(each)]) for each in ids]
