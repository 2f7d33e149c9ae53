"""Ground truth and names from whatever form they come in. The only reader of them."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hubplugin.errors import InputError, Parameter, install
from hubplugin.measures.retrieval import Truth
from hubplugin.store import Id
from hubplugin.vectors import SupportsArray, open_npy, require_file

Row: TypeAlias = int | np.integer[Any]

TruthLike: TypeAlias = (
    Truth
    | SupportsArray
    | Sequence[Row | SupportsArray | Sequence[Row]]
    | str
    | os.PathLike[str]
    | None
)
"""Index array [q] or [q, r], list of lists of rows, `Truth`, or a path. That is an .npy file of the first, a .json file
of the first two, or a qrels file. Qrels are of TREC (lines of 'query 0 target relevance') or of BEIR (tabs between
query, target and relevance, under a header), also as .gz. None: row i of the targets belongs to row i of the
queries."""

TrueIds: TypeAlias = Sequence[Id | Sequence[Id]] | np.ndarray | str | os.PathLike[str]
"""For each query the id of its true target, or a list of them; -1 or an empty list where it is not known. Or a path: to
an .npy or .json file of that, or a qrels file whose targets are ids."""

Names: TypeAlias = Sequence[object] | str | os.PathLike[str] | None
"""One a vector, in their order: a sequence, or a text file with one a line."""


def as_names(source: Names, rows: int, label: str) -> Sequence[object] | None:
    """`source` as a sequence of `rows` entries; errors call it `label`. Raises InputError for another number."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        try:
            source = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{label}: cannot read {str(path)!r}: {error}") from None
    if source is not None and len(source) != rows:
        raise InputError(
            f"{label} has {len(source)} entries for {rows} vectors; expected one each"
        )
    return source


def as_truth(
    source: TruthLike,
    queries: int,
    targets: int,
    query_names: Sequence[object] | None = None,
    names: Sequence[object] | None = None,
) -> Truth:
    """The true pairs of queries and targets. Queries with an empty list are searched but not judged.

    Args:
        source: as in `hubplugin.evaluate`.
        queries, targets: how many there are.
        query_names, names: what a qrels file calls the queries and the targets; without them its ids are row numbers.

    Raises:
        InputError: a row is outside the gallery, the number of queries is wrong, nothing is judged, or a file is
            neither.
    """
    if source is None:
        if queries != targets:
            raise InputError(
                f"{queries} queries and {targets} targets do not pair up row by row: pass ",
                Parameter("truth"),
            )
        source = np.arange(queries)
    if isinstance(source, Truth):
        return _truth(
            source.query_rows, source.target_rows, source.grades, queries, targets
        )
    if (path := _qrels(source)) is not None:
        judgements = judgements_of(path)
        query_rows = _locate(
            [pair.query_id for pair in judgements],
            query_names,
            queries,
            "query_names",
            path,
        )
        target_rows = _locate(
            [pair.doc_id for pair in judgements], names, targets, "names", path
        )
        grades = np.array([pair.relevance for pair in judgements], np.float64)
        return _truth(query_rows, target_rows, grades, queries, targets)
    lists = _lists(source, queries, "row number")
    for number, row in enumerate(lists):
        if not all(
            isinstance(key, (int, np.integer)) and not isinstance(key, bool)
            for key in row
        ):
            raise InputError(
                f"ground truth row {number} is no list of row numbers: {row!r}"
            )
    query_rows = np.repeat(np.arange(queries), [len(row) for row in lists])
    target_rows = np.fromiter(chain.from_iterable(lists), np.int64, len(query_rows))
    return _truth(query_rows, target_rows, np.ones(len(query_rows)), queries, targets)


def as_true_ids(
    source: TrueIds, queries: int, query_names: Sequence[object] | None = None
) -> list[set[str]]:
    """The true ids of each query, as text; none where it is not judged.

    Args:
        source: as in `hubplugin.evaluate`.
        queries: how many there are.
        query_names: what a qrels file calls them; by default row numbers.

    Raises:
        InputError: the source cannot be used.
    """
    if (path := _qrels(source)) is not None:
        judgements, true = judgements_of(path), [set[str]() for _ in range(queries)]
        rows = _locate(
            [pair.query_id for pair in judgements],
            query_names,
            queries,
            "query_names",
            path,
        )
        for row, judgement in zip(rows.tolist(), judgements, strict=True):
            true[row].add(judgement.doc_id)
    else:
        lists = _lists(source, queries, "id")
        for key in chain.from_iterable(lists):
            if isinstance(key, (bool, float)) or not isinstance(
                key, (int, str, np.integer)
            ):
                raise InputError(
                    f"ground truth: {key!r} is no id; expected numbers or texts"
                )
        true = [{str(key) for key in row if key != -1} for row in lists]
    if not any(true):
        raise InputError(
            "ground truth names no true target for any query; at least one is needed"
        )
    return true


