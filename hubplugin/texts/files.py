"""Texts from a log: .txt (a line each), .jsonl, .csv, .tsv or .parquet."""

from __future__ import annotations

import csv
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hubplugin.errors import InputError, Parameter

logger = logging.getLogger(__name__)

USUAL_FIELDS = ("query", "text", "question")
"""What the column of the queries is called in most logs, in the order in which they are looked for."""


@dataclass(frozen=True)
class Texts:
    """texts: those that are not empty. rows: the row of each in the file, counted from 0. name: for errors."""

    texts: list[str]
    rows: list[int]
    name: str


def holds_texts(path: str | Path) -> bool:
    """Whether the file `path` is of a kind that holds texts and no vectors; .parquet may hold either."""
    return Path(path).suffix in READERS and Path(path).suffix != ".parquet"


def read_texts(path: str | Path, field: str | None = None) -> Texts:
    """The texts in the file `path`. field: the column or the JSON key that has them; the first of query, text and
    question by default. Empty ones are left out and counted in the log.

    Raises InputError for a file that is not there, damaged or of another kind, and for a column that it lacks.
    """
    path = Path(path)
    name = f"query bank ({path.name})"
    if path.suffix not in READERS:
        raise InputError(f"{name}: texts are read from {', '.join(READERS)}")
    try:
        found = list(READERS[path.suffix](path, field))
    except FileNotFoundError:
        raise InputError(f"{name}: there is no file {str(path)!r}") from None
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
        raise InputError(f"reading {path.name} needs pyarrow: pip install 'hubplugin[parquet]'") from None
    try:
        file = pq.ParquetFile(path)
        kinds = (pa.types.is_string, pa.types.is_large_string)
        columns = [each.name for each in file.schema_arrow if any(kind(each.type) for kind in kinds)]
        column = chosen(path, columns, field)
        for batch in file.iter_batches(columns=[column]):
            yield from batch.column(0).to_pylist()
    except pa.ArrowException as error:
        raise InputError(f"{path.name}: damaged .parquet file: {' '.join(str(error).split())}") from None


def chosen(path: Path, columns: list[str], field: str | None, usual: tuple[str, ...] = USUAL_FIELDS) -> str:
    """The one of `columns` that is meant: `field`, or else the first that has a usual name."""
    wanted = usual if field is None else (field,)
    for name in wanted:
        for column in columns:
            if column == name or (field is None and column.lower() == name):
                return column
    listed = ", ".join(map(repr, columns)) or "none"
    lacking = f"no column {field!r}" if field is not None else f"no column called {' or '.join(usual)}"
    raise InputError(f"{path.name} has {lacking}; there are: {listed}; name one by ", Parameter("field"))


READERS: dict[str, Callable[[Path, str | None], Iterator[Any]]] = {
    ".txt": _lines,
    ".jsonl": _json_lines,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
}
