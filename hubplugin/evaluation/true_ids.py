"""Ground truth by the ids that a store gives its targets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hubplugin.errors import InputError
from hubplugin.evaluation.truth import judgements_of, rows_from_file
from hubplugin.store import Id

TrueIds: TypeAlias = Sequence[Id | Sequence[Id]] | np.ndarray | str | os.PathLike[str]
"""For each query the id of its true target, or a list of them; -1 or an empty list where it is not known. Or a path: to
an .npy or .json file of that, or a qrels file whose targets are ids."""


def as_true_ids(source: TrueIds, queries: int, query_names: Sequence[object] | None = None) -> list[set[str]]:
    """`source` as the true ids of each query, as text; none where it is not judged. query_names: what a qrels file
    calls the queries; row numbers by default. Raises InputError where it cannot be used."""
    if isinstance(source, (str, os.PathLike)) and Path(source).suffix not in (".npy", ".json"):
        return _from_qrels(Path(source), queries, query_names)
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


def _from_qrels(path: Path, queries: int, query_names: Sequence[object] | None) -> list[set[str]]:
    rows = {str(name): row for row, name in enumerate(query_names if query_names is not None else range(queries))}
    found: list[set[str]] = [set() for _ in range(queries)]
    for judgement in judgements_of(path):
        if judgement.query_id not in rows:
            raise InputError(
                f"ground truth {path.name}: query {judgement.query_id!r} is not among the {len(rows)} known"
            )
        found[rows[judgement.query_id]].add(judgement.doc_id)
    if not any(found):
        raise InputError(f"ground truth {path.name} names no true target for any query; at least one is needed")
    return found
