"""The options that several commands have, and how they are read.

Files are looked at, and stores opened, before anything is imported that computes: torch takes seconds.
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
    typer.Argument(metavar="STORE", help="A URL, which `hubplugin --help` explains."),
]
BankFile = Annotated[
    str | None,
    typer.Option(
        "--bank",
        help="The query bank: .npy, .npz, .safetensors or .parquet; file#name picks one. With --embed, texts: lines of "
        ".txt, or the column query, text or question of .jsonl, .csv, .tsv or .parquet. By default what is recorded of "
        "the store (see the command bank); in evaluate none.",
    ),
]
Answers = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="What the bank asks for. Vectors of such targets: a file, as for a bank. Or clicks: .csv with the columns "
        "query (its text, or its row from 0) and target (an id in the store), or .npy of one id for each query, -1 for "
        "none.",
    ),
]
Embed = Annotated[
    str | None,
    typer.Option(
        metavar="SPEC",
        help="Embeds texts: sentence-transformers:NAME or module:function.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A parameter, as --set tau=0.05"),
]
Show = Annotated[
    str | None,
    typer.Option(
        "--show",
        metavar="FIELD|FILE",
        help="What targets are called: a field in the store, or a file of texts (.txt, line i for the id i, or .json "
        "by id). By default a field that is plainly a title or text.",
    ),
]
Images = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Pictures of targets, called as --show says, for the report.",
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE.html",
        help="Also write a report: one HTML file to look at. It holds texts of targets and queries.",
    ),
]
PairsFrom = Annotated[
    str | None,
    typer.Option(
        metavar="FIELD",
        help="Texts of the targets in this field, such as titles, are pairs that teach a map, as answers do with "
        "--learn. Needs --embed.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be done, and write nothing.")
]


def embedding(source: str | list[str] | None, embed: str | None) -> str | None:
    """Return `embed`, the model of texts, for a bank of texts; a file of vectors needs none."""
    if source is None:
        return None
    if isinstance(source, str) and not holds_texts(source, embed is not None):
        return None
    return embed


def bank_of(
    bank: str | None,
    answers: str | None,
    embed: str | None,
    *,
    others_embed: bool = False,
) -> Bank:
    """Return the bank as it was typed, whose files were looked at.

    It has no queries where none are named. others_embed: something else has texts, so
    that the bank may be of vectors.
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
    """Return a store, the bank, and the pairs that a field of the store holds.

    Files are looked at first. Pairs are None if no field is named.
    """
    examples = bank_of(bank, answers, embed, others_embed=pairs_from is not None)
    opened = open_store(store)
    if pairs_from is None:
        return opened, examples, None
    return opened, examples, Bank.from_field(opened, pairs_from, embed)


def parameters_of(method: str | None, settings: list[str] | None) -> dict[str, Any]:
    """Return the settings of `method` by name.

    They are checked here, so that none can be taken for another argument of `apply`.
    """
    from hubplugin.methods import METHODS, build_method

    if method is None:
        return {}
    parameters: dict[str, Any] = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting!r}: expected NAME=VALUE, as tau=0.05")
        parameters[name] = value  # the method's configuration parses and checks it
    build_method(METHODS, method, parameters)
    return parameters
