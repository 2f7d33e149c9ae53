"""Readers of ground truth and of names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hubplugin.errors import InputError, Parameter
from hubplugin.jobs.naming import read_names
from hubplugin.measures.retrieval import Truth
from hubplugin.store import Id
from hubplugin.vectors import SupportsArray, open_npy, require_file

TruthLike: TypeAlias = (
    SupportsArray
    | Sequence[Id | SupportsArray | Sequence[Id]]
    | str
    | os.PathLike[str]
    | None
)
"""The id of each query's true target, or a list of ids for each query.

-1 or an empty list means that none is known. The ids are ids of a store or, for an
array, rows or names. A path names an .npy file of such ids or a qrels file, either of
TREC (lines of 'query 0 target relevance') or of BEIR (a header, then query, target and
relevance separated by tabs). None means that row i of the array answers query i."""

Names: TypeAlias = Sequence[object] | str | os.PathLike[str] | None
"""A name for each vector, in order: a sequence, or a file for `read_names`."""


def as_names(source: Names, rows: int, label: str) -> Sequence[object] | None:
    """Return `source` as a sequence of `rows` names; None if it is None.

    Raises InputError for a different number of names or an unreadable file. The message
    calls the names `label`.
    """
    if isinstance(source, (str, os.PathLike)):
        texts = read_names(source, label)
        source = [texts.get(str(row)) for row in range(len(texts))]
    if source is not None and len(source) != rows:
        raise InputError(
            f"{label} has {len(source)} entries for {rows} vectors; expected one "
            "for each"
        )
    return source


def as_truth(
    source: TruthLike,
    queries: int,
    targets: int,
    query_names: Sequence[object] | None = None,
    names: Sequence[object] | None = None,
) -> Truth:
    """Return the true pairs of a query and a target in an array.

    Args:
        source: As in `hubplugin.evaluate`.
        queries, targets: The number of queries and of targets.
        query_names, names: The names by which texts in the source refer to queries and
            targets; row numbers by default.

    Raises:
        InputError: The source cannot be used, or refers to a row that does not exist.
    """
    if source is None:
        if queries != targets:
            raise InputError(
                f"{queries} queries and {targets} targets do not pair up row by row: "
                "pass ",
                Parameter("truth"),
            )
        source = np.arange(queries)
    pairs = []
    for row, grade_of in enumerate(read_truth(source, queries, query_names)):
        for key, grade in grade_of.items():
            pairs.append((row, key, grade))
    query_rows, keys, grades = zip(*pairs, strict=True)
    target_rows = np.array(_locate(keys, names, targets, "names"))
    # Query rows ascend already, so sorting only orders the targets of each query.
    order = np.lexsort((target_rows, query_rows))
    return Truth(np.array(query_rows), target_rows[order], np.array(grades)[order])


def read_truth(
    source: TruthLike, queries: int, query_names: Sequence[object] | None = None
) -> list[dict[Id, float]]:
    """Return the grade of each true target, by its id, for each query.

    Args:
        source: As in `hubplugin.evaluate`.
        queries: The number of queries.
        query_names: The names of the queries in a qrels file; row numbers by default.

    Raises:
        InputError: The source cannot be used, or names no true target for any query.
    """
    true: list[dict[Id, float]] = [{} for _ in range(queries)]
    if isinstance(source, (str, os.PathLike)) and Path(source).suffix != ".npy":
        judgements = read_qrels(Path(source))
        asked = [query for query, _, _ in judgements]
        rows = _locate(asked, query_names, queries, "query_names")
        for row, (_, target, grade) in zip(rows, judgements, strict=True):
            true[row][target] = grade
    else:
        for row, keys in enumerate(_read_lists(source, queries)):
            true[row] = {_as_id(key): 1.0 for key in keys}
            true[row].pop(-1, None)
    if not any(true):
        raise InputError(
            "ground truth names no true target for any query; at least one is needed"
        )
    return true


def read_qrels(path: Path) -> list[tuple[str, str, float]]:
    """Read the relevant pairs of a TREC or BEIR file: query, target and relevance.

    Raises InputError if the file is missing or malformed.
    """
    require_file(path, "ground truth")
    judgements = []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        # The header of BEIR has three columns, and its last is no number.
        if lines and len(lines[0].split("\t")) == 3 and not lines[0][-1].isdigit():
            lines = lines[1:]
        for line in filter(str.strip, lines):
            # TREC has an unused second column, and BEIR has none.
            query, *unused, target, relevance = line.split()
            if len(unused) > 1:
                raise ValueError(line)
            if float(relevance) > 0:
                judgements.append((query, target, float(relevance)))
    except (OSError, ValueError):
        raise InputError(
            f"ground truth {path.name} is not a qrels file: expected lines of 'query 0 "
            "target relevance', or an .npy file"
        ) from None
    return judgements


def _read_lists(source: Any, queries: int) -> list[list[Any]]:
    """Return a list of true targets for each query; a single id becomes a list.

    Raises InputError if `source` does not have one entry for each of the `queries`.
    """
    if isinstance(source, (str, os.PathLike)):
        source = open_npy(Path(source), "ground truth")
    if not isinstance(source, (list, tuple)):
        source = np.atleast_1d(source).tolist()
    if len(source) != queries:
        raise InputError(
            f"ground truth has {len(source)} rows for {queries} queries; expected an "
            "id, or a list of ids, for each"
        )
    return [np.atleast_1d(np.asarray(row, object)).tolist() for row in source]


def _as_id(key: object) -> Id:
    """Return a number or text as an id. Raises InputError for anything else."""
    if isinstance(key, (int, np.integer)):
        return int(key)
    if isinstance(key, str):
        return str(key)
    raise InputError(f"ground truth: {key!r} is not an id; expected numbers or texts")


def _locate(
    keys: Sequence[Id], names: Sequence[object] | None, count: int, parameter: str
) -> list[int]:
    """Return the row of each key. A number is a row, and a text is one of `names`.

    Args:
        keys: The keys.
        names: The name of each row; by default the number of the row, as a text.
        count: The number of rows.
        parameter: The parameter of `evaluate` that gives the names, for messages.

    Raises:
        InputError: A name occurs twice, or a key is unknown.
    """
    rows: dict[str, int] = {}
    if any(isinstance(key, str) for key in keys):
        for row, name in enumerate(range(count) if names is None else names):
            if rows.setdefault(str(name), row) != row:
                raise InputError(
                    f"{parameter}: {str(name)!r} occurs twice, but ground truth refers "
                    "to names; make them unique"
                )
    found = []
    for key in keys:
        row = rows.get(key, -1) if isinstance(key, str) else key
        if not 0 <= row < count:
            side = "target" if parameter == "names" else "query"
            raise InputError(
                f"ground truth names {side} {key!r}, but there are {count}: "
                f"expected rows 0 to {count - 1}, or names; pass ",
                Parameter(parameter),
                ", in the order of their vectors",
            )
        found.append(row)
    return found
