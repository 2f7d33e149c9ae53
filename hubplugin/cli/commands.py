"""The command line: one thin function a command, over the Python API that says the same."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from hubplugin._version import __version__
from hubplugin.cli.wording import LogLines, as_typed, say, warn
from hubplugin.errors import HubpluginError, InputError, Parameter
from hubplugin.model import Setting


class Commands(TyperGroup):
    """The commands. Errors and warnings are one line each on stderr and speak of what is typed."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: warn(str(message))
            try:
                return super().invoke(ctx)
            except HubpluginError as error:
                command = self.commands[str(ctx.invoked_subcommand)]
                say(error.worded(lambda parameter: as_typed(parameter, command)))
                raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    help="Mends hubness in vector search: one offset per target, stored in your Faiss index or Qdrant collection.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StoreUrl = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        help="faiss:FILE, qdrant://HOST:6333/COLLECTION, qdrant+https://..., qdrant-local:PATH/COLLECTION, "
        "qdrant-edge:PATH. Options follow behind a ?, in quotes: 'faiss:FILE?metric=dot' (or cosine) where the metric "
        "is detected wrongly; 'qdrant://...?using=VECTOR&storage=payload': which vector, and where offsets lie "
        "(payload or vector).",
    ),
]
Queries = Annotated[
    str, typer.Option(help="The query bank: .npy, .npz, .safetensors or .parquet; file#name picks one.")
]
TargetBank = Annotated[str | None, typer.Option(help="A second bank, of example targets.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter, as --set tau=0.05")
]
Paired = Annotated[
    bool | None,
    typer.Option("--pairs/--no-pairs", help="Row i of both banks is a pair; detected by default."),
]
Clicks = Annotated[
    str | None,
    typer.Option(help="A log's clicks: .npy of the id in the store that each bank query led to, -1 for none."),
]
SameKind = Annotated[
    bool, typer.Option("--same-kind", help="Documents are asked by documents: a bank of documents is no objection.")
]
Device = Annotated[str, typer.Option(help="auto is cuda, then mps, then cpu.")]
Memory = Annotated[str, typer.Option(help="Bounds the similarities held at one time.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hubplugin {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def apply(
    store: StoreUrl,
    queries: Queries,
    target_bank: TargetBank = None,
    method: Annotated[str, typer.Option(help="blend, is, sn, dbsn, dualis, nnn, csls, dn or auto.")] = "blend",
    settings: Settings = None,
    pairs: Paired = None,
    clicks: Clicks = None,
    same_kind: SameKind = False,
    group_by: Annotated[
        str | None, typer.Option(help="A payload key that searches are filtered by: fit within each of its values.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Apply it even if it would not help.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Fit and check, and write nothing.")] = False,
    device: Device = "auto",
    memory: Memory = "1GiB",
) -> None:
    """Fit, check, write, activate; resumes where it was cut off."""
    from hubplugin.progress import bars
    from hubplugin.registry import open_store

    bank, second = _bank(queries, "query bank"), _bank(target_bank, "target bank")
    known = _known(pairs, clicks, target_bank)
    opened = open_store(store)

    from hubplugin.jobs.correction import apply

    parameters = _parameters(method, settings)
    with bars() as progress:
        applied = apply(
            opened, bank, method, second,
            pairs=known, same_kind=same_kind, group_by=group_by, force=force, dry_run=dry_run,
            device=device, memory=memory, progress=progress, **parameters,
        )  # fmt: skip
    typer.echo(f"{opened.url}: {applied}")


@app.command()
def diagnose(
    store: StoreUrl,
    queries: Queries,
    target_bank: TargetBank = None,
    pairs: Paired = None,
    clicks: Clicks = None,
    same_kind: SameKind = False,
    device: Device = "auto",
    memory: Memory = "1GiB",
) -> None:
    """Is there hubness, who are the hubs, would a correction help? Changes nothing."""
    from hubplugin.progress import bars
    from hubplugin.registry import open_store

    bank, second = _bank(queries, "query bank"), _bank(target_bank, "target bank")
    known = _known(pairs, clicks, target_bank)
    opened = open_store(store)

    from hubplugin.jobs.diagnosis import diagnose

    with bars() as progress:
        found = diagnose(
            opened, bank, second, pairs=known, same_kind=same_kind, device=device, memory=memory, progress=progress
        )
    typer.echo(str(found))


@app.command()
def refresh(store: StoreUrl, device: Device = "auto", memory: Memory = "1GiB") -> None:
    """Write only the offsets that are missing or outdated."""
    from hubplugin.progress import bars
    from hubplugin.registry import open_store

    opened = open_store(store)

    from hubplugin.jobs.writing import refresh

    with bars() as progress:
        applied = refresh(opened, device=device, memory=memory, progress=progress)
    typer.echo(f"{opened.url}: {applied}")


@app.command()
def remove(store: StoreUrl) -> None:
    """Take the correction out; the store is as if it had never been there."""
    from hubplugin.progress import bars
    from hubplugin.registry import open_store

    opened = open_store(store)
    found = opened.correction()
    with bars() as progress:
        opened.remove(progress)
    typer.echo(f"{opened.url}: {'correction removed' if found else 'there was no correction'}")


@app.command()
def inspect(store: StoreUrl, device: Device = "auto", memory: Memory = "1GiB") -> None:
    """Say what correction lies in the store, and whether it is whole."""
    from hubplugin.progress import bars
    from hubplugin.registry import open_store

    opened = open_store(store)

    from hubplugin.jobs.inspection import inspect

    with bars() as progress:
        found = inspect(opened, device=device, memory=memory, progress=progress)
    typer.echo(str(found))


TrueTargets = Annotated[
    str | None,
    typer.Option(help="Target rows of each query (.npy, .json) or qrels (TREC, BEIR); without it, row i to row i."),
]
ExampleQueries = Annotated[str | None, typer.Option(help="Example queries; needed by all methods but otn, l2n, hn.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(help="As 'dbsn' or 'nnn k=128 alpha=0.75', or auto; may be repeated. All additive ones by default."),
]
Thumbnails = Annotated[str | None, typer.Option(help="An image for each target: a text file, one path a line.")]
Temperatures = Annotated[
    list[float] | None, typer.Option(help="A further temperature for is, sn and dbsn; may be repeated.")
]


@app.command()
def evaluate(
    queries: Annotated[str, typer.Option(help="Queries whose true targets are known: a file, as for a bank.")],
    targets: Annotated[str, typer.Option(help="The gallery: a file, as for a bank.")],
    truth: TrueTargets = None,
    query_bank: ExampleQueries = None,
    target_bank: TargetBank = None,
    method: Methods = None,
    k: Annotated[int, typer.Option(help="Cut-off k for hubness, mAP and nDCG.")] = 10,
    names: Annotated[str | None, typer.Option(help="What the targets are called: a text file, one a line.")] = None,
    query_names: Annotated[str | None, typer.Option(help="What a qrels file calls the queries: likewise.")] = None,
    thumbnails: Thumbnails = None,
    temperature: Temperatures = None,
    metric: Annotated[str, typer.Option(help="cosine, dot or euclidean.")] = "cosine",
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write a report: one HTML file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write every figure as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write one line a method as CSV.")] = None,
    device: Device = "auto",
    memory: Memory = "1GiB",
) -> None:
    """Every method side by side on queries whose true targets are known, with confidence intervals."""
    from hubplugin.progress import bars

    asked, gallery = _bank(queries, "queries"), _bank(targets, "targets")
    bank, second = _bank(query_bank, "query bank"), _bank(target_bank, "target bank")
    auto = "auto" in (method or [])
    if auto and query_bank is None:
        raise InputError("method 'auto' chooses on example queries: pass ", Parameter("query_bank"))
    _require_files(read=(truth, names, query_names, thumbnails), written=(json, csv, report))

    from hubplugin.evaluation.evaluate import evaluate
    from hubplugin.fitting import fit

    with bars() as progress:
        computing: dict[str, Any] = {"metric": metric, "device": device, "memory": memory, "progress": progress}
        models = {"auto": fit(bank, "auto", gallery, second, **computing)} if auto else {}
        found = evaluate(
            asked, gallery, truth, bank, second,
            [name for name in method if name not in models] if method else None, models, k,
            names, query_names, thumbnails, temperature, seed=seed, **computing,
        )  # fmt: skip
    Console().print(found)
    for path, write in ((json, found.to_json), (csv, found.to_csv), (report, found.to_html)):
        if path is not None:
            write(path)
            typer.echo(f"wrote {path}")


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where the index and the collection are built.")] = Path(".demo"),
) -> None:
    """Correct an index and a shard of the data that comes with hubplugin, and show the gain."""
    from hubplugin.cli.demo import run

    run(folder)


# Files are looked at, and stores opened, before anything is imported that computes: torch takes seconds.


def _bank(path: str | None, name: str) -> Any:
    """The vectors in the file `path`; `name` is what errors call them."""
    from hubplugin.vectors import as_vectors

    return None if path is None else as_vectors(path, name)


def _known(pairs: bool | None, clicks: str | None, target_bank: str | None) -> Any:
    """`pairs` as the API takes them, from either option."""
    if clicks is None:
        return pairs
    if target_bank is not None:
        raise InputError("--clicks name targets of the store, --target-bank targets outside of it; give one of them")
    import numpy as np

    try:
        return np.load(clicks, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"--clicks: cannot read {clicks!r} as .npy: {error}") from None


def _require_files(read: Sequence[str | None], written: Sequence[Path | None]) -> None:
    """Raises InputError where a file is not there, or cannot be written: before the work, not behind it."""
    for given in read:
        if given is not None and not Path(given).is_file():
            raise InputError(f"there is no file {given!r}")
    for path in written:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise InputError(f"cannot write {str(path)!r}: expected a file in a folder that is there")


def _parameters(method: str, settings: list[str] | None) -> dict[str, Setting]:
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


def main() -> None:
    """Runs the command line; an error of hubplugin's is one line on stderr and exit status 1."""
    logging.basicConfig(level=logging.WARNING, handlers=[LogLines()])
    app()