def _truth(
    query_rows: np.ndarray,
    target_rows: np.ndarray,
    grades: np.ndarray,
    queries: int,
    targets: int,
) -> Truth:
    if not len(query_rows):
        raise InputError(
            "ground truth names no true target for any query; at least one is needed"
        )
    for rows, count, side in (
        (query_rows, queries, "query"),
        (target_rows, targets, "target"),
    ):
        outside = rows[(rows < 0) | (rows >= count)]
        if outside.size:
            raise InputError(
                f"ground truth names {side} {outside[0]}, but there are {count}; expected rows 0 to {count - 1}"
            )
    order = np.lexsort((target_rows, query_rows))
    query_rows, target_rows, grades = (
        query_rows[order],
        target_rows[order],
        grades[order],
    )
    repeated = np.flatnonzero((np.diff(query_rows) == 0) & (np.diff(target_rows) == 0))
    if repeated.size:
        first = repeated[0]
        raise InputError(
            f"ground truth names target {target_rows[first]} twice for query {query_rows[first]}"
        )
    return Truth(query_rows, target_rows, grades)


def _lists(source: Any, queries: int, item: str) -> list[list[Any]]:
    """For each query the list of what is true for it, from a value or a file. item: what it should be a list of."""
    if isinstance(source, (str, os.PathLike)):
        source = _read(Path(source))
    rows = source if isinstance(source, (list, tuple)) else np.asarray(source).tolist()
    if not isinstance(rows, (list, tuple)):
        raise InputError(
            f"ground truth is no list with a {item}, or a list of them, for each query"
        )
    if len(rows) != queries:
        raise InputError(
            f"ground truth has {len(rows)} rows for {queries} queries; expected one row a query"
        )
    plain = (
        np.asarray(row).tolist() if hasattr(row, "__array__") else row for row in rows
    )
    return [list(row) if isinstance(row, (list, tuple)) else [row] for row in plain]


def _read(path: Path) -> Any:
    """What an .npy or a .json file holds."""
    name = f"ground truth {path.name}"
    require_file(path, "ground truth")
    if path.suffix == ".npy":
        return np.array(open_npy(path, name))
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: cannot be read as JSON: {error}") from None


def _qrels(source: object) -> Path | None:
    """The path of a qrels file; None of all else."""
    is_path = isinstance(source, (str, os.PathLike)) and Path(source).suffix not in (
        ".npy",
        ".json",
    )
    return Path(source) if is_path else None  # type: ignore[arg-type]


def judgements_of(path: Path) -> list[Any]:
    """What a qrels file says is relevant: `query_id`, `doc_id` and `relevance` of each."""
    try:
        from ir_measures import read_trec_qrels
    except ImportError:
        raise InputError(
            f"reading {path.name} needs ir-measures; {install('evaluation')}"
        ) from None
    require_file(path, "ground truth")
    try:
        return [
            judgement
            for judgement in read_trec_qrels(_as_trec(path))
            if judgement.relevance > 0
        ]
    except (OSError, ValueError):
        raise InputError(
            f"ground truth {path.name} is no qrels file: expected lines of 'query 0 target relevance', or an .npy or "
            ".json file"
        ) from None


def _as_trec(path: Path) -> io.StringIO:
    """A qrels file as TREC has it: BEIR's has a header, and no column for the iteration."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig") as file:
        lines = file.readlines()
    if lines and len(lines[0].split("\t")) == 3:
        lines = [
            "\t0\t".join(line.split("\t", 1))
            for line in lines[not lines[0].split()[-1].isdigit() :]
        ]
    return io.StringIO("".join(lines))


def _locate(
    ids: Sequence[str],
    names: Sequence[object] | None,
    count: int,
    parameter: str,
    path: Path,
) -> np.ndarray:
    """The rows of what a qrels file calls `ids`, among `names`, or the `count` row numbers. Raises InputError for a
    name that is there twice, and for one that is not there."""
    rows: dict[str, int] = {}
    for row, name in enumerate(names if names is not None else range(count)):
        if rows.setdefault(str(name), row) != row:
            raise InputError(
                f"{parameter}: {str(name)!r} is there twice, and a file of TREC tells by the name"
            )
    try:
        return np.array([rows[name] for name in ids], np.int64)
    except KeyError as unknown:
        side = "target" if parameter == "names" else "query"
        raise InputError(
            f"ground truth {path.name}: {side} {unknown} is not among the {len(rows)} known; pass ",
            Parameter(parameter),
            ", what it calls them, in the order of their vectors",
        ) from None
