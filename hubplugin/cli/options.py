"""The options that several commands share, and their readers.

Files are checked and stores opened before any module that computes is imported, because
importing torch takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hubplugin.bank import Bank, holds_texts
from hubplugin.errors import InputError
from hubplugin.registry import open_store
from hubplugin.store import Store

StoreUrl = Annotated[
    str,
    typer.Argument(metavar="STORE", help="A URL; see `hubplugin --help`."),
]
BankFile = Annotated[
    str | None,
    typer.Option(
        "--bank",
        help="The query bank: .npy or .parquet; file#name selects a column. With --embed, texts: "
        "lines of .txt, or the column query, text or question of .jsonl, .csv, .tsv or .parquet. The default is the "
        "store's recorded queries (see the command bank); evaluate has no default.",
    ),
]
Answers = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="The answers to the bank's queries: vectors of targets, in a file as for a "
        "bank, or clicks. Clicks are a .csv with the columns query (its text, or "
        "its row counted from 0) and target (an id in the store), or an .npy with "
        "one id per query, -1 for none.",
    ),
]
Embed = Annotated[
    str | None,
    typer.Option(
        metavar="SPEC",
        help="How to embed texts: sentence-transformers:NAME or module:function.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A parameter of the method, for example --set tau=0.05.",
    ),
]
Show = Annotated[
    str | None,
    typer.Option(
        "--show",
        metavar="FIELD|FILE",
        help="Readable names of targets: a field in the store, or a file of texts (.txt, line i for the id i, or .json "
        "by id). The default is a field that is clearly a title or text.",
    ),
]
Images = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="A folder with pictures of targets for the report. File names must match "
        "the names given by --show.",
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE.html",
        help="Also write a report as one HTML file. It contains texts of targets and queries.",
    ),
]
PairsFrom = Annotated[
    str | None,
    typer.Option(
        metavar="FIELD",
        help="Learn a map from the texts in this field, such as titles (--learn uses "
        "answers). Needs --embed.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be done, but write nothing.")
]


def embedding(source: str | None, embed: str | None) -> str | None:
    """Return `embed`, the model of texts, if `source` has texts; None for vectors."""
    if source is None or not holds_texts(source, embed is not None):
        return None
    return embed


def bank_of(
    bank: str | None,
    answers: str | None,
    embed: str | None,
    *,
    others_embed: bool = False,
) -> Bank:
    """Return the bank of the typed options, after a check of its files.

    Without a file, the bank has no queries. With `others_embed`, the model was also
    typed for other texts, so the bank may consist of vectors.
    """
    if others_embed:
        embed = embedding(bank, embed)
    return Bank(bank, answers, embed=embed).look()


def open_inputs(
    store: str,
    bank: str | None,
    answers: str | None,
    embed: str | None,
    pairs_from: str | None,
) -> tuple[Store, Bank, Bank | None]:
    """Return the store, the bank, and the pairs from a field of the store.

    Files are checked before the store is opened. The pairs are None without a field.
    """
    examples = bank_of(bank, answers, embed, others_embed=pairs_from is not None)
    opened = open_store(store)
    if pairs_from is None:
        return opened, examples, None
    return opened, examples, Bank.from_field(opened, pairs_from, embed)


def parameters_of(method: str | None, settings: list[str] | None) -> dict[str, Any]:
    """Return the settings of `method` by name.

    Unknown names are refused here: among the keywords of `apply`, a setting such as
    force=1 would otherwise be taken for another argument.
    """
    from hubplugin.methods import METHODS, build_method

    if method is None:
        return {}
    parameters: dict[str, Any] = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(
                f"--set {setting!r}: expected NAME=VALUE, such as tau=0.05"
            )
        parameters[name] = value  # the method's configuration parses and checks it
    build_method(METHODS, method, parameters)
    return parameters
