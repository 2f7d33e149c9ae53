"""Ground truth and names from whatever form they come in. The only reader of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hubplugin.errors import InputError, Parameter
from hubplugin.measures.retrieval import Truth
from hubplugin.store import Id
from hubplugin.vectors import SupportsArray, open_npy, require_file

Row: TypeAlias = int | np.integer[Any]

TruthLike: TypeAlias = (
    SupportsArray
    | Sequence[Row | SupportsArray | Sequence[Row]]
    | str
    | os.PathLike[str]
    | None
)
"""Index array [q] or [q, r], list of lists of rows, or a path. That is an .npy file of the first, a .json file of the
first two, or a qrels file. Qrels are of TREC (lines of 'query 0 target relevance') or of BEIR (tabs between query,
target and relevance, under a header). None: row i of the targets belongs to row i of the queries."""

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
    if (path := _qrels(source)) is not None:
        qrels = read_qrels(path)
        query_ids = [judgement.query for judgement in qrels]
        target_ids = [judgement.target for judgement in qrels]
        query_rows = _locate(query_ids, query_names, queries, "query_names", path)
        target_rows = _locate(target_ids, names, targets, "names", path)
        grades = np.array([judgement.relevance for judgement in qrels])
        return _truth(query_rows, target_rows, grades, queries, targets)
    lists = _lists(source, queries, "row number")
    for number, row in enumerate(lists):
        if not all(type(key) is int for key in row):
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
        qrels = read_qrels(path)
        true = [set[str]() for _ in range(queries)]
        query_ids = [judgement.query for judgement in qrels]
        rows = _locate(query_ids, query_names, queries, "query_names", path)
        for row, judgement in zip(rows.tolist(), qrels, strict=True):
            true[row].add(judgement.target)
    else:
        lists = _lists(source, queries, "id")
        for key in chain.from_iterable(lists):
            if type(key) not in (int, str):
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
    _require_inside(query_rows, queries, "query")
    _require_inside(target_rows, targets, "target")
    order = np.lexsort((target_rows, query_rows))
    query_rows = query_rows[order]
    target_rows = target_rows[order]
    repeated = np.flatnonzero((np.diff(query_rows) == 0) & (np.diff(target_rows) == 0))
    if repeated.size:
        first = repeated[0]
        raise InputError(
            f"ground truth names target {target_rows[first]} twice for query {query_rows[first]}"
        )
    return Truth(query_rows, target_rows, grades[order])


def _require_inside(rows: np.ndarray, count: int, side: str) -> None:
    outside = rows[(rows < 0) | (rows >= count)]
    if outside.size:
        raise InputError(
            f"ground truth names {side} {outside[0]}, but there are {count}; "
            f"expected rows 0 to {count - 1}"
        )


def _lists(source: Any, queries: int, item: str) -> list[list[Any]]:
    """Return the list of what is true for each query, from a value or a file.

    `item` is what each should be a list of.
    """
    if isinstance(source, (str, os.PathLike)):
        source = _read(Path(source))
    rows = source if isinstance(source, (list, tuple)) else np.asarray(source).tolist()
    if not isinstance(rows, (list, tuple)):
        raise InputError(
            f"ground truth is no list with a {item}, or a list of them, for each query"
        )
    if len(rows) != queries:
        raise InputError(
            f"ground truth has {len(rows)} rows for {queries} queries; "
            "expected one row a query"
        )
    lists = []
    for row in rows:
        if hasattr(row, "__array__"):
            row = np.asarray(row).tolist()
        keys = row if isinstance(row, (list, tuple)) else [row]
        lists.append(
            [key.item() if isinstance(key, np.generic) else key for key in keys]
        )
    return lists


def _read(path: Path) -> Any:
    """Return what an .npy or a .json file holds."""
    name = f"ground truth {path.name}"
    require_file(path, "ground truth")
    if path.suffix == ".npy":
        return np.array(open_npy(path, name))
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: cannot be read as JSON: {error}") from None


def _qrels(source: Any) -> Path | None:
    """Return the path of a qrels file; None for anything else."""
    if not isinstance(source, (str, os.PathLike)):
        return None
    path = Path(source)
    return None if path.suffix in (".npy", ".json") else path


class Judgement(NamedTuple):
    """A pair that a qrels file calls relevant, by the names that it has there."""

    query: str
    target: str
    relevance: float


def read_qrels(path: Path) -> list[Judgement]:
    """Read what a qrels file of TREC or BEIR says is relevant.

    Raises InputError for a file that is missing or of another form.
    """
    require_file(path, "ground truth")
    judgements = []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        if lines and len(lines[0].split("\t")) == 3 and not lines[0][-1].isdigit():
            lines = lines[1:]  # the header of BEIR
        for line in filter(str.strip, lines):
            query, *iteration, target, relevance = line.split()
            if len(iteration) > 1:
                raise ValueError(line)
            judgements.append(Judgement(query, target, float(relevance)))
    except (OSError, ValueError):
        raise InputError(
            f"ground truth {path.name} is no qrels file: expected lines of "
            "'query 0 target relevance', or an .npy or .json file"
        ) from None
    return [judgement for judgement in judgements if judgement.relevance > 0]


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
