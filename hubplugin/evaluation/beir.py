"""The reader of BEIR folders: corpus.jsonl, queries.jsonl and qrels/test.tsv."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hubplugin.bank.texts import read_columns
from hubplugin.errors import InputError
from hubplugin.evaluation.truth import read_qrels
from hubplugin.vectors import require_file


@dataclass(frozen=True)
class Beir:
    """A BEIR data set.

    documents, ids: The title and text of each document, and the ids [n].
    queries, query_ids: The queries that have a relevant document, and their ids [q].
    qrels: The file of the relevant documents.
    """

    documents: list[str]
    ids: list[str]
    queries: list[str]
    query_ids: list[str]
    qrels: Path


def read_beir(folder: Path) -> Beir:
    """Read the data set in `folder`, with its test queries.

    Raises InputError if a file is missing or malformed, or if the corpus has no texts.
    """
    qrels = folder / "qrels" / "test.tsv"
    judged = {query for query, _, _ in read_qrels(qrels)}
    documents = _texts(folder / "corpus.jsonl")
    queries = _texts(folder / "queries.jsonl")
    query_ids = [key for key in queries if key in judged]
    if not query_ids:
        raise InputError(
            f"{str(folder)!r} has no queries for {qrels.name}; expected a BEIR folder"
        )
    asked = [queries[key] for key in query_ids]
    return Beir([*documents.values()], [*documents], asked, query_ids, qrels)


def _texts(path: Path) -> dict[str, str]:
    """Return the title and text in each line, by id."""
    require_file(path, "BEIR")
    keys, titles, texts = read_columns(path, ("_id",), ("title",), ("text",))
    if not keys or not texts or None in (*keys, *texts):
        raise InputError(f"{path.name}: expected _id and text in each line, as in BEIR")
    titles = titles or [None] * len(texts)
    found = {}
    for key, title, text in zip(keys, titles, texts, strict=True):
        # An empty document can still be found.
        found[str(key)] = f"{title or ''} {text}".strip() or " "
    return found
