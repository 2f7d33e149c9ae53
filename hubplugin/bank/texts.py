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
"""Names of the column of texts; the first that the file has is read."""

TARGET = ("target", "id", "target_id", "document", "doc_id")
"""Names of the column of clicked targets, likewise."""

BLOCK = 16 << 20
"""Bytes of a file that are read at a time. A row must fit."""

NAMED = 5
"""How many of those that are left out are named."""


@dataclass(frozen=True)
class Texts:
    """Texts of a log that are not empty.

    rows: The row of each in the file, counted from 0.
    name: What errors call them.
    """

    texts: Sequence[str]
    rows: Sequence[int]
    name: str


def holds_texts(path: Any, embeds: bool = False) -> bool:
    """Return True if the file `path` is of a kind that holds texts.

    A .parquet file may hold texts or vectors: texts if a model `embeds`.
    """
    suffix = Path(path).suffix
    return suffix in READABLE and (embeds or suffix != ".parquet")


def read_texts(path: Any, name: str = "query bank") -> Texts:
    """Read the lines of a file, or its column query, text or question.

    Empty ones are left out and counted in the log. Errors call the texts `name`.

    Raises:
        InputError: The file is not there, damaged or of another kind, or has no such
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
                f"{path.name} has no column called {' or '.join(TEXT)}; rename the one "
                "that has the texts"
            )
    stripped = [(text or "").strip() for text in rows]
    full = [row for row, text in enumerate(stripped) if text]
    if not full:
        raise InputError(f"{name} has no texts")
    lacking = len(rows) - len(full)
    if lacking:
        message = "%s: %d of %d rows have no text and are left out"
        logger.warning(message, name, lacking, len(rows))
    return Texts([stripped[row] for row in full], full, name)


def read_columns(path: Path, *columns: Sequence[str]) -> list[list[str | None]]:
    """Read columns of the table in a file.

    Args:
        path: The file.
        *columns: The names that each column may have. The first that the file has counts.

    Returns:
        The text in each row of each column, None if there is none; an empty list for a
        column that the file lacks.

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
    kind: Any = path.suffix.removeprefix(".")
    if kind == "jsonl":
        kind = dataset.JsonFileFormat(read_options=json.ReadOptions(block_size=BLOCK))
    elif kind != "parquet":
        delimiter = "\t" if kind == "tsv" else ","
        parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        read = csv.ReadOptions(block_size=BLOCK)
        kind = dataset.CsvFileFormat(parse, read_options=read)
    texts = pa.schema([(name, pa.string()) for names in columns for name in names])
    try:
        table = dataset.dataset(path, schema=texts, format=kind).to_table().to_pydict()
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
    """Read the id of the target that each bank query led to.

    Of several clicks of a query the most frequent target counts, of equally frequent
    ones the first in the file: a bank query has one id, and a click may be a slip.
    Clicks of queries that are not in the bank are counted and named in the log.

    Args:
        path: .csv or .tsv with the columns `query`, the text of a bank query or its row
            counted from 0, and `target`, an id in the store.
        count: How many bank queries there are.
        texts: Their texts [count].
        rows: The rows that they have in the file of the bank, if some were left out.

    Returns:
        [count], -1 for none.

    Raises:
        InputError: The file cannot be read, or has nothing of the bank.
    """
    queries, targets = read_columns(path, TEXT, TARGET)
    if not queries or not targets:
        raise InputError(f"clicks: {path.name} needs the columns query and target")
    places = defaultdict[str, list[int]](list)
    for place, text in enumerate(texts or ()):
        if text is not None:
            places[text.strip()].append(place)
    for place, row in enumerate(range(count) if rows is None else rows):
        # A text is stronger than a number.
        places.setdefault(str(row), [place])
    clicks = Counter[tuple[int, str]]()
    unknown = []
    given = 0
    for query, target in zip(queries, targets, strict=True):
        if not query or not target:
            continue
        given += 1
        asked = places.get(query.strip())
        if asked is None:
            unknown.append(query.strip())
            continue
        for place in asked:
            clicks[place, target.strip()] += 1
    if len(unknown) == given:
        raise InputError(
            f"{path.name}: none of {given} clicks is of a query in the bank; expected "
            f"the text of a query, or its row from 0 to {count - 1}"
        )
    if unknown:
        message = (
            "%s: %d of %d clicks are of queries that are not in the bank, and are left "
            "out: %s"
        )
        first = list_first(unknown)
        logger.warning(message, path.name, len(unknown), given, first)
    ids = ["-1"] * count
    for (place, target), _ in reversed(clicks.most_common()):
        ids[place] = target
    return as_ids(ids)


def as_ids(ids: Iterable[int | str]) -> np.ndarray:
    """Return ids as an array [m], of numbers if all are: digits count as a number."""
    plain = [plain_id(id) for id in ids]
    fit = all(isinstance(id, int) and id < 2**63 for id in plain)
    return np.array(plain, np.int64 if fit else object)


def list_first(items: Collection[object]) -> str:
    """Return the first few of the items that differ."""
    distinct = [repr(item) for item in dict.fromkeys(items)]
    if len(distinct) > NAMED:
        distinct[NAMED:] = ["..."]
    return ", ".join(distinct)
