"""Ground truth and names from whatever form they come in. The only reader of them."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hubplugin.errors import InputError, Parameter, install
from hubplugin.measures.retrieval import Truth
from hubplugin.store import Id
from hubplugin.vectors import SupportsArray, opened_npy, require_file

Row: TypeAlias = int | np.integer[Any]

TruthLike: TypeAlias = (
    Truth | SupportsArray | Sequence[Row | SupportsArray | Sequence[Row]] | str | os.PathLike[str] | None
)
"""Index array [q] or [q, r], list of lists of rows, `Truth`, or a path. That is an .npy file of the first, a .json file
of the first two, or a qrels file. Qrels are of TREC (lines of 'query 0 target relevance') or of BEIR (tabs between
query, target and relevance, under a header), also as .gz. None: row i of the targets belongs to row i of the
queries."""

Names: TypeAlias = Sequence[object] | str | os.PathLike[str] | None
"""One a vector, in their order: a sequence, or a text file with one a line."""


def as_names(source: Names, rows: int, what: str) -> Sequence[object] | None:
    """`source` as a sequence of `rows` entries; `what` is what errors call it. Raises InputError for another number."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        try:
            source = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{what}: cannot read {str(path)!r}: {error}") from None
    if source is not None and len(source) != rows:
        raise InputError(f"{what} has {len(source)} entries for {rows} vectors; expected one each")
    return source


def as_truth(
    source: TruthLike,
    queries: int,
    targets: int,
    query_names: Sequence[object] | None = None,
    names: Sequence[object] | None = None,
) -> Truth:
    """`source` as the true pairs of `queries` x `targets`. Queries with an empty list are searched but not judged.

    query_names, names: what a qrels file calls the queries and the targets; without them its ids are row numbers.

    Raises InputError for a row outside the gallery, a wrong number of queries, nothing judged, and files that are
    neither.
    """
    if source is None:
        if queries != targets:
            raise InputError(
                f"{queries} queries and {targets} targets do not pair up row by row: pass ", Parameter("truth")
            )
        source = np.arange(queries)
    if isinstance(source, Truth):
        pairs, grades = (source.query_rows, source.target_rows), source.grades
    elif isinstance(source, (str, os.PathLike)) and Path(source).suffix not in (".npy", ".json"):
        known = row_by_name(query_names, queries, "query_names"), row_by_name(names, targets, "names")
        pairs, grades = _from_qrels(Path(source), *known)
    else:
        pairs = _from_rows(rows_from_file(Path(source)) if isinstance(source, (str, os.PathLike)) else source, queries)
        grades = np.ones(len(pairs[0]))
    return _checked(*pairs, grades, queries, targets)


def _checked(query_rows: np.ndarray, target_rows: np.ndarray, grades: np.ndarray, queries: int, targets: int) -> Truth:
    if not len(query_rows):
        raise InputError("ground truth names no true target for any query; at least one is needed")
    for rows, count, what in ((query_rows, queries, "query"), (target_rows, targets, "target")):
        outside = rows[(rows < 0) | (rows >= count)]
        if outside.size:
            raise InputError(
                f"ground truth names {what} {outside[0]}, but there are {count}; expected rows 0 to {count - 1}"
            )
    order = np.lexsort((target_rows, query_rows))
    query_rows, target_rows, grades = query_rows[order], target_rows[order], grades[order]
    repeated = np.flatnonzero((np.diff(query_rows) == 0) & (np.diff(target_rows) == 0))
    if repeated.size:
        first = repeated[0]
        raise InputError(f"ground truth names target {target_rows[first]} twice for query {query_rows[first]}")
    return Truth(query_rows, target_rows, grades)


