"""The query bank of a command: --queries, which may be texts, or what is recorded of the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hubplugin.errors import InputError, Parameter
from hubplugin.store import Store
from hubplugin.texts import Texts, embedded, holds_texts, read_clicks, read_texts
from hubplugin.vectors import Progress, Vectors, as_vectors

Queries = Annotated[
    str | None,
    typer.Option(
        help="The query bank: .npy, .npz, .safetensors or .parquet; file#name picks one. With --embed, texts: .txt, "
        ".jsonl, .csv, .tsv or .parquet. By default what is recorded of the store (see the command bank)."
    ),
]
Embed = Annotated[
    str | None,
    typer.Option(
        metavar="SPEC",
        help="Embeds texts: sentence-transformers:NAME, fastembed:NAME or module:function. Vectors are kept, so that "
        "only what is new is embedded again.",
    ),
]
Field = Annotated[
    str | None, typer.Option(help="The column or JSON key of the texts; query, text or question by default.")
]
Clicks = Annotated[
    str | None,
    typer.Option(
        help="A log's clicks: .csv with the columns query (its text, or its row from 0) and target (an id in the "
        "store), or .npy of one id for each bank query, -1 for none."
    ),
]


@dataclass(frozen=True)
class GivenQueries:
    """What was typed, looked at before a store is opened. vectors, texts: one of them, or neither for the record."""

    vectors: Vectors | None
    texts: Texts | None
    embed: str | None
    clicks: str | None

    @classmethod
    def of(cls, queries: str | None, embed: str | None, field: str | None, clicks: str | None) -> GivenQueries:
        if clicks is not None and not Path(clicks).is_file():
            raise InputError(f"--clicks: there is no file {clicks!r}")
        if queries is None or (embed is None and not holds_texts(queries)):
            for option, value in (("embed", embed), ("field", field)):
                if value is not None:
                    raise InputError(Parameter(option, value), " is for texts; pass them as ", Parameter("queries"))
            return cls(None if queries is None else as_vectors(queries, "query bank"), None, None, clicks)
        texts = read_texts(queries, field)
        if embed is None:
            raise InputError(
                f"{texts.name} has texts; name the model that embeds queries: ",
                Parameter("embed", "sentence-transformers:NAME"),
                ", fastembed:NAME or module:function",
            )
        return cls(None, texts, embed, clicks)

    def bank(self, store: Store, progress: Progress | None) -> Vectors:
        """The bank for `store`; raises InputError if nothing was given and nothing is recorded."""
        if self.vectors is not None:
            return self.vectors
        if self.texts is not None and self.embed is not None:
            name = self.texts.name
            return as_vectors(embedded(self.texts.texts, self.embed, name, progress, store.dim), name)
        recorded = store.recorded()
        if recorded is None:
            place = "" if store.record is None else f" in {store.record}"
            raise InputError(
                f"{store.url}: no queries are recorded{place}; pass ", Parameter("queries"),
                f", vectors or a log's texts with their model, or collect queries: {store.how_to_record()}",
            )  # fmt: skip
        return recorded

    def pairs(self, bank: Vectors, pairs: bool | None, target_bank: str | None) -> Any:
        """`pairs` as the API takes them, from either option."""
        if self.clicks is None:
            return pairs
        if target_bank is not None:
            raise InputError(
                "clicks name targets of the store, a target bank is outside of it; pass ", Parameter("clicks"),
                " or ", Parameter("target_bank"),
            )  # fmt: skip
        if self.texts is not None:
            return read_clicks(self.clicks, bank.rows, self.texts.texts, self.texts.rows)
        return read_clicks(self.clicks, bank.rows, getattr(bank, "texts", None))
