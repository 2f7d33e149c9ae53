"""Clicks from a log: which target each bank query led to."""

from __future__ import annotations

import csv
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from hubplugin.errors import InputError
from hubplugin.texts.files import chosen

logger = logging.getLogger(__name__)

QUERY, TARGET = ("query", "text", "question"), ("target", "id", "target_id", "document", "doc_id")
"""What the two columns are called, in the order in which they are looked for."""

NAMED = 5
"""How many of those that are left out are named."""


def read_clicks(
    path: str | Path, count: int, texts: Sequence[str | None] | None = None, rows: Sequence[int] | None = None
) -> np.ndarray:
    """The id of the target that each of `count` bank queries led to, [count], -1 for none: `pairs` as `apply` takes it.

    path: .npy of just that, or .csv or .tsv with the columns `query`, the text of a bank query or its row counted from
    0, and `target`, an id in the store. texts: those of the bank [count]. rows: what rows of the file that the bank was
    read from are called, where some were left out.
    Of several clicks of a query the most frequent target counts, of equally frequent ones the first in the file: the
    ids of a bank query are one each, and one click may be a slip. Clicks of queries that are not in the bank are
    counted and named in the log. Raises InputError for a file that cannot be read, or that has nothing of the bank.
    """
    path = Path(path)
    if path.suffix == ".npy":
        try:
            return np.asarray(np.load(path, allow_pickle=False))
        except (OSError, ValueError) as error:
            raise InputError(f"clicks: cannot read {str(path)!r} as .npy: {' '.join(str(error).split())}") from None
    clicks: list[Counter[int | str]] = [Counter() for _ in range(count)]
    places = _places(count, texts, rows)
    unknown: Counter[str] = Counter()
    total = 0
    for query, target in _table(path):
        total += 1
        found = places.get(query, ())
        for place in found:
            clicks[place][_id(target)] += 1
        if not found:
            unknown[query] += 1
    if unknown:
        named = ", ".join(repr(query) for query in list(unknown)[:NAMED])
        logger.warning(
            "%s: %d of %d clicks are of queries that are not in the bank, and are left out: %s%s",
            path.name, unknown.total(), total, named, ", ..." if len(unknown) > NAMED else "",
        )  # fmt: skip
    if unknown.total() == total:
        expected = f"a row from 0 to {count - 1}" + ("" if texts is None else ", or the text of a query")
        raise InputError(f"{path.name}: none of {total} clicks is of a query in the bank; expected {expected}")
    ids = [each.most_common(1)[0][0] if each else -1 for each in clicks]
    numbers = all(isinstance(each, int) for each in ids)
    return np.array(ids, np.int64 if numbers else object)


def _places(count: int, texts: Sequence[str | None] | None, rows: Sequence[int] | None) -> Mapping[str, Sequence[int]]:
    """The bank queries that a click can name, by text and by row; a text is stronger than a number."""
    by_row = {str(row): [place] for place, row in enumerate(range(count) if rows is None else rows)}
    by_text: dict[str, list[int]] = {}
    for place, text in enumerate(texts or ()):
        if text is not None:
            by_text.setdefault(text.strip(), []).append(place)
    return {**by_row, **by_text}


def _table(path: Path) -> Iterator[tuple[str, str]]:
    if path.suffix not in (".csv", ".tsv"):
        raise InputError(f"clicks: {path.name!r} is of an unknown kind; expected .csv, .tsv or .npy")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            columns = list(table.fieldnames or ())
            query, target = (chosen(path, columns, None, usual) for usual in (QUERY, TARGET))
            for row in table:
                if row[query] and row[target]:
                    yield row[query].strip(), row[target].strip()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"clicks: cannot read {str(path)!r}: {' '.join(str(error).split())}") from None


def _id(text: str) -> int | str:
    """An id as stores have it: a number, or a text."""
    return int(text) if text.isascii() and text.isdecimal() else text
