"""The options that several commands have, and how they are read.

Files are looked at, and stores opened, before anything is imported that computes: torch takes seconds.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from hubplugin.atomic import lack_of_room
from hubplugin.bank import Bank, holds_texts
from hubplugin.errors import InputError
from hubplugin.registry import without_secrets
from hubplugin.results import Result

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
TargetNames = Annotated[
    str | None,
    typer.Option(
        "--names",
        metavar="FILE",
        help="What targets are called: a text file with the name of id i in line i, or a .json file of names by id.",
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE.html",
        help="Also write a report: one HTML file to look at.",
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


def pairs_of(store: Any, field: str | None, embed: str | None) -> Bank | None:
    """Return what is in a field of a store, as pairs; None where none is named."""
    if field is None:
        return None
    return Bank.from_field(store, field, embed)


def parameters_of(method: str, settings: list[str] | None) -> dict[str, Any]:
    """Return the settings of `method` by name, so that none can be taken for another argument of `apply`."""
    from hubplugin.methods import METHODS, build_method

    parameters: dict[str, Any] = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting!r}: expected NAME=VALUE, as tau=0.05")
        parameters[name] = value  # the method's configuration parses and checks it
    build_method(METHODS, method, parameters)
    return parameters


def require_writable(path: Path | None) -> None:
    """Raise InputError where a file cannot be written: before the work, not behind it."""
    if path is None:
        return
    folder = Path(os.path.realpath(path)).parent
    lack = lack_of_room(folder, needed=1) if folder.is_dir() else "there is no folder"
    if path.is_dir():
        lack = "it is a folder; expected a file"
    if lack:
        raise InputError(f"cannot write {str(path)!r}: {lack}")


Shown = TypeVar("Shown", bound=Result)


def write_report(result: Shown, path: Path | None) -> Shown:
    """Return `result`; write its page, with the command that was typed, to `path` where one is given."""
    if path is not None:
        # Without what is secret in its URLs.
        words = [without_secrets(word) if ":" in word else word for word in sys.argv]
        result.to_html(path, shlex.join(["hubplugin", *words[1:]]))
    return result
