"""Texts from a log: .txt (a line each), .jsonl, .csv, .tsv or .parquet."""

from __future__ import annotations

import csv
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hubplugin.errors import InputError, Parameter, install
from hubplugin.vectors import opened_npy, require_file

logger = logging.getLogger(__name__)

USUAL_FIELDS = ("query", "text", "question")
"""What the column of the queries is called in most logs, in the order in which they are looked for."""


@dataclass(frozen=True)
class Texts:
    """texts: those that are not empty. rows: the row of each in the file, counted from 0. name: for errors."""

    texts: list[str]
    rows: list[int]
    name: str


def holds_texts(path: str | Path, embeds: bool = False) -> bool:
    """Whether the file `path` is of a kind that holds texts. embeds: whether a model was named for texts; without one
    .parquet, which may hold either, is of vectors."""
    return Path(path).suffix in READERS and (embeds or Path(path).suffix != ".parquet")


def read_texts(path: str | Path, field: str | None = None, name: str = "query bank") -> Texts:
    """The texts in the file `path`. field: the column or the JSON key that has them; the first of query, text and
    question by default. name: what errors call them. Empty ones are left out and counted in the log.

    Raises InputError for a file that is not there, damaged or of another kind, and for a column that it lacks.
    """
    path = Path(path)
    require_file(path, name, f"a file, {', '.join(READERS)}")
    name = f"{name} ({path.name})"
    if path.suffix not in READERS:
        raise InputError(f"{name}: texts are read from {', '.join(READERS)}")
    try:
        found = list(READERS[path.suffix](path, field))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{name} cannot be read as {path.suffix}: {' '.join(str(error).split())}") from None
    kept = [(row, text.strip()) for row, text in enumerate(found) if isinstance(text, str) and text.strip()]
    if not kept:
        raise InputError(f"{name} has no texts")
    if len(kept) < len(found):
        logger.warning("%s: %d of %d rows have no text and are left out", name, len(found) - len(kept), len(found))
    return Texts([text for _, text in kept], [row for row, _ in kept], name)


def _lines(path: Path, field: str | None) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig") as file:
        yield from file


def _json_lines(path: Path, field: str | None) -> Iterator[Any]:
    column = None
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as error:
                raise InputError(f"{path.name}: line {number} is no JSON: {error}") from None
            if isinstance(found, dict):
                column = chosen(path, list(found), field) if column is None else column
                found = found.get(column)
            yield found


def _table(path: Path, field: str | None) -> Iterator[Any]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        column = chosen(path, list(table.fieldnames or ()), field)
        for row in table:
            yield row[column]


def _parquet(path: Path, field: str | None) -> Iterator[Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise InputError(f"reading {path.name} needs pyarrow; {install('parquet')}") from None
    try:
        file = pq.ParquetFile(path)
        kinds = (pa.types.is_string, pa.types.is_large_string)
        columns = [each.name for each in file.schema_arrow if any(kind(each.type) for kind in kinds)]
        column = chosen(path, columns, field)
        for batch in file.iter_batches(columns=[column]):
            yield from batch.column(0).to_pylist()
    except pa.ArrowException as error:
        raise InputError(f"{path.name}: damaged .parquet file: {' '.join(str(error).split())}") from None


def named(columns: list[str], field: str | None, usual: tuple[str, ...]) -> str | None:
    """The one of `columns` that is meant, if it is there: `field`, or else the first that has a usual name."""
    for name in usual if field is None else (field,):
        for column in columns:
            if column == name or (field is None and column.lower() == name):
                return column
    return None


def chosen(path: Path, columns: list[str], field: str | None) -> str:
    """The column of the texts."""
    found = named(columns, field, USUAL_FIELDS)
    if found is not None:
        return found
    listed = ", ".join(map(repr, columns)) or "none"
    lacking = f"no column {field!r}" if field is not None else f"no column called {' or '.join(USUAL_FIELDS)}"
    raise InputError(f"{path.name} has {lacking}; there are: {listed}; name one by ", Parameter("field"))


READERS: dict[str, Callable[[Path, str | None], Iterator[Any]]] = {
    ".txt": _lines,
    ".jsonl": _json_lines,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
}


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
    require_file(path, "clicks")
    if path.suffix == ".npy":
        return np.array(opened_npy(path, f"clicks ({path.name})"))
    clicks: list[Counter[int | str]] = [Counter() for _ in range(count)]
    places = _places(count, texts, rows)
    unknown: Counter[str] = Counter()
    total = 0
    for query, target in _click_table(path):
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
            path.name,
            unknown.total(),
            total,
            named,
            ", ..." if len(unknown) > NAMED else "",
        )
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


def _click_table(path: Path) -> Iterator[tuple[str, str]]:
    if path.suffix not in (".csv", ".tsv"):
        raise InputError(f"clicks: {path.name!r} is of an unknown kind; expected .csv, .tsv or .npy")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            columns = list(table.fieldnames or ())
            query, target = (named(columns, None, usual) for usual in (QUERY, TARGET))
            if query is None or target is None:
                listed = ", ".join(map(repr, columns)) or "none"
                raise InputError(f"clicks: {path.name} needs the columns query and target; there are: {listed}")
            for row in table:
                if row[query] and row[target]:
                    yield row[query].strip(), row[target].strip()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"clicks: cannot read {str(path)!r}: {' '.join(str(error).split())}") from None


def _id(text: str) -> int | str:
    """An id as most stores have it: a number as it is usually written, or a text."""
    return int(text) if is_number(text) else text


def is_number(text: str) -> bool:
    """Whether these are the digits of a whole number, and nothing would be lost: 042 is a text, as a barcode is."""
    return text.isascii() and text.isdecimal() and len(text) < 40 and str(int(text)) == text
