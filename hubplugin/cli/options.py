"""The options that several commands have, and how they are read."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from hubplugin.errors import InputError
from hubplugin.model import Setting

StoreUrl = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        help="faiss:FILE, qdrant://HOST:6333/COLLECTION, qdrant+https://..., qdrant-local:PATH/COLLECTION, "
        "qdrant-edge:PATH. Options follow behind a ?, in quotes: 'faiss:FILE?metric=dot' (or cosine) where the metric "
        "is detected wrongly; 'qdrant://...?using=VECTOR&storage=payload': which vector, and where offsets lie "
        "(payload or vector); '...?grpc=6334': the port for gRPC, which is faster; '...?record=FOLDER': where a client "
        "records queries.",
    ),
]
TargetBank = Annotated[str | None, typer.Option(help="A second bank, of example targets.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter, as --set tau=0.05")
]
Paired = Annotated[
    bool | None,
    typer.Option("--pairs/--no-pairs", help="Row i of both banks is a pair; detected by default."),
]
TargetNames = Annotated[
    str | None,
    typer.Option(
        "--names",
        metavar="payload.KEY|FILE",
        help="What targets are called: a key of the payload, as payload.title, or a text file with the name of id i in "
        "line i, or a .json file of names by id.",
    ),
]
Texts = Annotated[
    str | None,
    typer.Option(metavar="payload.KEY|FILE", help="The texts of targets, likewise: with them short ones are seen."),
]
ReportFile = Annotated[
    Path | None, typer.Option("--report", metavar="FILE.html", help="Also write a report: one HTML file to look at.")
]
SameKind = Annotated[
    bool, typer.Option("--same-kind", help="Documents are asked by documents: a bank of documents is no objection.")
]
Keep = Annotated[
    int, typer.Option(min=0, help="How many versions stay beside the new one, for rollback; each takes as much space.")
]
Dask = Annotated[
    str | None,
    typer.Option(
        "--dask", metavar="ADDRESS", help="Read, fit and write on a Dask cluster: tcp://scheduler:8786 (docs/scale.md)."
    ),
]
Shards = Annotated[int | None, typer.Option(help="With --dask: into how many parts the store is divided.")]
Workspace = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="With --dask: where a run that was cut off is taken up.")
]
Device = Annotated[str, typer.Option(help="auto is cuda, then mps, then cpu.")]
Memory = Annotated[str, typer.Option(help="Bounds the similarities held at one time.")]


# Files are looked at, and stores opened, before anything is imported that computes: torch takes seconds.


def vectors(path: str | None, name: str) -> Any:
    """The vectors in the file `path`; `name` is what errors call them."""
    from hubplugin.vectors import as_vectors

    return None if path is None else as_vectors(path, name)


def require_files(read: Sequence[str | None], written: Sequence[Path | None]) -> None:
    """Raises InputError where a file is not there, or cannot be written: before the work, not behind it."""
    for given in read:
        if given is not None and not Path(given).is_file():
            raise InputError(f"there is no file {given!r}")
    for path in written:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise InputError(f"cannot write {str(path)!r}: expected a file in a folder that is there")


@contextmanager
def workers(dask: str | None) -> Iterator[Any]:
    """The executor on the Dask cluster at an address, None without one."""
    if dask is None:
        yield None
        return
    from hubplugin.cluster import dask_cluster

    with dask_cluster(dask) as executor:
        yield executor


def parameters_of(method: str, settings: list[str] | None) -> dict[str, Setting]:
    """The settings by name: parameters of `method`, so that none can be taken for another argument of `apply`."""
    parameters: dict[str, Setting] = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting!r}: expected NAME=VALUE, as in --set tau=0.05")
        parameters[name] = value  # text; the method's configuration parses and checks it
    from hubplugin.methods import asked_for

    asked_for(method, parameters)
    return parameters


def write_report(page: Any, path: Path) -> None:
    """Writes `page`, with the command that was typed on it: no URL or option holds a secret."""
    from hubplugin.evaluation.page import write

    write(page, path, typed())


def typed() -> str:
    """The command line as it was typed."""
    return shlex.join(["hubplugin", *sys.argv[1:]])
