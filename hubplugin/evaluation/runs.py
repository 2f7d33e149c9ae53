"""Run files, as TREC and ranx have them: rankings of other searches beside our own, and our own for other tools."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hubplugin.errors import InputError, Parameter, install
from hubplugin.evaluation.truth import row_by_name
from hubplugin.vectors import require_file

RunsLike = Mapping[str, str | os.PathLike[str]]
"""Run files by the label that each gets."""


def read_run(
    path: Path, queries: int, targets: int, query_names: Sequence[object] | None, names: Sequence[object] | None
) -> list[np.ndarray]:
    """The rows of the targets that a run file has for each query, by falling score; none for a query that it lacks.

    Its lines are 'query Q0 target rank score tag'. query_names, names: what it calls queries and targets; row numbers
    by default. Raises InputError for another file, and for names that are not known.
    """
    try:
        from ir_measures import read_trec_run
    except ImportError:
        raise InputError(f"reading {path.name} needs ir-measures; {install('evaluation')}") from None
    require_file(path, "run")
    try:
        with path.open(encoding="utf-8-sig") as file:
            entries = list(read_trec_run(file))
    except (OSError, ValueError):
        raise InputError(f"{path.name} is no run file: expected lines of 'query Q0 target rank score tag'") from None
    found: dict[int, list[tuple[float, int]]] = defaultdict(list)
    query_rows = row_by_name(query_names, queries, "query_names")
    target_rows = row_by_name(names, targets, "names")
    for entry in entries:
        for name, rows, what in ((entry.query_id, query_rows, "query_names"), (entry.doc_id, target_rows, "names")):
            if name not in rows:
                raise InputError(
                    f"{path.name} names {name!r}, which is not among the {len(rows)} known; pass ",
                    Parameter(what),
                    ", in the order of their vectors",
                )
        found[query_rows[entry.query_id]].append((-entry.score, target_rows[entry.doc_id]))
    ranked = ([row for _, row in sorted(found[query], key=lambda entry: entry[0])] for query in range(queries))
    return [np.array(list(dict.fromkeys(rows)), np.int64) for rows in ranked]


def write_run(
    path: Path, label: str, nearest: np.ndarray, query_names: Sequence[object], names: Mapping[int, str]
) -> None:
    """Writes the first targets of each query, places [q, k] that `names` names, as a run file. A score is k less the
    rank, since ranks are what is compared. Raises InputError for a name with a space in it, and a file that cannot be
    written."""
    tag, k = re.sub(r"\s+", "_", label), nearest.shape[1]
    lines = []
    for query, places in zip(query_names, nearest.tolist(), strict=True):
        for rank, place in enumerate((place for place in places if place >= 0), 1):
            for name in (str(query), names[place]):
                if not name or re.search(r"\s", name):
                    raise InputError(f"{name!r} cannot stand in a run file: expected names without spaces")
            lines.append(f"{query} Q0 {names[place]} {rank} {k - rank} {tag}\n")
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from None
