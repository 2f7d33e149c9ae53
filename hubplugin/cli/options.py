"""The options that several commands have, and how they are read."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hubplugin.atomic import lack_of_room
from hubplugin.bank import Bank
from hubplugin.cli.application import Answer
from hubplugin.compute import Compute
from hubplugin.errors import InputError
from hubplugin.model import Setting
from hubplugin.report import Report, facts_of
from hubplugin.store import Store
from hubplugin.vectors import Progress, require_file

StoreUrl = Annotated[str, typer.Argument(metavar="STORE", help="A URL, which `hubplugin --help` explains.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter, as --set tau=0.05")
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
    Path | None, typer.Option("--report", metavar="FILE.html", help="Also write a report: one HTML file to look at.")
]
Device = Annotated[str, typer.Option(help="auto is cuda, then mps, then cpu.")]
Memory = Annotated[str, typer.Option(help="Bounds the similarities held at one time.")]
BankFile = Annotated[
    str | None,
    typer.Option(
        help="The query bank: .npy, .npz, .safetensors or .parquet; file#name picks one. With --embed, texts: lines of "
        ".txt, or the column query, text or question of .jsonl, .csv, .tsv or .parquet. By default what is recorded of "
        "the store (see the command bank); in evaluate none."
    ),
]
Embed = Annotated[
    str | None,
    typer.Option(metavar="SPEC", help="Embeds texts: sentence-transformers:NAME, fastembed:NAME or module:function."),
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


@dataclass(frozen=True)
class BankOptions:
    """a bank"""

    bank: BankFile = None
    answers: Answers = None
    embed: Embed = None


@dataclass(frozen=True)
class ReportOptions:
    """names and reports"""

    names: TargetNames = None
    report: ReportFile = None


@dataclass(frozen=True)
class ComputeOptions:
    """computing"""

    device: Device = "auto"
    memory: Memory = "1GiB"

    def compute(self, progress: Progress | None) -> Compute:
        return Compute(self.device, self.memory, progress)


# Files are looked at, and stores opened, before anything is imported that computes: torch takes seconds.


def bank_of(banks: BankOptions) -> Bank:
    """The bank as it was typed, whose files were looked at; without queries where none are named."""
    return Bank(banks.bank, banks.answers, embed=banks.embed).look()


def vectors(path: str | None, name: str) -> Any:
    """The vectors in the file `path`; `name` is what errors call them."""
    from hubplugin.vectors import as_vectors

    return None if path is None else as_vectors(path, name)


def require_files(read: Sequence[str | None], written: Sequence[Path | None]) -> None:
    """Raises InputError where a file is not there, or cannot be written: before the work, not behind it."""
    for path_read in read:
        if path_read is not None:
            require_file(Path(path_read))
    for path in written:
        if path is not None and path.is_dir():
            raise InputError(f"cannot write {str(path)!r}: it is a folder; expected a file")
        if path is not None and not path.parent.is_dir():
            raise InputError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")
        if path is not None and (lack := lack_of_room(Path(os.path.realpath(path)).parent, needed=1)):
            raise InputError(f"cannot write {str(path)!r}: {lack}")


def parameters_of(method: str, settings: list[str] | None) -> dict[str, Setting]:
    """The settings by name: parameters of `method`, so that none can be taken for another argument of `apply`."""
    parameters: dict[str, Setting] = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting!r}: expected NAME=VALUE, as in --set tau=0.05")
        parameters[name] = value  # text; the method's configuration parses and checks it
    from hubplugin.methods import METHODS, configured

    configured(METHODS, method, parameters)
    return parameters


def answer(report: Report, result: object, path: Path | None = None, store: Store | None = None) -> Answer:
    """What a command answers by the `report` of a `result`, which is also written to `path` where one was given. Its
    page names the command that was typed."""
    if path is not None:
        from hubplugin.report.render import write_page

        named = {} if store is None else {"store": store.url}
        write_page(replace(report, facts={**named, **report.facts}), path, typed())
    return Answer(report, told(store, result))


def told(store: Store | None, result: object) -> dict[str, object]:
    """The figures of `result`, a job's, and of which store they are where it does not say so."""
    return facts_of(result) if store is None else {"store": store.url, **facts_of(result)}


def typed() -> str:
    """The command line as it was typed, without what is secret in its URLs."""
    from hubplugin.registry import without_secrets

    return shlex.join(["hubplugin", *(without_secrets(each) if ":" in each else each for each in sys.argv[1:])])
