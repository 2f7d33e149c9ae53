"""A folder as BEIR has it: corpus.jsonl, queries.jsonl, and qrels/SPLIT.tsv."""

from __future__ import annotations

from collections.abc import Iterator
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
    judged = {judgement.query for judgement in read_qrels(qrels)}
    documents = dict(_texts(folder / "corpus.jsonl"))
    queries = {
        key: text for key, text in _texts(folder / "queries.jsonl") if key in judged
    }
    if not documents or not queries:
        lacking = "documents" if not documents else f"queries of {qrels.name}"
        raise InputError(f"{str(folder)!r} has no {lacking}; expected a BEIR folder")
    return Beir(
        list(documents.values()),
        list(documents),
        list(queries.values()),
        list(queries),
        qrels,
    )


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """The id of each line, and its title and text."""
    require_file(path, "BEIR")
    columns = read_columns(path, ("_id", "title", "text"))
    if not {"_id", "text"} <= columns.keys():
        raise InputError(f"{path.name} has no _id and text, as BEIR has them")
    for row, (key, text) in enumerate(
        zip(columns["_id"], columns["text"], strict=True), 1
    ):
        if key is None or text is None:
            raise InputError(
                f"{path.name}: line {row} has no _id and text, as BEIR has them"
            )
        title = columns["title"][row - 1] if "title" in columns else None
        yield (
            key,
            " ".join(part for part in (title, text) if part) or " ",
        )  # an empty document can still be found