def _from_rows(source: Any, queries: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        rows = [np.atleast_1d(np.asarray(row)) for row in source]
    except (TypeError, ValueError):
        raise InputError("ground truth is no list with a row number, or a list of them, for each query") from None
    if len(rows) != queries:
        raise InputError(f"ground truth has {len(rows)} rows for {queries} queries; expected one row a query")
    for number, row in enumerate(rows):
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise InputError(f"ground truth row {number} is no list of row numbers: {row.tolist()!r}")
    query_rows = np.repeat(np.arange(queries), [row.size for row in rows])
    return query_rows, np.fromiter(chain.from_iterable(rows), np.int64, len(query_rows))


def rows_from_file(path: Path) -> Any:
    """What an .npy or a .json file holds."""
    name = f"ground truth {path.name}"
    require_file(path, "ground truth")
    if path.suffix == ".npy":
        return np.array(opened_npy(path, name))
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: cannot be read as JSON: {error}") from None


def _from_qrels(
    path: Path, query_rows: dict[str, int], target_rows: dict[str, int]
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    judgements = judgements_of(path)
    pairs = (
        _looked_up((judgement.query_id for judgement in judgements), query_rows, "query", path),
        _looked_up((judgement.doc_id for judgement in judgements), target_rows, "target", path),
    )
    return pairs, np.array([judgement.relevance for judgement in judgements], np.float64)


def judgements_of(path: Path) -> list[Any]:
    """What a qrels file says is relevant: `query_id`, `doc_id` and `relevance` of each."""
    try:
        from ir_measures import read_trec_qrels
    except ImportError:
        raise InputError(f"reading {path.name} needs ir-measures; {install('evaluation')}") from None
    require_file(path, "ground truth")
    try:
        return [judgement for judgement in read_trec_qrels(_as_trec(path)) if judgement.relevance > 0]
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
        lines = ["\t0\t".join(line.split("\t", 1)) for line in lines[not lines[0].split()[-1].isdigit() :]]
    return io.StringIO("".join(lines))


def row_by_name(names: Sequence[object] | None, count: int, what: str) -> dict[str, int]:
    """The row of each of `names`, or of the `count` row numbers. Raises InputError for a name that is there twice."""
    rows: dict[str, int] = {}
    for row, name in enumerate(names if names is not None else range(count)):
        if rows.setdefault(str(name), row) != row:
            raise InputError(f"{what}: {str(name)!r} is there twice, and a file of TREC tells by the name")
    return rows


def _looked_up(ids: Iterable[str], rows: dict[str, int], what: str, path: Path) -> np.ndarray:
    try:
        return np.array([rows[name] for name in ids], np.int64)
    except KeyError as unknown:
        raise InputError(
            f"ground truth {path.name}: {what} {unknown} is not among the {len(rows)} known; pass ",
            Parameter("query_names" if what == "query" else "names"),
            ", what it calls them, in the order of their vectors",
        ) from None


TrueIds: TypeAlias = Sequence[Id | Sequence[Id]] | np.ndarray | str | os.PathLike[str]
"""For each query the id of its true target, or a list of them; -1 or an empty list where it is not known. Or a path: to
an .npy or .json file of that, or a qrels file whose targets are ids."""


def as_true_ids(source: TrueIds, queries: int, query_names: Sequence[object] | None = None) -> list[set[str]]:
    """`source` as the true ids of each query, as text; none where it is not judged. query_names: what a qrels file
    calls the queries; row numbers by default. Raises InputError where it cannot be used."""
    if isinstance(source, (str, os.PathLike)) and Path(source).suffix not in (".npy", ".json"):
        found = _ids_from_qrels(Path(source), queries, query_names)
    else:
        rows = rows_from_file(Path(source)) if isinstance(source, (str, os.PathLike)) else source
        found = [_ids_of(row) for row in _listed(rows)]
    if len(found) != queries:
        raise InputError(f"ground truth has {len(found)} rows for {queries} queries; expected one row a query")
    if not any(found):
        raise InputError("ground truth names no true target for any query; at least one is needed")
    return found


def _listed(rows: Any) -> list[Any]:
    listed = rows.tolist() if isinstance(rows, np.ndarray) else rows
    if not isinstance(listed, (list, tuple)):
        raise InputError("ground truth is no list with an id, or a list of them, for each query")
    return list(listed)


def _ids_of(row: Any) -> set[str]:
    found = row if isinstance(row, (list, tuple)) else [row]
    for each in found:
        if isinstance(each, (bool, float)) or not isinstance(each, (int, str)):
            raise InputError(f"ground truth: {each!r} is no id; expected numbers or texts")
    return {str(each) for each in found if each != -1}


def _ids_from_qrels(path: Path, queries: int, query_names: Sequence[object] | None) -> list[set[str]]:
    judgements, known = judgements_of(path), row_by_name(query_names, queries, "query_names")
    found: list[set[str]] = [set() for _ in range(queries)]
    rows = _looked_up((judgement.query_id for judgement in judgements), known, "query", path)
    for row, judgement in zip(rows.tolist(), judgements, strict=True):
        found[row].add(judgement.doc_id)
    return found
