"""Texts and clicks from a log.

A .txt file has a text in each line; pyarrow reads .csv, .tsv, .jsonl and .parquet.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hubplugin.errors import InputError, install
from hubplugin.recording import plain_id
from hubplugin.vectors import one_line, require_file

logger = logging.getLogger(__name__)

READABLE = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")

TEXT = ("query", "text", "question")
"""Possible names of the column of texts; the first one in the file is read."""

TARGET = ("target", "id", "target_id", "document", "doc_id")
"""Possible names of the column of clicked targets, likewise."""

BLOCK = 16 << 20
"""The number of bytes that are read at a time; each row must fit in them."""

MOST_NAMED = 5
"""The most left-out items that a warning names."""


@dataclass(frozen=True)
class Texts:
    """The texts of a log, without empty ones.

    rows: The row of each text in the file, counted from 0.
    name: The name of the texts in error messages.
    """

    texts: Sequence[str]
    rows: Sequence[int]
    name: str


def holds_texts(path: Any, embeds: bool = False) -> bool:
    """Return True if the suffix of `path` is that of a file of texts.

    A .parquet file counts as texts if a model `embeds` them, else as vectors.
    """
    suffix = Path(path).suffix
    return suffix in READABLE and (embeds or suffix != ".parquet")


def read_texts(path: Any, name: str = "query bank") -> Texts:
    """Read the lines of a file, or its column query, text or question.

    Empty texts are left out, and a warning counts them. Error messages call the texts
    `name`.

    Raises:
        InputError: The file is missing, damaged or of another kind, or lacks the
            column.
    """
    path = Path(path)
    require_file(path, name, f"a file, {', '.join(READABLE)}")
    name = f"{name} ({path.name})"
    if path.suffix not in READABLE:
        raise InputError(f"{name}: texts are read from {', '.join(READABLE)}")
    rows: Sequence[str | None]
    if path.suffix == ".txt":
        try:
            rows = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{name} cannot be read as .txt: {error}") from None
    else:
        (rows,) = read_columns(path, TEXT)
        if not rows:
            raise InputError(
                f"{path.name} has no column called {' or '.join(TEXT)}; rename the "
                "column that has the texts"
            )
    stripped = [(text or "").strip() for text in rows]
    with_text = [row for row, text in enumerate(stripped) if text]
    if not with_text:
        raise InputError(f"{name} has no texts")
    empty = len(rows) - len(with_text)
    if empty:
        logger.warning(
            "%s: %d of %d rows have no text and are left out", name, empty, len(rows)
        )
    return Texts([stripped[row] for row in with_text], with_text, name)


def read_columns(path: Path, *columns: Sequence[str]) -> list[list[str | None]]:
    """Read columns of the table in a file.

    Args:
        path: The file.
        *columns: The possible names of each column. The first one with a text is read.

    Returns:
        For each column, the text in each row, or None where a row has none. The list is
        empty for a column without texts.

    Raises:
        InputError: The file cannot be read, or pyarrow is missing.
    """
    try:
        import pyarrow as pa
        from pyarrow import csv, dataset, json
    except ImportError:
        raise InputError(
            f"reading {path.name} needs pyarrow; {install('tables')}"
        ) from None
    form: Any = path.suffix.removeprefix(".")
    if form == "jsonl":
        form = dataset.JsonFileFormat(read_options=json.ReadOptions(block_size=BLOCK))
    elif form != "parquet":
        delimiter = "\t" if form == "tsv" else ","
        parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        read = csv.ReadOptions(block_size=BLOCK)
        form = dataset.CsvFileFormat(parse, read_options=read)
    # A column that the file lacks is read as nulls.
    texts = pa.schema([(name, pa.string()) for names in columns for name in names])
    try:
        table = dataset.dataset(path, schema=texts, format=form).to_table().to_pydict()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(
            f"{path.name} cannot be read as {path.suffix}: {one_line(error)}"
        ) from None
    found = list[list[str | None]]()
    for names in columns:
        filled = (table[name] for name in names if any(table[name]))
        found.append(next(filled, []))
    return found


def read_clicks(
    path: Path,
    count: int,
    texts: Sequence[str | None] | None = None,
    rows: Iterable[int] | None = None,
) -> np.ndarray:
    """Read the id of the target that was clicked for each bank query.

    If a query has several clicks, the most frequent target counts, since a click may be
    a slip. Among equally frequent targets, the first one in the file counts. Clicks of
    queries that are not in the bank are left out, and a warning names these queries.

    Args:
        path: A .csv or .tsv file with the columns `query`, the text of a bank query or
            its row counted from 0, and `target`, an id in the store.
        count: The number of bank queries.
        texts: The texts of the bank queries [count]; None if they are vectors.
        rows: The rows of the bank queries in the file of the bank [count]; by default,
            no row was left out.

    Returns:
        The ids [count], -1 for none.

    Raises:
        InputError: The file cannot be read, or has no click of a bank query.
    """
    queries, targets = read_columns(path, TEXT, TARGET)
    if not queries or not targets:
        raise InputError(f"clicks: {path.name} needs the columns query and target")
    # The places in the bank of the queries that a text or a row stands for.
    places_of = defaultdict[str, list[int]](list)
    for place, text in enumerate(texts or ()):
        if text is not None:
            places_of[text.strip()].append(place)
    for place, row in enumerate(range(count) if rows is None else rows):
        # A number that is the text of a query stands for that query, not for a row.
        places_of.setdefault(str(row), [place])
    clicks = Counter[tuple[int, str]]()
    unknown = []
    given = 0
    for query, target in zip(queries, targets, strict=True):
        if not query or not target:
            continue
        given += 1
        places = places_of.get(query.strip())
        if places is None:
            unknown.append(query.strip())
            continue
        for place in places:
            clicks[place, target.strip()] += 1
    if len(unknown) == given:
        raise InputError(
            f"{path.name}: none of {given} clicks belongs to a query of the bank; "
            f"expected the text of a query, or its row from 0 to {count - 1}"
        )
    if unknown:
        logger.warning(
            "%s: %d of %d clicks belong to no query of the bank and are left out: %s",
            path.name,
            len(unknown),
            given,
            list_first(unknown),
        )
    ids = ["-1"] * count
    # The most frequent target comes last and overwrites the others.
    for (place, target), _ in reversed(clicks.most_common()):
        ids[place] = target
    return as_ids(ids)


def as_ids(ids: Iterable[int | str]) -> np.ndarray:
    """Return ids as an array [m]: int64 if all are numbers or digits, else objects.

    Numbers that int64 cannot hold are objects, too.
    """
    plain = [plain_id(id) for id in ids]
    are_numbers = all(isinstance(id, int) and id < 2**63 for id in plain)
    return np.array(plain, np.int64 if are_numbers else object)


def list_first(items: Collection[object]) -> str:
    """Return the first few distinct items as one text."""
    distinct = [repr(item) for item in dict.fromkeys(items)]
    if len(distinct) > MOST_NAMED:
        distinct[MOST_NAMED:] = ["..."]
    return ", ".join(distinct)
