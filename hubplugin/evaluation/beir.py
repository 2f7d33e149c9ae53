"""A folder as BEIR has it: corpus.jsonl, queries.jsonl, and qrels/SPLIT.tsv."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hubplugin.bank.texts import read_columns
from hubplugin.errors import InputError
from hubplugin.evaluation.truth import read_qrels
from hubplugin.vectors import require_file


@dataclass(frozen=True)
class Beir:
    """documents [n]: title and text of each, ids [n]. queries [q]: those with a relevant document, query_ids [q].
    qrels: the file that says which."""

    documents: list[str]
    ids: list[str]
    queries: list[str]
    query_ids: list[str]
    qrels: Path


def read_beir(folder: Path, split: str = "test") -> Beir:
    """Reads a data set of BEIR from `folder`, with the qrels of `split`. Raises InputError for a file that is missing
    or of another form, and for a corpus without texts."""
    qrels = folder / "qrels" / f"{split}.tsv"
    judged = {query for query, _, _ in read_qrels(qrels)}
    documents = _texts(folder / "corpus.jsonl")
    queries = _texts(folder / "queries.jsonl")
    queries = {key: text for key, text in queries.items() if key in judged}
    if not queries:
        raise InputError(
            f"{str(folder)!r} has no queries of {qrels.name}; expected a BEIR folder"
        )
    return Beir(
        list(documents.values()),
        list(documents),
        list(queries.values()),
        list(queries),
        qrels,
    )


def _texts(path: Path) -> dict[str, str]:
    """Return title and text of each line by its id."""
    require_file(path, "BEIR")
    columns = read_columns(path, ("_id", "title", "text"))
    texts = columns.get("text", [])
    titles = columns.get("title", [None] * len(texts))
    keys = columns.get("_id", [])
    if not keys or not texts or None in keys or None in texts:
        raise InputError(f"{path.name} has no _id and text in each line, as BEIR has")
    found = {}
    for key, title, text in zip(keys, titles, texts, strict=True):
        # An empty document can still be found.
        found[str(key)] = f"{title or ''} {text}".strip() or " "
    return found
